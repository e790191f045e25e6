"""Every error that `uneven` raises on purpose.

A message says what could not be done, the value found, the value needed, where, and what to do.
Errors caused by the caller's input are also `ValueError`s; the command line turns them into exit code 2.
"""


class UnevenError(Exception):
    """Base of all errors of this package."""


class InputError(UnevenError, ValueError):
    """Something that the caller passed is wrong; the command line exits with 2."""


class ConfigError(InputError):
    """A configuration file, flag or key is wrong."""


class LayoutError(InputError):
    """A partition, layout or plan contradicts itself or its model."""


class PlanError(InputError):
    """No plan can be made from the devices and shares given, or a plan does not fit the job."""


class ModelError(InputError):
    """A model's configuration is not understood."""


class DataError(InputError):
    """A corpus or tokenizer can't be used."""


class GoodputError(InputError):
    """An account of time contradicts itself, or its files can't be read."""


class CheckpointError(UnevenError):
    """A model folder can't be written or read."""


class RankFailed(UnevenError):
    """A rank raised or died; carries the rank's own traceback."""


class PeerLost(UnevenError):
    """An operation will not be finished: a device is gone, or its job goes on with others."""


class Left(UnevenError):
    """A device has left its job, as it was asked to, or because the job is over."""


class QuorumLost(UnevenError):
    """The devices that are left can't go on with their job."""


class HostLost(UnevenError):
    """A host of the job did not come, or is gone."""


class Interrupted(UnevenError):
    """The user ended a command before it was done."""


class NonFiniteGradient(UnevenError):
    """Gradients stayed non-finite for more steps in a row than the policy allows."""
