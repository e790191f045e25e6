"""A training loop that outlives its devices, by hand: devices 0 and 1 divide one replica, device 2 holds the other.

Device 1 is killed at step 8, and its process is started again at step 20. The losses are those of a run in which
nothing happened.
"""

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from uneven.elastic.division import Recipe
from uneven.elastic.faults import parse_fault
from uneven.elastic.member import Member
from uneven.elastic.run import run
from uneven.elastic.supervisor import Supervision
from uneven.layout import ParallelPlan
from uneven.modelspec import parse_model

CONFIG = LlamaConfig(hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4, vocab_size=256)
FAULTS = (parse_fault("kill:device=1,step=8,phase=backward"), parse_fault("return:device=1,step=20"))
STEPS, BATCH = 150, 12


def build():
    """The same weights on every rank, whole; of them a rank keeps its part."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIG)


def train(world, mailbox):  # runs on every device
    batch = torch.randint(256, (BATCH, 32), generator=torch.Generator().manual_seed(1))
    member = Member(Recipe(build), world=world, mailbox=mailbox)
    losses = {}
    while member.step < STEPS:
        with member.begin() as step:  # left where a device is lost; the next one begins the same step
            mine = batch[member.plan.batch_range(member.replica, global_batch=BATCH)]
            member.reducer.begin()
            loss = member.model(input_ids=mine, labels=mine, num_items_in_batch=batch[:, 1:].numel()).loss
            loss.backward()
            part = loss.detach() * member.is_leader
            losses[step] = member.commit(member.reducer.finish(), [part], lr=3e-3, clip=1.0).values[0]
    return losses


if __name__ == "__main__":
    plan = ParallelPlan.from_shares(parse_model(CONFIG.to_dict()).structure, [[1, 1], [1]])
    quiet = run(train, plan)[2]
    lossy = run(train, plan, supervision=Supervision(faults=FAULTS), on_event=lambda event: print(event.line))[2]
    print(f"last loss {lossy[STEPS]:.4f}; largest difference {max(abs(lossy[n] - quiet[n]) for n in quiet):.1e}")
