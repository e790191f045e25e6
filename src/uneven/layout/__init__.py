"""The values that everything passes around: axes, partitions, layouts, plans, segments. Pure Python.

May import nothing but `errors`.
"""

from uneven.layout.axis import LogicalAxis
from uneven.layout.grouping import MAX_GROUPS_PER_DEVICE, groups_of
from uneven.layout.memory import ElementBytes, Need, needs, shortfall
from uneven.layout.model import ModelLayout, ModelStructure, ParameterSpec
from uneven.layout.partition import Interval, Partition, apportion
from uneven.layout.placement import Band, Placement, Replicate, Shard
from uneven.layout.plan import ParallelPlan, ReplicaPlan, read_plan
from uneven.layout.ranges import Ranges, common, length, union, without
from uneven.layout.segments import Members, Segment, bundle_sizes, bundles_of, segments_of
from uneven.layout.shards import Copies, StateShard, shards_of
from uneven.layout.slabs import Slab, slabs_of
from uneven.layout.transfers import Holding, Holdings, Transfer, lost, parameters_held, states_held, transfers

__all__ = [
    "MAX_GROUPS_PER_DEVICE",
    "Band",
    "Copies",
    "ElementBytes",
    "Holding",
    "Holdings",
    "Interval",
    "LogicalAxis",
    "Members",
    "ModelLayout",
    "ModelStructure",
    "Need",
    "ParallelPlan",
    "ParameterSpec",
    "Partition",
    "Placement",
    "Ranges",
    "ReplicaPlan",
    "Replicate",
    "Segment",
    "Shard",
    "Slab",
    "StateShard",
    "Transfer",
    "apportion",
    "bundle_sizes",
    "bundles_of",
    "common",
    "groups_of",
    "length",
    "lost",
    "needs",
    "parameters_held",
    "read_plan",
    "segments_of",
    "shards_of",
    "shortfall",
    "slabs_of",
    "states_held",
    "transfers",
    "union",
    "without",
]
