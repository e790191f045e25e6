"""The training loops that `recovery` compares with: run as a script, by other interpreters too, without `uneven`.

    recovery_peers.py torchrun|torchft CONFIG FOLDER SEQUENCES STEPS

Both train the stock model on a share of the batch, and write a line of JSON for each committed step. One saves a
checkpoint now and then, and starts from the newest; the other is what torchft's README shows.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

SEQ_LEN = 128
STEPS_PER_CHECKPOINT = 20


def build(config: str) -> Any:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(config), dtype=torch.float32)


def adamw(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)


def forward_backward(model: Any, *, vocab_size: int, sequences: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(vocab_size, (sequences, SEQ_LEN), generator=generator)
    model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def tell(folder: Path, rank: int, *, step: int, tokens: int) -> None:
    """A step is committed; from the first one on, the process of this rank takes part."""
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    with (folder / f"commits-{rank}.jsonl").open("a") as lines:
        lines.write(json.dumps({"step": step, "tokens": tokens}) + "\n")


def run_torchrun(config: str, folder: Path, sequences: int, steps: int) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = build(config)
    vocab_size = model.config.vocab_size
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    optimizer, step, checkpoint = adamw(parallel), 0, folder / "checkpoint.pt"
    if checkpoint.exists():
        state = torch.load(checkpoint)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    while step < steps:
        optimizer.zero_grad()
        forward_backward(parallel, vocab_size=vocab_size, sequences=sequences, seed=step * dist.get_world_size() + rank)
        optimizer.step()
        step += 1
        tell(folder, rank, step=step, tokens=sequences * SEQ_LEN * dist.get_world_size())
        if rank == 0 and step % STEPS_PER_CHECKPOINT == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, folder / "checkpoint.partial")
            os.replace(folder / "checkpoint.partial", checkpoint)
    dist.destroy_process_group()


def run_torchft(config: str, folder: Path, sequences: int, steps: int) -> None:
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    rank = int(os.environ["REPLICA_GROUP_ID"])
    model = build(config)
    vocab_size = model.config.vocab_size
    plain = adamw(model)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        plain.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": plain.state_dict()},
        min_replica_size=1,
        replica_id=f"replica-{rank}",
    )
    parallel = DistributedDataParallel(manager, model)
    optimizer = Optimizer(manager, plain)
    while manager.current_step() < steps:
        before = manager.current_step()
        optimizer.zero_grad()
        forward_backward(parallel, vocab_size=vocab_size, sequences=sequences, seed=3 * before + rank)
        optimizer.step()
        if manager.current_step() > before:
            tokens = sequences * SEQ_LEN * manager.num_participants()
            tell(folder, rank, step=manager.current_step(), tokens=tokens)
    manager.shutdown()


if __name__ == "__main__":
    _, peer, config, folder, sequences, steps = sys.argv
    {"torchrun": run_torchrun, "torchft": run_torchft}[peer](config, Path(folder), int(sequences), int(steps))
