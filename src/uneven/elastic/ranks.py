"""The ranks of an elastic job that one launcher has: what runs in them, and what tells that one has left early."""

from typing import Any

from uneven.comm import World
from uneven.errors import Left
from uneven.launch.launcher import Launcher, LaunchSettings
from uneven.launch.rank import Mailbox, Program
from uneven.layout import ParallelPlan

LEFT = "left"
"""The result of a device that has left before the end."""


def ranks_of(program: Program, args: tuple[Any, ...], *, home: ParallelPlan, settings: LaunchSettings) -> Launcher:
    """Those of this host, for a job that begins with the plan `home`."""
    return Launcher(_until_left, (program, *args), devices=home.devices, settings=settings)


def _until_left(world: World, mailbox: Mailbox, *args: Any) -> Any:
    program, *arguments = args
    try:
        return program(world, mailbox, *arguments)
    except Left:
        return LEFT
