"""The configuration of a job: keys, defaults, limits, and how files and flags become one. Pure Python."""

from uneven.config.load import load_config, parse_degrees, parse_shares
from uneven.config.train import Precision, TrainConfig

__all__ = ["Precision", "TrainConfig", "load_config", "parse_degrees", "parse_shares"]
