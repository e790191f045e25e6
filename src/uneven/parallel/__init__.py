"""Stock transformers models, divided in place among the devices of a replica."""

from uneven.parallel.build import build_model
from uneven.parallel.float64 import KeepFloat64
from uneven.parallel.initialize import fill_random
from uneven.parallel.parallelize import parallelize, take_ranges

__all__ = ["KeepFloat64", "build_model", "fill_random", "parallelize", "take_ranges"]
