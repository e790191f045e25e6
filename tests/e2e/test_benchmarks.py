"""The benchmarks run at small sizes, and what is exact in them holds: sums, bytes, operations, arithmetic.

Their times mean nothing here; that a page has a row for each claim does.
"""

import os
from fractions import Fraction
from pathlib import Path

import pytest

from benchmarks import checkpoint, elastic_overhead, one_of_eight, overhead, recovery, reshard, startup, sync
from benchmarks.sync_model import GATHER, OWNERS, UNIFORM, loads, times
from uneven.layout import Shard

FP32_BYTES = 4


@pytest.fixture(scope="module")
def sums() -> tuple[sync.Result, sync.Result | str]:
    """The sums of made-up gradients, which the ranks have compared with direct ones."""
    return sync.main(["--quick"])


@pytest.mark.parametrize("scheme", sync.SCHEMES)
def test_devices_send_what_the_arithmetic_says(sums, scheme: str) -> None:
    sent = sums[0].sent[scheme]
    by_role = loads(scheme, sync.HEALTHY, sync.REDUCED)
    structure = sync.QUICK.structure()
    divided = FP32_BYTES * sum(spec.num_elements for spec in structure.parameters if isinstance(spec.placement, Shard))
    norms = sync.ring_bytes(structure.num_parameters - divided // FP32_BYTES, len(sent))
    for device, counted in enumerate(sent):
        role = "core" if device < sync.REDUCED else "extra" if device < sync.HEALTHY else "reduced"
        load = by_role.get(role, by_role["core"])
        assert counted.between_bytes == load.nic * divided + norms
        assert counted.inside_bytes == load.nvlink * divided


@pytest.mark.parametrize("scheme", [UNIFORM, OWNERS])
def test_sums_by_owners_send_what_data_parallelism_sends(sums, scheme: str) -> None:
    for counted in sums[0].sent[scheme]:
        assert counted.total_bytes == counted.data_parallel_bytes
        assert 1 < counted.total_bytes / counted.bound_bytes < 1.01  # the norms are summed over all devices


def test_a_link_between_hosts_carries_the_same_bytes_or_the_page_says_why_not(sums) -> None:
    loopback, link = sums
    if isinstance(link, str):
        assert link.startswith("not measured")
    else:
        assert link.sent == loopback.sent
    namespaces = Path("/run/netns")
    assert not namespaces.exists() or not list(namespaces.glob(f"uneven-{os.getpid()}-*"))


def test_each_round_times_every_scheme(sums) -> None:
    assert sums[0].wall_s.keys() == {(scheme, kind) for scheme in sync.SCHEMES for kind in (sync.ALONE, sync.COLLECTED)}
    for seconds in sums[0].wall_s.values():
        assert len(seconds) == sync.QUICK.repetitions
        assert min(seconds) > 0
    text = "\n".join(sync.page(sync.QUICK, *sums))
    assert text.count("at most 0.75") == (2 if isinstance(sums[1], str) else 4)


@pytest.mark.parametrize(("healthy", "reduced"), [(8, 7), (32, 30), (4, 3)])
def test_the_arithmetic_of_a_reduced_replica(healthy: int, reduced: int) -> None:
    owners, gather = loads(OWNERS, healthy, reduced), loads(GATHER, healthy, reduced)
    num_extra = healthy - reduced
    # A replica sends its gradients once to the other, whoever of its devices does it.
    for by_role in (owners, gather):
        assert reduced * by_role["core"].nic + num_extra * by_role["extra"].nic == 1
        assert reduced * by_role["reduced"].nic == 1
    # What extras give away comes back to them.
    assert reduced * gather["core"].nvlink == num_extra * gather["extra"].nvlink == Fraction(num_extra, healthy)
    uniform = times(UNIFORM, healthy, reduced)[0]
    assert times(OWNERS, healthy, reduced) == pytest.approx((uniform * healthy / reduced,) * 2)
    # NVLink is nine times as fast: there and back cost two ninths of a healthy all-reduce, unless they overlap with it.
    assert times(GATHER, healthy, reduced) == pytest.approx(
        (uniform * (healthy / reduced + 2 / 9), uniform * healthy / reduced)
    )


def test_a_plain_loop_does_the_same_work(capsys) -> None:
    result = overhead.main(["--quick"])
    (size,) = overhead.QUICK
    one, (pair, alone) = result.one[size.name], result.two[size.name]
    assert len(one.ours_s) == len(one.plain_s) == size.rounds
    assert one.difference < overhead.LARGEST_DIFFERENCE
    # Two sums in forward and two in backward a layer, one each for embedding and head, two small ones for the loss.
    num_big, num_positions = 4 * overhead.SMALL["num_hidden_layers"] + 2, 9 * 128
    assert pair.calls == num_big + 2
    hidden_size = overhead.SMALL["hidden_size"]
    assert pair.payload_bytes == FP32_BYTES * num_positions * (num_big * hidden_size + 3)
    assert pair.times_s.keys() | alone.times_s.keys() == {overhead.PAIR, overhead.TWO_THREADS, overhead.ONE_THREAD}
    assert "at least 0.97" in capsys.readouterr().out


def test_start_up_is_timed_to_the_first_step(capsys) -> None:
    seconds = startup.main(["--quick"])
    assert seconds.keys() == {"uneven", "torchrun"}
    assert all(len(each) == 1 and each[0] > 1 for each in seconds.values())
    assert "at most 1:" in capsys.readouterr().out


def test_parts_of_checkpoints_are_written_and_read(capsys) -> None:
    found = checkpoint.main(["--quick"])
    assert found.keys() == {*checkpoint.DIMS, "checksums"}
    assert all(rate > 0 for rates in found.values() for each in rates.values() for rate in each)
    page = capsys.readouterr().out
    assert all(name in page for name in ("dim 0", "dim 1", *checkpoint.CHECKSUMS))


def test_a_killed_process_is_timed_to_the_next_step(capsys) -> None:
    runs = recovery.main(["--quick"])
    assert runs.keys() == {"uneven", "torchrun"}
    for name, (run,) in runs.items():
        assert [step for _, step, _ in run.commits][-1] == recovery.QUICK.steps, name
        assert len(run.recovery_s) == len(recovery.QUICK.kills)
    page = capsys.readouterr().out
    assert "over that of torchrun" in page
    assert page.count("at least 0.97") == len(one_of_eight.HOMES)


def test_parts_are_moved_beside_plain_messages(capsys) -> None:
    results = reshard.main(["--quick"])
    assert {(each.num_devices, each.dim) for each in results} == {(2, 0), (2, 1)}
    assert capsys.readouterr().out.count("at least 0.6") == len(results)


def test_steps_are_taken_with_and_without_what_is_there_for_failures(capsys) -> None:
    times = elastic_overhead.main(["--quick"])
    assert all(len(each) == elastic_overhead.QUICK.rounds for each in times.values())
    assert "at most 1.01" in capsys.readouterr().out
