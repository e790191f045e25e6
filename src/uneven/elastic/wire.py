"""What crosses from host to host in an elastic job, as JSON: nothing that is received is ever run.

Between a launcher and its own ranks the same values are pickled.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, final

from pydantic import TypeAdapter

from uneven.elastic.faults import Reached, Stops
from uneven.elastic.quorum import Differs, Over, Quorum, Ready, Settled, Spent, Trouble, Wish
from uneven.launch.failure import Failure
from uneven.launch.rank import Beat
from uneven.layout import ModelStructure, ParallelPlan

PLAIN = (Stops, Reached, Differs, Over, Ready, Settled, Spent, Trouble, Wish, Beat)
"""Frozen dataclasses of numbers, words and tuples of such."""


@final
class Wire:
    """Values to and from JSON: ours, None, words, and a program's own `reports`, which are as plain as PLAIN.

    Plans are of `structure`, which all hosts know, and which is not sent.
    """

    def __init__(self, structure: ModelStructure, *, reports: Sequence[type] = ()) -> None:
        self._structure = structure
        self._adapters = {each.__name__: TypeAdapter(each) for each in (*PLAIN, *reports)}

    def encode(self, value: Any) -> list[Any]:
        """The name of its type, and JSON. Raises TypeError for what is not to cross."""
        name = type(value).__name__
        if value is None or isinstance(value, str):
            return ["", value]
        if isinstance(value, Quorum):
            return [name, _quorum_to_json(value)]
        if isinstance(value, Failure):
            return [name, value.to_json()]
        if isinstance(value, Spent):
            # Hosts have clocks of their own: what crosses is how long ago it was.
            value = replace(value, at_s=value.at_s - time.monotonic())
        if name not in self._adapters:
            raise TypeError(f"a {name} can't be sent to another host: it is none of {sorted(self._adapters)}")
        return [name, asdict(value)]

    def decode(self, message: Sequence[Any]) -> Any:
        """What was encoded. Raises ValueError, KeyError or TypeError for anything else."""
        name, value = message
        if not name:
            return value
        if name == Quorum.__name__:
            return self._quorum_from_json(value)
        if name == Failure.__name__:
            return Failure.from_json(value)
        found = self._adapters[name].validate_python(value)
        return replace(found, at_s=found.at_s + time.monotonic()) if isinstance(found, Spent) else found

    def _quorum_from_json(self, value: Mapping[str, Any]) -> Quorum:
        plans = {int(key): ParallelPlan.from_division(self._structure, each) for key, each in value["plans"].items()}
        checkpoint = None if value["checkpoint"] is None else Path(value["checkpoint"])
        generation, members = value["generation"], tuple(value["members"])
        furthest = value["furthest"]
        return Quorum(generation, members, plans[generation], value["is_planned"], checkpoint, plans, furthest)


def _quorum_to_json(quorum: Quorum) -> dict[str, Any]:
    """Its plan is one of its plans."""
    return {
        "generation": quorum.generation,
        "members": quorum.members,
        "is_planned": quorum.is_planned,
        "furthest": quorum.furthest,
        "checkpoint": None if quorum.checkpoint is None else str(quorum.checkpoint),
        "plans": {str(generation): plan.division_to_json() for generation, plan in quorum.plans.items()},
    }
