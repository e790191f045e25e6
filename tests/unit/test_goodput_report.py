"""Goodput by hand, the report's JSON, events, and when things happened."""

import json

import pytest

from tests.goodput_job import TOKENS, SimulatedJob, write_run
from uneven.errors import GoodputError
from uneven.goodput import KINDS, Account, Book, Event, Ledger, Report, Timeline, Tokens, read_events, read_run


@pytest.fixture
def job():
    """Two devices, one of them slower, for 2 steps; then one dies, and the other goes on for a step."""
    job = SimulatedJob(Ledger(num_parameters=10**6))
    job.start(0, 1, boot_s=2, build_s=3)
    job.step([4, 6], bytes_s=1)
    job.step([4, 6], bytes_s=1)
    job.fail(1, after_s=2, notice_s=4, recover_s=2, move_s=1)
    job.step([8], bytes_s=0)
    job.end()
    return job


def test_goodput_by_hand(job):
    report = Report.of(job.ledger.book(job.time), job.events)
    assert report.wall_s == 5 + 7 + 7 + 6 + 3 + 8 == 36
    expected = {
        "useful": (4 + 4 + 8) + (6 + 6),
        "idle": 2 + 2,
        "communication": (1 + 1) * 2,
        "detection": 4 * 2,
        "recovery": 2,
        "reshard": 1,
        "repeated": 2 * 2,
        "startup": 5 * 2,
        "absent": 36 - 25,
    }
    assert report.seconds == {kind: expected.get(kind, 0) for kind in KINDS}
    assert report.allocated_s == 72
    assert report.healthy_s == 61
    assert report.goodput_allocated == 28 / 72
    assert report.goodput_healthy == 28 / 61
    assert [device.goodput for device in report.devices] == [16 / 36, 12 / 36]
    assert report.tokens == Tokens(3 * TOKENS, 4 * TOKENS)
    assert report.useful_tokens == 3 / 4


def test_goodput_is_committed_tokens_over_those_of_ideal_devices(job):
    report = Report.of(job.ledger.book(job.time))
    ideal_tokens_per_s = len(report.devices) * report.device_tokens_per_s
    assert report.goodput_allocated == pytest.approx(report.tokens.committed / (ideal_tokens_per_s * report.wall_s))


def test_shares_of_kinds_and_unaccounted_add_up_to_all(job):
    job.ledger.started(2, job.time)
    job.ledger.reported(2, {"startup": 1.0}, at=job.time)
    job.ledger.reported(2, {"startup": 1.0, "useful": 3.0}, at=job.time + 4.5)
    found = Report.of(job.ledger.book(job.time + 4.5)).to_json()
    assert sum(found["shares"].values()) + found["unaccounted"] == pytest.approx(1, abs=1e-12)


def test_json_is_an_interface_that_stays(job):
    found = json.loads(json.dumps(Report.of(job.ledger.book(job.time), job.events).to_json()))
    assert {key: value for key, value in found.items() if key not in ("devices", "seconds", "shares", "events")} == {
        "format": "uneven.goodput-report/1",
        "wall_s": 36,
        "num_devices": 2,
        "num_parameters": 1_000_000,
        "goodput": {"allocated": 28 / 72, "healthy": 28 / 61},
        "device_s": {"allocated": 72, "healthy": 61, "unaccounted": 0},
        "unaccounted": 0,
        "tokens": {"committed": 3000, "computed": 4000, "useful": 0.75},
        "flops": {"committed": 6 * 10**6 * 3000, "computed": 6 * 10**6 * 4000},
        "tokens_per_s": 3000 / 36,
        "device_tokens_per_s": 3000 / 28,
    }
    assert list(found["seconds"]) == list(found["shares"]) == list(found["devices"][0]["seconds"])
    assert " ".join(found["seconds"]) == (
        "useful idle communication detection recovery reshard repeated checkpoint startup data absent"
    )
    device = found["devices"][1]
    del device["seconds"]
    assert device == {
        "device": 1,
        "incarnations": 1,
        "wall_s": 36,
        "until_s": 36,
        "goodput": 12 / 36,
        "unaccounted_s": 0,
    }
    assert found["events"] == [
        {"time_s": 21, "kind": "failure", "device": 1},
        {"time_s": 28, "kind": "recovery", "device": 1, "detect_s": 4, "recover_s": 3, "bytes_moved": 10**6},
    ]


def test_report_of_nothing_is_zero():
    report = Report.of(Ledger(num_parameters=7).book(0.0))
    assert (report.goodput_allocated, report.goodput_healthy, report.unaccounted, report.useful_tokens) == (0, 0, 0, 0)
    json.dumps(report.to_json(), allow_nan=False)


def test_too_much_in_one_process_does_not_hide_too_little_in_another():
    accounts = (Account(0, 0, 0.0, 10.0, {"useful": 9.0}), Account(0, 1, 10.0, 20.0, {"useful": 11.0}))
    assert Report.of(Book(20.0, 1, Tokens(), accounts)).unaccounted_s == 2


# Events


def test_events_are_by_time_and_unknown_words_are_kept(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_text(
        '{"time_s": 9, "kind": "upgrade", "reason": "new"}\n'
        '{"time_s": 2.5, "kind": "failure", "device": 1, "step": 4}\n'
        '{"time_s": 11, "ki'
    )
    assert read_events(path) == (Event(2.5, "failure", 1, 4), Event(9, "upgrade"))
    assert read_events(tmp_path / "none.jsonl") == ()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"kind": "failure"}', "time_s has to be a number, found None"),
        ('{"time_s": 1}', "kind has to be a word, found None"),
        ('{"time_s": 1, "kind": "failure", "device": "first"}', "device has to be a number, found 'first'"),
        ('{"time_s": true, "kind": "failure"}', "time_s has to be a number, found True"),
        ("failure", "not JSON: b'failure'"),
    ],
)
def test_event_that_is_none_is_refused_with_its_line(line, message, tmp_path):
    (tmp_path / "events.jsonl").write_text('{"time_s": 1, "kind": "join"}\n' + line + "\n")
    with pytest.raises(GoodputError, match=r"events\.jsonl, line 2: ") as caught:
        read_events(tmp_path / "events.jsonl")
    assert message in str(caught.value)


# When


def test_timeline_has_all_seconds_of_all_devices(tmp_path):
    write_run(tmp_path)
    book, report = read_run(tmp_path)
    for num_bins in (1, 7, 240):
        timeline = Timeline.of(book, num_bins=num_bins)
        assert timeline.bin_s * num_bins == pytest.approx(report.wall_s)
        for device in report.devices:
            bins = timeline.devices[device.device]
            for kind in KINDS:
                assert sum(each[kind] for each in bins) == pytest.approx(device.seconds[kind]), (device.device, kind)
            assert all(sum(each.values()) == pytest.approx(timeline.bin_s) for each in bins)


def test_timeline_shows_when():
    accounts = (
        Account(0, 0, 0.0, 4.0, {"startup": 4.0}),
        Account(0, 0, 0.0, 6.0, {"startup": 4.0, "useful": 2.0}),
        Account(0, 0, 0.0, 8.0, {"startup": 4.0, "useful": 1.0, "repeated": 3.0}),  # the last second was lost
        Account(0, 1, 8.0, 9.0, {"startup": 1.0}),
    )
    timeline = Timeline.of(Book(10.0, 1, Tokens(), accounts), num_bins=5)
    found = [{kind: seconds for kind, seconds in each.items() if seconds} for each in timeline.devices[0]]
    assert found == [{"startup": 2}, {"startup": 2}, {"useful": 2}, {"repeated": 2}, {"startup": 1}]
