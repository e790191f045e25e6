"""A rank's part of a job under one plan: model, optimizer and gradients; and how it becomes that of another plan."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import final

import torch
from transformers import PreTrainedModel

from uneven.checkpoint.export import saved_buffers
from uneven.comm import Group, World
from uneven.layout import (
    Copies,
    Holdings,
    ModelLayout,
    ParallelPlan,
    ParameterSpec,
    Ranges,
    StateShard,
    lost,
    parameters_held,
    shards_of,
    states_held,
    transfers,
)
from uneven.optim import AdamW, ShardedOptimizer
from uneven.parallel import parallelize
from uneven.reshard import Exchange, copy_common
from uneven.sync import GradReducer
from uneven.sync.reducer import BUCKET_BYTES

PURPOSE = "reshard"


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a rank makes its part for any plan. `build` gives the undivided model, on the meta device."""

    build: Callable[[], PreTrainedModel]
    finish: Callable[[PreTrainedModel], None] = lambda _: None
    rule: AdamW = field(default_factory=AdamW)
    copies: Copies = 2
    bucket_bytes: int = BUCKET_BYTES


@final
class Division:
    """One rank's model and optimizer under `plan`; its reducer comes with `connect`."""

    def __init__(
        self, recipe: Recipe, plan: ParallelPlan, *, world: World, model: PreTrainedModel | None = None
    ) -> None:
        """With `model` given, that of another plan under which this rank has the same layout; else uninitialised."""
        self.recipe = recipe
        self.plan = plan
        self.layout: ModelLayout = plan.layout_of(world.device)
        self.replica = plan.replica_of(world.device)
        if model is None:
            model = parallelize(recipe.build(), self.layout, world=world)
            recipe.finish(model)
        else:
            world.group(self.layout.devices, purpose="tp")
        self.model = model
        self.optimizer = ShardedOptimizer(model, plan, world=world, rule=recipe.rule, copies=recipe.copies)
        self.reducer: GradReducer | None = None

    def connect(self, world: World) -> None:
        """Build the gradient buffers and their groups; called by all devices of the plan."""
        self.reducer = GradReducer(self.model, self.plan, world=world, bucket_bytes=self.recipe.bucket_bytes)

    def disconnect(self) -> None:
        """Give up gradient buffers and groups."""
        if self.reducer is not None:
            self.reducer.close()
            self.reducer = None


@dataclass(frozen=True, slots=True)
class Inventory:
    """What of the state some devices have: parameters, and the optimizer's state."""

    parameters: Holdings
    states: Holdings

    @classmethod
    def of(cls, plan: ParallelPlan, copies: Copies, *, gathered: Mapping[int, bool]) -> "Inventory":
        """That of the devices in `gathered`; who has not gathered has only what it updates itself up to date."""
        shards: tuple[StateShard, ...] = shards_of(plan, copies)
        states, parameters = states_held(plan, shards), parameters_held(plan)
        return cls(
            {device: parameters[device] if whole else states[device] for device, whole in gathered.items()},
            {device: states[device] for device in gathered},
        )

    @classmethod
    def wanted(cls, plan: ParallelPlan, copies: Copies) -> "Inventory":
        return cls.of(plan, copies, gathered=dict.fromkeys(plan.devices, True))

    def lacks(self, wanted: "Inventory", plan: ParallelPlan) -> tuple[tuple[ParameterSpec, Ranges], ...]:
        """What is wanted and nobody has."""
        structure = plan.structure
        return lost(self.parameters, wanted.parameters, structure=structure) + lost(
            self.states, wanted.states, structure=structure
        )


def move(old: Division | None, new: Division | None, *, have: Inventory, want: Inventory, group: Group) -> int:
    """Fill `new` with what `have` says that the group has; returns the bytes received. Called by all of the group.

    `old` is None on a device that joins, `new` on one that leaves. What stays on a device is copied there.
    """
    either = new or old
    assert either is not None
    structure = either.plan.structure
    before = group.traffic.received_bytes(PURPOSE)
    moves = transfers(have.parameters, want.parameters, structure=structure)
    source = {} if old is None else old.optimizer.parameters
    target = {} if new is None else new.optimizer.parameters
    if old is None or new is None or old.model is not new.model:
        copy_common(source, target)
    if moves:
        Exchange(moves, source=source, target=target, group=group).run(dtype=either.optimizer.dtype)
    moves = transfers(have.states, want.states, structure=structure)
    for kind in either.optimizer.kinds:
        source = {} if old is None else old.optimizer.tiles(kind)
        target = {} if new is None else new.optimizer.tiles(kind)
        copy_common(source, target)
        if moves:
            Exchange(moves, source=source, target=target, group=group).run(dtype=either.optimizer.precision)
    return group.traffic.received_bytes(PURPOSE) - before


def share_buffers(
    old: Division | None, new: Division | None, *, holders: Mapping[int, bool], want: Inventory, group: Group
) -> None:
    """Give `new` the buffers that belong to a model without being parameters, which every device has whole."""
    either = new or old
    assert either is not None
    source = {} if old is None else dict(saved_buffers(old.model))
    # Whether anyone joins is equal on all ranks.
    is_sent = not want.parameters.keys() <= holders.keys()
    giver = min(holders)
    for name, buffer in saved_buffers(either.model):
        found = source.get(name, torch.zeros_like(buffer))
        if is_sent:
            is_giver = group.devices[group.rank] == giver
            found = group.all_reduce(found.clone() if is_giver else torch.zeros_like(found))
        if new is not None:
            new.model.get_buffer(name).copy_(found)
