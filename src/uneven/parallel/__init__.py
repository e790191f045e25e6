"""Stock transformers models, divided in place among the devices of a replica."""

from uneven.parallel.build import build_model
from uneven.parallel.describe import describe_config
from uneven.parallel.float64 import KeepFloat64
from uneven.parallel.initialize import fill_random
from uneven.parallel.parallelize import parallelize, take_ranges
from uneven.parallel.recompute import recompute_activations
from uneven.parallel.router import RouterLoss

__all__ = [
    "KeepFloat64",
    "RouterLoss",
    "build_model",
    "describe_config",
    "fill_random",
    "parallelize",
    "recompute_activations",
    "take_ranges",
]
