"""Plans as values: round trips, and what is refused with its numbers."""

import copy
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import models
from uneven.errors import InputError, LayoutError, PlanError
from uneven.layout import (
    Band,
    LogicalAxis,
    ModelLayout,
    ModelStructure,
    ParallelPlan,
    ParameterSpec,
    Partition,
    ReplicaPlan,
    Replicate,
    Shard,
)

STRUCTURE = ModelStructure(
    "llama",
    {"attn": LogicalAxis("heads", 6), "mlp": LogicalAxis("mlp", 22, 4), "vocab": LogicalAxis("vocab", 9, 2)},
    (
        ParameterSpec("vocab.weight", (9, 3), Shard(0, "vocab", (Band(0, 9, 2),)), "normal"),
        ParameterSpec("q.weight", (12, 3), Shard(0, "attn", (Band(0, 12, 2),)), "normal"),
        ParameterSpec("k.weight", (4, 3), Shard(0, "attn", (Band(0, 4, 2, 3),)), "normal"),
        ParameterSpec("down.weight", (3, 22), Shard(1, "mlp", (Band(0, 22, 4),)), "normal"),
        ParameterSpec("norm.weight", (3,), Replicate("copied"), "ones"),
        ParameterSpec("q_norm.weight", (2,), Replicate("partial"), "ones"),
        ParameterSpec("o.bias", (3,), Replicate("copied"), "zeros"),
    ),
)


@st.composite
def plans(draw, structure: ModelStructure = STRUCTURE) -> ParallelPlan:
    """Replicas of any degree and any owners, with device ids in any order and with holes."""
    degrees = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    ids = draw(st.lists(st.integers(0, 30), min_size=sum(degrees), max_size=sum(degrees), unique=True))
    replicas = []
    for degree in degrees:
        devices, ids = tuple(ids[:degree]), ids[degree:]
        partitions = {
            module: Partition(
                tuple(draw(st.lists(st.sampled_from(devices), min_size=axis.num_units, max_size=axis.num_units)))
            )
            for module, axis in structure.axes.items()
        }
        replicas.append(ReplicaPlan(ModelLayout(structure, devices, partitions), draw(st.integers(1, 9))))
    return ParallelPlan(tuple(replicas))


# Round trips


@given(plan=plans())
def test_a_plan_survives_json(plan: ParallelPlan) -> None:
    text = plan.dumps()
    loaded = ParallelPlan.loads(text, where="plan.json")
    assert loaded == plan
    assert loaded.dumps() == text
    assert loaded.structure.fingerprint() == plan.structure.fingerprint()


@pytest.mark.parametrize("name", models.MODELS)
def test_a_models_structure_survives_json(name: str) -> None:
    structure = models.model_spec(name).structure
    loaded = ModelStructure.from_json(json.loads(json.dumps(structure.to_json())))
    assert loaded == structure
    assert loaded.fingerprint() == structure.fingerprint()


def test_fingerprints_of_unlike_models_differ() -> None:
    prints = {models.model_spec(name).structure.fingerprint() for name in models.MODELS}
    assert len(prints) == len(models.MODELS)
    assert models.model_spec("llama", vocab_size=1004).structure.fingerprint() not in prints


@given(plan=plans(), global_batch=st.integers(0, 200))
def test_samples_of_replicas_add_up_and_follow_one_another(plan: ParallelPlan, global_batch: int) -> None:
    samples = plan.samples(global_batch)
    assert sum(samples) == global_batch
    ranges = [plan.batch_range(replica, global_batch=global_batch) for replica in range(len(plan.replicas))]
    assert [sample for each in ranges for sample in each] == list(range(global_batch))
    assert [len(each) for each in ranges] == samples


@given(plan=plans())
def test_local_sizes_agree_with_ranges(plan: ParallelPlan) -> None:
    for device in plan.devices:
        layout = plan.layout_of(device)
        total = 0
        for spec in plan.structure.parameters:
            ranges = layout.ranges(spec.name, device)
            shape = layout.local_shape(spec, device)
            if ranges is None:
                assert shape == spec.shape
            else:
                full = list(spec.shape)
                full[spec.placement.dim] = sum(stop - start for start, stop in ranges)
                assert shape == tuple(full)
            size = 1
            for each in shape:
                size *= each
            total += size
        assert layout.local_elements(device) == total
        for module in plan.structure.axes:
            assert layout.num_units(module, device) == layout.partitions[module].count(device)


# Refusals


@pytest.mark.parametrize("share", [0, 0.0, -1, float("nan"), float("inf"), -float("inf")])
def test_shares_that_are_not_positive_numbers_are_refused(share: float) -> None:
    with pytest.raises(
        PlanError, match=r"replica 1: shares must be positive numbers, one a device; found \[1, "
    ) as caught:
        ParallelPlan.from_shares(STRUCTURE, [[1, 1], [1, share]])
    assert str(share) in str(caught.value)


def test_a_replica_without_devices_is_refused() -> None:
    with pytest.raises(PlanError, match=r"replica 0: shares must be positive numbers, one a device; found \[\]"):
        ParallelPlan.from_shares(STRUCTURE, [[]])


def test_more_devices_than_units_of_any_kind_are_refused() -> None:
    assert ParallelPlan.from_shares(STRUCTURE, [[1] * 6])
    with pytest.raises(
        PlanError, match="replica 0: 7 devices, but the model has no more than 6 units of any kind"
    ) as caught:
        ParallelPlan.from_shares(STRUCTURE, [[1] * 7])
    for part in ("6 of heads", "6 of mlp", "5 of vocab", "use at most 6 devices a replica"):
        assert part in str(caught.value)


def test_a_device_in_two_replicas_is_refused() -> None:
    replica = ParallelPlan.from_shares(STRUCTURE, [[1, 1]]).replicas[0]
    with pytest.raises(PlanError, match=r"a device may serve one replica only, found \[0, 1, 0, 1\]"):
        ParallelPlan((replica, replica))


def test_a_plan_without_replicas_is_refused() -> None:
    with pytest.raises(PlanError, match="a plan needs at least one replica"):
        ParallelPlan(())
    with pytest.raises(PlanError, match="a plan needs at least one replica"):
        ParallelPlan.from_shares(STRUCTURE, [])


def test_replicas_of_unlike_models_are_refused() -> None:
    other = models.model_spec("llama").structure
    first = ParallelPlan.from_shares(STRUCTURE, [[1]]).replicas[0]
    second = ParallelPlan.from_shares(other, [[1], [1]]).replicas[1]
    with pytest.raises(PlanError, match="replica 1 holds another model than replica 0"):
        ParallelPlan((first, second))


@pytest.mark.parametrize("share", [0, -3])
def test_a_batch_share_below_one_is_refused(share: int) -> None:
    with pytest.raises(InputError, match=f"batch_share must be a whole number of at least 1, found {share}"):
        ParallelPlan.from_shares(STRUCTURE, [[1]], batch_shares=[share])


def test_batch_shares_of_another_number_are_refused() -> None:
    with pytest.raises(PlanError, match="3 batch shares for 2 replicas"):
        ParallelPlan.from_shares(STRUCTURE, [[1], [1]], batch_shares=[1, 2, 3])


def test_a_device_that_is_not_in_the_plan_is_named() -> None:
    plan = ParallelPlan.from_shares(STRUCTURE, [[1, 1], [1]])
    with pytest.raises(PlanError, match=r"device 5 is not in the plan, which has \[0, 1, 2\]"):
        plan.replica_of(5)


def layout_with(devices: tuple[int, ...] = (0, 1), **changes: Any) -> ModelLayout:
    partitions = {module: Partition((0,) * axis.num_units) for module, axis in STRUCTURE.axes.items()}
    return ModelLayout(STRUCTURE, devices, partitions | changes)


def test_a_partition_of_another_number_of_units_is_refused() -> None:
    with pytest.raises(LayoutError, match="mlp: the partition has 5 units, its axis 'mlp' 6"):
        layout_with(mlp=Partition((0, 0, 1, 1, 1)))


def test_units_of_a_stranger_are_refused() -> None:
    with pytest.raises(LayoutError, match=r"attn: units owned by \[7\], the replica has devices \[0, 1\]"):
        layout_with(attn=Partition((0, 0, 7, 1, 1, 1)))


@pytest.mark.parametrize("devices", [(), (0, 0), (-1, 0)])
def test_device_ids_that_are_no_ids_are_refused(devices: tuple[int, ...]) -> None:
    with pytest.raises(LayoutError, match=r"a replica needs different device ids of at least 0, found \["):
        layout_with(devices)


def test_a_partition_for_an_unknown_module_is_refused() -> None:
    with pytest.raises(LayoutError, match=r"missing or unknown: \['other'\]"):
        layout_with(other=Partition((0,)))


def test_bands_must_cover_their_dimension() -> None:
    with pytest.raises(LayoutError, match=r"w: its bands cover 8 elements, dim 0 of \[9, 2\] has 9"):
        ParameterSpec("w", (9, 2), Shard(0, "mlp", (Band(0, 8, 2),)), "normal")


def test_bands_must_have_a_block_for_each_group_of_units() -> None:
    spec = ParameterSpec("w", (8,), Shard(0, "mlp", (Band(0, 8, 2),)), "normal")
    with pytest.raises(LayoutError, match="w: 4 blocks for 3 units of mlp in groups of 1"):
        ModelStructure("llama", {"mlp": LogicalAxis("mlp", 3)}, (spec,))
    with pytest.raises(LayoutError, match="w: divided as 'mlp', which names no axis of the model"):
        ModelStructure("llama", {}, (spec,))


def test_an_unknown_parameter_is_named() -> None:
    with pytest.raises(LayoutError, match="the llama model has no parameter 'w'"):
        STRUCTURE.parameter("w")


# Malformed files


@pytest.mark.parametrize("text", ["", "{", "nul", "[1, 2", "\x00", '{"format": "uneven.plan/1"'])
def test_text_that_is_not_json_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match=r"plan\.json: not JSON"):
        ParallelPlan.loads(text, where="plan.json")


@pytest.mark.parametrize("text", ["[]", "3", "null", '"x"', "{}", '{"format": "uneven.plan/2"}'])
def test_another_format_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match=r"plan\.json: expected format 'uneven\.plan/1', found"):
        ParallelPlan.loads(text, where="plan.json")


def paths(value: Any, prefix: tuple = ()) -> list[tuple]:
    """Where each entry of nested JSON stands."""
    if isinstance(value, dict):
        children = list(value.items())
    elif isinstance(value, list):
        children = list(enumerate(value))
    else:
        return []
    return [path for key, child in children for path in [(*prefix, key), *paths(child, (*prefix, key))]]


VALID = ParallelPlan.from_shares(STRUCTURE, [[1, 1, 1], [2, 1]]).to_json()
PATHS = paths(VALID)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 40) | st.floats(allow_nan=True) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


def changed(path: tuple, change: Any) -> str:
    data = copy.deepcopy(VALID)
    holder = data
    for key in path[:-1]:
        holder = holder[key]
    change(holder, path[-1])
    return json.dumps(data)


def loads_or_refuses(text: str) -> ParallelPlan | None:
    """The plan of a text; None if it is refused by PlanError. Any other error is a failure of the test."""
    try:
        return ParallelPlan.loads(text, where="plan.json")
    except PlanError as error:
        message = str(error)
    assert message.startswith("plan.json: ")
    return None


@pytest.mark.parametrize("path", PATHS, ids=lambda path: "/".join(map(str, path)))
def test_a_plan_with_an_entry_left_out_is_refused(path: tuple) -> None:
    """Of named entries only a parameter may go, which leaves a smaller model; of listed ones, a replica, a dimension
    that is not divided, a last number that has a default. What is read is another plan.
    """
    plan = loads_or_refuses(changed(path, lambda holder, key: holder.pop(key)))
    may_go = path[:-1] == ("model", "parameters") or isinstance(path[-1], int)
    assert plan is None or may_go, path
    assert plan is None or plan != ParallelPlan.loads(json.dumps(VALID), where="valid") or path[-1] in (2, 3)


@settings(max_examples=150)
@given(path=st.sampled_from(PATHS), value=json_values)
def test_a_plan_with_an_entry_replaced_is_read_or_refused(path: tuple, value: Any) -> None:
    """What is read is a plan: it is written as it was read, and its sizes can be asked for."""

    def replace(holder: Any, key: Any) -> None:
        holder[key] = value

    plan = loads_or_refuses(changed(path, replace))
    if plan is not None:
        assert ParallelPlan.loads(plan.dumps(), where="again") == plan
        assert all(plan.layout_of(device).local_elements(device) >= 0 for device in plan.devices)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("replicas", 0, "devices", 0), "zero"),
        (("replicas", 0, "devices", 0), "0"),
        (("replicas", 0, "devices", 1), 1.5),
        (("replicas", 0, "devices", 1), True),
        (("replicas", 0, "batch_share"), "many"),
        (("replicas", 0, "batch_share"), 2.7),
        (("replicas", 0, "batch_share"), float("inf")),
        (("replicas", 0, "batch_share"), float("nan")),
        (("model", "parameters", "q.weight", "bands", 0, 2), 0),
        (("model", "parameters", "q.weight", "bands", 0, 3), 0),
        (("model", "parameters", "q.weight", "init"), "wild"),
        (("model", "parameters", "norm.weight", "shape"), "ab"),
        (("model", "parameters", "norm.weight", "shape", 0), -3),
        (("model", "parameters", "norm.weight", "shape", 0), 2.5),
        (("model", "axes", "attn", 1), 6.0),
        (("model", "axes", "attn", 0), 3),
    ],
)
def test_an_entry_of_a_wrong_kind_is_refused(path: tuple, value: Any) -> None:
    assert path in PATHS

    def replace(holder: Any, key: Any) -> None:
        holder[key] = value

    assert loads_or_refuses(changed(path, replace)) is None


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"format": "uneven.plan/1", "x": ' + "9" * 5000 + "}"], ids=["deep", "long number"]
)
def test_json_beyond_pythons_limits_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match=r"plan\.json: "):
        ParallelPlan.loads(text, where="plan.json")
