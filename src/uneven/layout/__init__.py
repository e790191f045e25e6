"""The values that everything passes around: axes, partitions, layouts, plans, segments. Pure Python.

May import nothing but `errors`.
"""

from uneven.layout.axis import LogicalAxis
from uneven.layout.model import ModelLayout, ModelStructure, ParameterSpec
from uneven.layout.partition import Interval, Partition, apportion
from uneven.layout.placement import Band, Placement, Replicate, Shard
from uneven.layout.plan import ParallelPlan, ReplicaPlan, read_plan
from uneven.layout.segments import Segment, segments_of

__all__ = [
    "Band",
    "Interval",
    "LogicalAxis",
    "ModelLayout",
    "ModelStructure",
    "ParallelPlan",
    "ParameterSpec",
    "Partition",
    "Placement",
    "ReplicaPlan",
    "Replicate",
    "Segment",
    "Shard",
    "apportion",
    "read_plan",
    "segments_of",
]
