"""Whether a job's plan, and what it becomes after deaths, fits into the memory of its devices. Loads no torch."""

from collections.abc import Mapping
from itertools import combinations
from typing import final

from uneven.config import TrainConfig
from uneven.errors import ConfigError, PlanError
from uneven.layout import ElementBytes, ParallelPlan, lost, parameters_held, shards_of, shortfall, states_held
from uneven.planner import repartition


@final
class Memory:
    """What each device of a plan has, by the configuration. Raises ConfigError where that does not fit the plan."""

    def __init__(self, config: TrainConfig, home: ParallelPlan) -> None:
        given = config.elastic.memory
        devices = home.devices
        if given is not None and len(given) not in (1, len(devices)):
            raise ConfigError(
                f"elastic.memory: found {len(given)} numbers, needed is 1 for all devices, or {len(devices)} for each"
            )
        if given is None and config.elastic.survive:
            raise ConfigError(
                f"elastic.survive is {config.elastic.survive}: elastic.memory must say how much each device has"
            )
        self._copies = config.train.optimizer_copies
        self._bytes_of = ElementBytes.of(config.train.precision)
        values = (given or ()) if len(given or ()) != 1 else (given or ()) * len(devices)
        self._memory = dict(zip(devices, values, strict=True)) if given else None

    def shortfall(self, before: ParallelPlan | None, plan: ParallelPlan) -> str:
        """Who lacks what for a plan, or for the way to it from the one before; "" if nobody is known to."""
        if self._memory is None:
            return ""
        return shortfall(before, plan, memory=self._memory, copies=self._copies, bytes_of=self._bytes_of)

    def check(self, plan: ParallelPlan, *, survive: int, weights: Mapping[int, float] | None) -> None:
        """Raise PlanError unless the plan fits, also after any `survive` deaths that leave a copy of everything."""
        lacking = self.shortfall(None, plan)
        if lacking:
            raise PlanError(f"elastic.memory: the plan does not fit: {lacking}")
        for number in range(1, survive + 1):
            for dead in combinations(plan.devices, number):
                staying = [device for device in plan.devices if device not in dead]
                if not staying or self._is_lost(plan, staying):
                    continue
                after = repartition(plan, home=plan, devices=staying, weights=weights)
                lacking = self.shortfall(plan, after)
                if lacking:
                    raise PlanError(
                        f"elastic.survive is {survive}, but after the death of {_name(dead)} {lacking}; give each "
                        f"device a smaller part, by more devices or other shares, or survive fewer deaths"
                    )

    def _is_lost(self, plan: ParallelPlan, staying: list[int]) -> bool:
        """Whether something is held by none of these."""
        parameters, states = parameters_held(plan), states_held(plan, shards_of(plan, self._copies))
        return any(
            lost({device: held[device] for device in staying}, held, structure=plan.structure)
            for held in (parameters, states)
        )


def _name(devices: tuple[int, ...]) -> str:
    return f"device {devices[0]}" if len(devices) == 1 else f"devices {list(devices)}"
