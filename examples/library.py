"""A hand-written training loop on two replicas of different degree: 3 devices as 2 + 1."""

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from uneven.comm import World
from uneven.launch.run import launch
from uneven.layout import ParallelPlan
from uneven.modelspec import parse_model
from uneven.optim import ShardedOptimizer
from uneven.parallel import parallelize
from uneven.sync import GradReducer

CONFIG = LlamaConfig(hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4, vocab_size=256)


def train(world: World) -> list[float]:
    plan = ParallelPlan.from_shares(parse_model(CONFIG.to_dict()).structure, [[1, 1], [1]])
    torch.manual_seed(0)  # every rank starts from the same whole model
    model = parallelize(AutoModelForCausalLM.from_config(CONFIG), plan.layout_of(world.device), world=world)
    reducer = GradReducer(model, plan, world=world)
    optimizer = ShardedOptimizer(model, plan, world=world)
    batch = torch.randint(256, (12, 32), generator=torch.Generator().manual_seed(1))
    mine = batch[plan.batch_range(plan.replica_of(world.device), global_batch=12)]  # 8 sequences or 4
    losses = []
    for _ in range(20):
        reducer.begin()
        loss = model(input_ids=mine, labels=mine, num_items_in_batch=batch[:, 1:].numel()).loss
        loss.backward()
        gradients = reducer.finish()
        gradients.clip(1.0, norm=gradients.norm())
        optimizer.step(gradients.tiles, lr=3e-3)
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    first, _, second = launch(train, num_devices=3)  # devices 0 and 1 are the first replica, 2 is the second
    print("loss of the global batch:", *(f"{a + b:.2f}" for a, b in zip(first, second, strict=True)))
