"""See the saved folder as a user will: load it with plain transformers, evaluate it, let it write."""

from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from uneven.train.inputs import model_inputs
from uneven.train.job import Job
from uneven.train.records import Check


def check_folder(job: Job, folder: Path, *, device: torch.device) -> Check:
    """The held-out loss and a sample of text of the model in `folder`, each where the configuration asks for it.

    What goes wrong here is told and not raised: the model has been saved.
    """
    config = job.config
    if not config.eval.reload and not config.sample.tokens:
        return Check()
    disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(folder).to(device).eval()
        # Of a mixture: the loss without its balance, as the trainer takes it, by the code that knows every precision.
        model.config.output_router_logits = False
        model.set_experts_implementation("eager")
        loss = heldout_loss(job, model) if config.eval.reload else None
        return Check(loss, generate(job, model) if config.sample.tokens else None)
    except Exception as error:  # of transformers or the disk, whatever it is
        return Check(problem=f"{type(error).__name__}: {error}")


@torch.no_grad()
def heldout_loss(job: Job, model: PreTrainedModel) -> float:
    """Mean loss in nats per token on the held-out sequences that the trainer evaluates."""
    heldout = job.dataset.heldout.open()
    indices = range(min(job.config.eval.sequences, job.dataset.num_heldout))
    num_tokens = max(heldout.num_targets(indices), 1)
    total = 0.0
    for index in indices:
        inputs = model_inputs(heldout.rows([index]), device=model.device)
        total += float(model(**inputs, num_items_in_batch=num_tokens).loss)
    return total


def generate(job: Job, model: PreTrainedModel) -> str:
    """The prompt and its continuation; the same for the same seed."""
    sample = job.config.sample
    prompt = job.design.tokenizer.encode(sample.prompt).astype(np.int64)
    start = prompt if len(prompt) else np.array([job.design.tokenizer.eos_id or 0])
    torch.manual_seed(job.config.seed)
    ids = model.generate(
        torch.from_numpy(start[None]).to(model.device),
        attention_mask=torch.ones(1, len(start), dtype=torch.long, device=model.device),
        max_new_tokens=sample.tokens,
        do_sample=sample.temperature > 0,
        temperature=sample.temperature or None,
        top_k=0,
        pad_token_id=job.design.tokenizer.eos_id or 0,
    )
    return job.design.tokenizer.decode(ids[0].tolist())
