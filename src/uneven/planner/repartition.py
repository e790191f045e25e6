"""What a plan becomes when devices leave or return: whoever stays keeps what it holds."""

from collections.abc import Collection, Mapping
from fractions import Fraction
from math import inf, lcm

from uneven.errors import PlanError
from uneven.layout import ParallelPlan, ReplicaPlan
from uneven.planner.succession import Succession


def repartition(
    plan: ParallelPlan, *, home: ParallelPlan, devices: Collection[int], weights: Mapping[int, float] | None = None
) -> ParallelPlan:
    """The plan of `devices`, made from the current one by moving no more than must be moved. Raises PlanError.

    `home` is the plan that the job started with: of replicas and devices it says the order, who belongs to whom, and
    how much of the batch a device carries. `weights` are speeds by device id, by default equal; a device's fair share
    of a module is in proportion to them, among the devices of its replica.

    In a replica from which devices have gone their units go to those left, none of whom is brought above its fair
    share rounded up. A device that joins takes units from whoever is most over its fair share, until it has its own,
    rounded down or up. Nothing else moves. A replica without devices is left out; one that comes back is divided anew.

    Module after module, four decisions are made, each among what the one before leaves equal:

    1. How many units: nobody below the fair share rounded down while another is above it.
    2. Who takes a remainder: whoever holds least, relative to its weight, of the modules divided so far, counting
       copies of key and value heads. So over all modules the slowest device has little more than the mean.
    3. Which units: those that bring no further copy of a key and value head; those that the device had at home; those
       that stay within tuples of owners that exist, since each tuple costs a gradient group; those beside its own.
    4. The earliest unit, to the device that is first at home. So the same arguments give the same plan.

    Replicas change one after another, so the third rule sees what the ones before have become.
    """
    _check(plan, home=home, devices=devices)
    whole = _whole_weights(home, weights)
    layouts = {home.replica_of(replica.layout.devices[0]): replica.layout for replica in plan.replicas}
    members = [tuple(device for device in replica.layout.devices if device in devices) for replica in home.replicas]
    layouts = {
        index: layouts.get(index, replica.layout) for index, replica in enumerate(home.replicas) if members[index]
    }
    survivors = frozenset(plan.devices).intersection(devices)
    for index, layout in layouts.items():
        if survivors.issuperset(members[index]) and layout.devices == members[index]:
            continue
        succession = Succession(
            members[index],
            survivors.intersection(members[index]),
            whole,
            home.replicas[index].layout,
            [other for i, other in layouts.items() if i != index],
        )
        layouts[index] = succession.layout_after(layout)
    shares = _batch_shares(home, members, weights=whole)
    return ParallelPlan(tuple(ReplicaPlan(layouts[index], share) for index, share in shares.items()))


def _check(plan: ParallelPlan, *, home: ParallelPlan, devices: Collection[int]) -> None:
    if plan.structure != home.structure:
        raise PlanError("the plan and the one that the job started with are of different models")
    if not devices:
        raise PlanError(f"no device is left; needed is at least one of {list(home.devices)}")
    strangers = sorted({*devices, *plan.devices}.difference(home.devices))
    if strangers:
        raise PlanError(f"devices {strangers} are not in the plan that the job started with: {list(home.devices)}")
    origins = [sorted({home.replica_of(device) for device in replica.layout.devices}) for replica in plan.replicas]
    if any(len(origin) > 1 for origin in origins) or len({origin[0] for origin in origins}) < len(origins):
        raise PlanError(f"each replica of the plan must be one of those that the job started with, found {origins}")
    most = max(axis.num_units for axis in home.structure.axes.values())
    for index, replica in enumerate(home.replicas):
        num_devices = len(set(devices).intersection(replica.layout.devices))
        if num_devices > most:
            raise PlanError(
                f"replica {index}: {num_devices} devices, but the model has no more than {most} units of any kind, so "
                f"a device would hold nothing; use at most {most} devices a replica"
            )


def _whole_weights(home: ParallelPlan, weights: Mapping[int, float] | None) -> dict[int, int]:
    """Whole numbers in proportion to the weights of all devices, as their decimals have them."""
    if weights is None:
        return dict.fromkeys(home.devices, 1)
    found = {device: weights.get(device) for device in home.devices}
    bad = {device: weight for device, weight in found.items() if weight is None or not 0 < weight < inf}
    if bad:
        raise PlanError(f"each device needs a positive number as its weight, found {bad}")
    return _whole({device: Fraction(str(float(weight))) for device, weight in found.items() if weight is not None})


def _batch_shares(
    home: ParallelPlan, members: Collection[Collection[int]], *, weights: Mapping[int, int]
) -> dict[int, int]:
    """By the replica's index at home, for those that have devices: the parts of the batch that these carry there."""
    carried = {}
    for index, (replica, present) in enumerate(zip(home.replicas, members, strict=True)):
        if present:
            all_weights = sum(weights[device] for device in replica.layout.devices)
            carried[index] = Fraction(replica.batch_share * sum(weights[device] for device in present), all_weights)
    return _whole(carried)


def _whole(numbers: Mapping[int, Fraction]) -> dict[int, int]:
    """The numbers times the least factor that makes all of them whole; so whole ones stay what they are."""
    factor = lcm(*(number.denominator for number in numbers.values()))
    return {key: int(number * factor) for key, number in numbers.items()}
