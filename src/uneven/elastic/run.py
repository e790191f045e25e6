"""Run a member's program on every device of a plan, from a script, and outlive devices that fail."""

from collections.abc import Callable
from typing import Any

from uneven.elastic.coordinator import Coordinator
from uneven.elastic.fleet import Fleet
from uneven.elastic.ranks import LEFT
from uneven.elastic.supervisor import Supervision, Supervisor
from uneven.goodput import Event
from uneven.launch.launcher import LaunchSettings
from uneven.launch.rank import Program
from uneven.layout import ParallelPlan


def run(
    program: Program,
    plan: ParallelPlan,
    *args: Any,
    settings: LaunchSettings | None = None,
    supervision: Supervision | None = None,
    on_event: Callable[[Event], None] = lambda _: None,
) -> dict[int, Any]:
    """Call `program(world, mailbox, *args)` in a process for each device; the results of those that got to the end.

    `program` is a module-level function that makes a `Member`; a script calls `run` under
    `if __name__ == "__main__"`. `on_event` hears what happens to devices. Raises RankFailed for what a program raises,
    and QuorumLost if no device is left.
    """
    fleet = Fleet(program, args, home=plan, settings=settings or LaunchSettings())
    with Supervisor(fleet, coordinator=Coordinator(plan), supervision=supervision) as job:
        results = {}
        for found in job.events():
            if isinstance(found, Event):
                on_event(found)
            elif found.kind == "result" and found.payload != LEFT:
                results[found.device] = found.payload
    return results
