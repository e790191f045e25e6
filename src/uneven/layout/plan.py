"""The job as a value: one layout and one share of the global batch for each replica."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from uneven.errors import InputError, PlanError
from uneven.layout.axis import require_whole
from uneven.layout.model import ModelLayout, ModelStructure
from uneven.layout.partition import Partition, apportion

FORMAT = "uneven.plan/1"


@dataclass(frozen=True, slots=True)
class ReplicaPlan:
    """`batch_share` is this replica's whole-number weight in the global batch."""

    layout: ModelLayout
    batch_share: int

    def __post_init__(self) -> None:
        require_whole("a replica", batch_share=self.batch_share)


@dataclass(frozen=True, slots=True)
class ParallelPlan:
    """All replicas of a job; they hold the same model and share no device."""

    replicas: tuple[ReplicaPlan, ...]

    def __post_init__(self) -> None:
        if not self.replicas:
            raise PlanError("a plan needs at least one replica")
        first = self.replicas[0].layout.structure
        for index, replica in enumerate(self.replicas):
            if replica.layout.structure != first:
                raise PlanError(f"replica {index} holds another model than replica 0")
        if len(set(self.devices)) != len(self.devices):
            raise PlanError(f"a device may serve one replica only, found {list(self.devices)}")

    @classmethod
    def from_shares(
        cls,
        structure: ModelStructure,
        shares: Sequence[Sequence[float]],
        *,
        batch_shares: Sequence[int] | None = None,
    ) -> "ParallelPlan":
        """Devices 0, 1, ... in order, `shares[r][i]` the weight of the i-th device within replica r.

        Without `batch_shares` a replica's share of the batch is its number of devices.
        """
        if batch_shares is not None and len(batch_shares) != len(shares):
            raise PlanError(f"{len(batch_shares)} batch shares for {len(shares)} replicas")
        replicas = []
        first = 0
        for index, weights in enumerate(shares):
            _check_shares(structure, weights, replica=index)
            by_device = {first + i: weight for i, weight in enumerate(weights)}
            first += len(weights)
            partitions = {
                module: Partition.from_shares(axis.num_units, by_device) for module, axis in structure.axes.items()
            }
            layout = ModelLayout(structure, tuple(by_device), partitions)
            for device, weight in by_device.items():
                if not any(partition.count(device) for partition in partitions.values()):
                    raise PlanError(
                        f"replica {index}: the share {weight:g} of {list(weights)} gives device {device} no unit of "
                        f"any kind; leave the device out or give it a larger share"
                    )
            replicas.append(ReplicaPlan(layout, batch_shares[index] if batch_shares else len(weights)))
        return cls(tuple(replicas))

    @property
    def structure(self) -> ModelStructure:
        return self.replicas[0].layout.structure

    @property
    def devices(self) -> tuple[int, ...]:
        return tuple(device for replica in self.replicas for device in replica.layout.devices)

    def replica_of(self, device: int) -> int:
        """The index of the replica that `device` serves."""
        for index, replica in enumerate(self.replicas):
            if device in replica.layout.devices:
                return index
        raise PlanError(f"device {device} is not in the plan, which has {list(self.devices)}")

    def layout_of(self, device: int) -> ModelLayout:
        """The layout of the replica that `device` serves."""
        return self.replicas[self.replica_of(device)].layout

    def samples(self, global_batch: int) -> list[int]:
        """How many sequences of a global batch each replica takes; they add up to `global_batch`."""
        return apportion(global_batch, [replica.batch_share for replica in self.replicas])

    def batch_range(self, replica: int, *, global_batch: int) -> range:
        """Which sequences of a global batch a replica takes; the replicas' ranges follow one another."""
        samples = self.samples(global_batch)
        first = sum(samples[:replica])
        return range(first, first + samples[replica])

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "model": self.structure.to_json(),
            "replicas": self.division_to_json(),
        }

    def division_to_json(self) -> list[dict[str, Any]]:
        """Without the model's structure, for who knows it."""
        return [
            {
                "devices": list(replica.layout.devices),
                "batch_share": replica.batch_share,
                "partitions": {m: p.to_json() for m, p in replica.layout.partitions.items()},
            }
            for replica in self.replicas
        ]

    @classmethod
    def from_division(cls, structure: ModelStructure, entries: Sequence[Mapping[str, Any]]) -> "ParallelPlan":
        """The plan of this model from `division_to_json`. Raises what a malformed one brings about."""
        return cls(tuple(_replica_from_json(structure, entry) for entry in entries))

    def dumps(self) -> str:
        """JSON with one line for each parameter and partition."""
        data = self.to_json()
        return _pretty(data, leaf_depth=3) + "\n"

    @classmethod
    def loads(cls, text: str, *, where: str) -> "ParallelPlan":
        """The plan written by `dumps`; `where` names the file in errors."""
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise PlanError(f"{where}: not JSON: {error}") from None
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            found = data.get("format") if isinstance(data, dict) else type(data).__name__
            raise PlanError(f"{where}: expected format {FORMAT!r}, found {found!r}")
        try:
            structure = ModelStructure.from_json(data["model"])
            return cls.from_division(structure, data["replicas"])
        except (KeyError, TypeError, AttributeError) as error:
            raise PlanError(f"{where}: malformed plan ({type(error).__name__}: {error})") from None
        except InputError as error:
            raise PlanError(f"{where}: {error}") from None


def read_plan(path: Path) -> ParallelPlan:
    """The plan in a JSON file. Raises PlanError."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise PlanError(f"{path}: not JSON: {error}") from None
    except OSError as error:
        raise PlanError(f"can't read the plan {path}: {error.strerror or error}") from None
    return ParallelPlan.loads(text, where=str(path))


def _replica_from_json(structure: ModelStructure, entry: Mapping[str, Any]) -> ReplicaPlan:
    partitions = {}
    for module, runs in entry["partitions"].items():
        if module not in structure.axes:
            raise PlanError(f"partition of {module!r}: the plan's model has no such module")
        num_units = structure.axes[module].num_units
        partitions[module] = Partition.from_json(runs, num_units=num_units, where=f"partition of {module}")
    for device in entry["devices"]:
        require_whole("devices", least=0, id=device)
    return ReplicaPlan(ModelLayout(structure, tuple(entry["devices"]), partitions), entry["batch_share"])


def _check_shares(structure: ModelStructure, weights: Sequence[float], *, replica: int) -> None:
    bad = [weight for weight in weights if not 0 < weight < float("inf")]
    if bad or not weights:
        raise PlanError(f"replica {replica}: shares must be positive numbers, one a device; found {list(weights)}")
    most = max(axis.num_units for axis in structure.axes.values())
    if len(weights) > most:
        units = sorted({f"{axis.num_units} of {axis.name}" for axis in structure.axes.values()})
        raise PlanError(
            f"replica {replica}: {len(weights)} devices, but the model has no more than {most} units of any kind "
            f"({', '.join(units)}), so a device would hold nothing; use at most {most} devices a replica"
        )


def _pretty(value: Any, *, leaf_depth: int, indent: int = 0) -> str:
    if leaf_depth == 0 or not isinstance(value, dict | list) or not value:
        return json.dumps(value)
    pad, inner = " " * indent, " " * (indent + 1)
    if isinstance(value, dict):
        items = [
            f"{json.dumps(key)}: {_pretty(item, leaf_depth=leaf_depth - 1, indent=indent + 1)}"
            for key, item in value.items()
        ]
        opening, closing = "{", "}"
    else:
        items = [_pretty(item, leaf_depth=leaf_depth, indent=indent + 1) for item in value]
        opening, closing = "[", "]"
    return f"{opening}\n{inner}" + f",\n{inner}".join(items) + f"\n{pad}{closing}"
