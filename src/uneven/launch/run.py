"""Run a function on every device of a plan: the shortest way from a script to a job."""

from collections.abc import Callable
from typing import Any

from uneven.comm import World
from uneven.launch.launcher import Launcher, LaunchSettings
from uneven.launch.rank import Mailbox


def launch(
    program: Callable[..., Any], *args: Any, num_devices: int, settings: LaunchSettings | None = None
) -> list[Any]:
    """Call `program(world, *args)` in a process for each of devices 0 to `num_devices` - 1; their results, in order.

    `program` is a module-level function; a script calls `launch` under `if __name__ == "__main__"`. Raises
    RankFailed with the traceback of the rank that failed first.
    """
    settings = settings or LaunchSettings()
    with Launcher(_without_mailbox, (program, *args), devices=range(num_devices), settings=settings) as job:
        results = {message.device: message.payload for message in job.messages() if message.kind == "result"}
    return [results[device] for device in range(num_devices)]


def _without_mailbox(world: World, _: Mailbox, *args: Any) -> Any:
    program, *arguments = args
    return program(world, *arguments)
