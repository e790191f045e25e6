"""Plans after a failure and after a return: survivors keep what they hold, a device that comes back is given its part.

The simplest rule that moves no more than it must. It leaves units scattered, and another scatter in every module: more
groups and less even loads than `uneven.planner.repartition`, which is compared with it, so it is harder on `groups_of`.
"""

from dataclasses import replace

from uneven.layout import ModelLayout, ParallelPlan, Partition, ReplicaPlan, apportion


def without_device(plan: ParallelPlan, dead: int) -> ParallelPlan:
    """The plan after `dead` is gone: the rest of its replica takes over its units, in turns that differ by module."""
    layout = plan.layout_of(dead)
    survivors = tuple(device for device in layout.devices if device != dead)
    partitions = {}
    for turn, (module, partition) in enumerate(layout.partitions.items()):
        first = turn % len(survivors)
        heirs = survivors[first:] + survivors[:first]
        counts = apportion(partition.count(dead), [1.0] * len(heirs))
        inheritance = iter([device for device, count in zip(heirs, counts, strict=True) for _ in range(count)])
        owners = tuple(next(inheritance) if owner == dead else owner for owner in partition.owners)
        partitions[module] = Partition(owners)
    return _replaced(plan, plan.replica_of(dead), devices=survivors, partitions=partitions)


def with_device(plan: ParallelPlan, returned: int, *, replica: int) -> ParallelPlan:
    """The plan after `returned` has joined a replica: each device gives up what it holds above an even share."""
    layout = plan.replicas[replica].layout
    devices = (*layout.devices, returned)
    partitions = {}
    for module, partition in layout.partitions.items():
        owners = list(partition.owners)
        fair = dict(zip(devices, apportion(len(owners), [1.0] * len(devices)), strict=True))
        surplus = {device: partition.count(device) - fair[device] for device in layout.devices}
        wanted = fair[returned]
        for unit, owner in enumerate(owners):
            if wanted and surplus[owner] > 0:
                surplus[owner] -= 1
                wanted -= 1
                owners[unit] = returned
        partitions[module] = Partition(tuple(owners))
    return _replaced(plan, replica, devices=devices, partitions=partitions)


def _replaced(
    plan: ParallelPlan, replica: int, *, devices: tuple[int, ...], partitions: dict[str, Partition]
) -> ParallelPlan:
    changed = ReplicaPlan(ModelLayout(plan.structure, devices, partitions), len(devices))
    return replace(plan, replicas=(*plan.replicas[:replica], changed, *plan.replicas[replica + 1 :]))
