"""What a plan becomes when devices leave or return."""

from collections.abc import Collection, Mapping
from fractions import Fraction
from math import inf, lcm

from uneven.errors import PlanError
from uneven.layout import ModelLayout, ParallelPlan, ReplicaPlan
from uneven.planner.heirs import Succession


def repartition(
    plan: ParallelPlan, *, home: ParallelPlan, devices: Collection[int], weights: Mapping[int, float] | None = None
) -> ParallelPlan:
    wanted = frozenset(devices)
    layouts = _present(plan, home=home, devices=wanted)
    whole = _whole_weights(home, weights)
    for index, layout in layouts.items():
        origin = home.replicas[index].layout
        members = tuple(device for device in origin.devices if device in wanted)
        if members != layout.devices:
            others = [other for i, other in layouts.items() if i != index]
            layouts[index] = Succession(members, whole, origin, others).apply(layout)
    shares = _batch_shares(home, layouts, weights=whole)
    return ParallelPlan(tuple(ReplicaPlan(layouts[i], shares[i]) for i in layouts))


def _present(plan: ParallelPlan, *, home: ParallelPlan, devices: frozenset[int]) -> dict[int, ModelLayout]:
    layouts = {home.replica_of(r.layout.devices[0]): r.layout for r in plan.replicas}
    found = {}
    for index, replica in enumerate(home.replicas):
        layout = layouts.get(index, replica.layout)
        if devices.intersection(replica.layout.devices):
            found[index] = layout if devices.intersection(layout.devices) else replica.layout
    return found


def _whole_weights(home, weights):
    if weights is None:
        return dict.fromkeys(home.devices, 1)
    fractions = {d: Fraction(str(float(weights[d]))) for d in home.devices}
    return dict(zip(fractions, _whole(list(fractions.values()))))

def _whole(f):
    m = lcm(*(x.denominator for x in f))
    return [int(x * m) for x in f]

def _batch_shares(home, layouts, *, weights):
    caps = []
    for index, layout in layouts.items():
        r = home.replicas[index]
        caps.append(Fraction(r.batch_share * sum(weights[d] for d in layout.devices), sum(weights[d] for d in r.layout.devices)))
    return dict(zip(layouts, _whole(caps)))
