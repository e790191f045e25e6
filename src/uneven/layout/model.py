"""What a model consists of, and how one replica divides it.

`ModelStructure` depends on the model alone; `ModelLayout` adds the devices of one replica and a partition for
every module that is divided. Facts about a parameter live here, by its fully qualified name.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

from uneven.errors import LayoutError
from uneven.layout.axis import LogicalAxis, require_whole
from uneven.layout.partition import Interval, Partition
from uneven.layout.placement import Band, Placement, Replicate, Shard

Init = Literal["normal", "zeros", "ones"]


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """One parameter of the undivided model: qualified name, full shape, placement, and how random weights start."""

    name: str
    shape: tuple[int, ...]
    placement: Placement
    init: Init

    def __post_init__(self) -> None:
        if not self.shape:
            raise LayoutError(f"{self.name}: a parameter has at least one dimension, found the shape []")
        for size in self.shape:
            require_whole(self.name, size=size)
        if self.init not in ("normal", "zeros", "ones"):
            raise LayoutError(f"{self.name}: init is 'normal', 'zeros' or 'ones', found {self.init!r}")
        if not isinstance(self.placement, Shard):
            return
        require_whole(self.name, least=0, dim=self.placement.dim)
        if self.placement.dim >= len(self.shape):
            raise LayoutError(f"{self.name}: divided along dim {self.placement.dim}, its shape is {list(self.shape)}")
        covered = sum(band.size for band in self.placement.bands)
        if covered != self.shape[self.placement.dim]:
            raise LayoutError(
                f"{self.name}: its bands cover {covered} elements, dim {self.placement.dim} of {list(self.shape)} has "
                f"{self.shape[self.placement.dim]}"
            )

    @property
    def num_elements(self) -> int:
        return prod(self.shape)

    @property
    def dim(self) -> int:
        """The dimension along which parts of it are told: the divided one, or the first of what every device holds."""
        return self.placement.dim if isinstance(self.placement, Shard) else 0

    @property
    def whole(self) -> tuple[Interval, ...]:
        """All of it, as ranges along `dim`."""
        return ((0, self.shape[self.dim]),)

    def count(self, ranges: tuple[Interval, ...]) -> int:
        """How many elements lie in `ranges` along `dim`."""
        return self.num_elements // self.shape[self.dim] * sum(stop - start for start, stop in ranges)

    def part_shape(self, size: int) -> tuple[int, ...]:
        """The shape of `size` slices along `dim`."""
        return (*self.shape[: self.dim], size, *self.shape[self.dim + 1 :])


@dataclass(frozen=True, slots=True)
class ModelStructure:
    """`axes` names each module that is divided and along what; `parameters` stand in about the order of use."""

    family: str
    axes: Mapping[str, LogicalAxis]
    parameters: tuple[ParameterSpec, ...]

    def __post_init__(self) -> None:
        for spec in self.parameters:
            placement = spec.placement
            if not isinstance(placement, Shard):
                continue
            axis = self.axes.get(placement.module)
            if axis is None:
                raise LayoutError(f"{spec.name}: divided as {placement.module!r}, which names no axis of the model")
            for band in placement.bands:
                if band.num_blocks != -(-axis.num_units // band.group):
                    raise LayoutError(
                        f"{spec.name}: {band.num_blocks} blocks for {axis.num_units} units of {placement.module} in "
                        f"groups of {band.group}"
                    )

    def parameter(self, name: str) -> ParameterSpec:
        for spec in self.parameters:
            if spec.name == name:
                return spec
        raise LayoutError(f"the {self.family} model has no parameter {name!r}")

    @property
    def kv_groups(self) -> dict[str, int]:
        """Query heads per key and value head, for each module divided by heads."""
        groups = {module: 1 for module, axis in self.axes.items() if axis.name == "heads"}
        for spec in self.parameters:
            if isinstance(spec.placement, Shard) and spec.placement.module in groups:
                module = spec.placement.module
                groups[module] = max(groups[module], *(band.group for band in spec.placement.bands))
        return groups

    @property
    def num_parameters(self) -> int:
        return sum(spec.num_elements for spec in self.parameters)

    def fingerprint(self) -> str:
        """A short hash of everything a layout depends on."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()[:16]

    def to_json(self) -> dict[str, Any]:
        return {
            "family": self.family,
            "axes": {module: [axis.name, axis.size, axis.unit_size] for module, axis in self.axes.items()},
            "parameters": {spec.name: _spec_to_json(spec) for spec in self.parameters},
        }

    @classmethod
    def from_json(cls, data: Any) -> "ModelStructure":
        try:
            axes = {module: LogicalAxis(*entry) for module, entry in data["axes"].items()}
            parameters = tuple(_spec_from_json(name, entry) for name, entry in data["parameters"].items())
            return cls(str(data["family"]), axes, parameters)
        except (KeyError, TypeError, AttributeError) as error:
            raise LayoutError(f"'model' of the plan: malformed entry ({type(error).__name__}: {error})") from None


def _spec_to_json(spec: ParameterSpec) -> dict[str, Any]:
    placement = spec.placement
    entry: dict[str, Any] = {"shape": list(spec.shape), "init": spec.init}
    if isinstance(placement, Shard):
        bands = [[band.offset, band.size, band.block, band.group] for band in placement.bands]
        return entry | {"dim": placement.dim, "module": placement.module, "bands": bands}
    return entry | {"grad": placement.grad}


def _spec_from_json(name: str, entry: Any) -> ParameterSpec:
    placement: Placement
    if "dim" in entry:
        placement = Shard(entry["dim"], entry["module"], tuple(Band(*band) for band in entry["bands"]))
    else:
        placement = Replicate(entry["grad"])
    return ParameterSpec(name, tuple(entry["shape"]), placement, entry["init"])


@dataclass(frozen=True, slots=True)
class ModelLayout:
    """One replica: its devices in order, and for each module of the structure who holds which units."""

    structure: ModelStructure
    devices: tuple[int, ...]
    partitions: Mapping[str, Partition]

    def __post_init__(self) -> None:
        if not self.devices or len(set(self.devices)) != len(self.devices) or min(self.devices) < 0:
            raise LayoutError(f"a replica needs different device ids of at least 0, found {list(self.devices)}")
        if self.partitions.keys() != self.structure.axes.keys():
            differ = sorted(self.partitions.keys() ^ self.structure.axes.keys())
            raise LayoutError(
                f"a layout needs one partition for each module that is divided; missing or unknown: {differ}"
            )
        for module, axis in self.structure.axes.items():
            owners = self.partitions[module].owners
            if len(owners) != axis.num_units:
                raise LayoutError(
                    f"{module}: the partition has {len(owners)} units, its axis {axis.name!r} {axis.num_units}"
                )
            strangers = sorted(set(owners) - set(self.devices))
            if strangers:
                raise LayoutError(f"{module}: units owned by {strangers}, the replica has devices {list(self.devices)}")

    def ranges(self, name: str, device: int) -> tuple[Interval, ...] | None:
        """The elements of parameter `name` that `device` holds along its divided dimension; None if it holds all."""
        return self.spec_ranges(self.structure.parameter(name), device)

    def spec_ranges(self, spec: ParameterSpec, device: int) -> tuple[Interval, ...] | None:
        """As `ranges`, for a parameter already looked up."""
        if not isinstance(spec.placement, Shard):
            return None
        return spec.placement.ranges(self.partitions[spec.placement.module].intervals(device))

    def held(self, spec: ParameterSpec, device: int) -> tuple[Interval, ...]:
        """What `device` holds of `spec`, as ranges along its `dim`, ascending; its local tensor has them end to end."""
        ranges = self.spec_ranges(spec, device)
        return spec.whole if ranges is None else ranges

    def local_shape(self, spec: ParameterSpec, device: int) -> tuple[int, ...]:
        """The shape of the part of `spec` that `device` holds."""
        return spec.part_shape(sum(stop - start for start, stop in self.held(spec, device)))

    def local_elements(self, device: int) -> int:
        """How many parameter elements `device` holds."""
        return sum(prod(self.local_shape(spec, device)) for spec in self.structure.parameters)

    def num_units(self, module: str, device: int) -> int:
        return self.partitions[module].count(device)
