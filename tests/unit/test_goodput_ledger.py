"""The launcher's book over failures, returns and kills, in simulated time: exact, and the same from its file."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.goodput_job import SimulatedJob, write_run
from uneven.errors import GoodputError
from uneven.goodput import Account, DeviceClock, Ledger, Report, Tokens, read_book


def seconds_of(ledger, at):
    """Seconds by kind that are not 0, by device and incarnation."""
    return {
        (account.device, account.incarnation): {kind: seconds for kind, seconds in account.seconds.items() if seconds}
        for account in ledger.book(at).accounts
    }


@pytest.fixture
def ledger():
    return Ledger(num_parameters=7)


def test_time_before_the_first_report_is_start_up(ledger):
    ledger.started(0, 5.0)
    assert seconds_of(ledger, 8.0) == {(0, 0): {"startup": 3}}
    clock = DeviceClock(100.0)  # it took 4 s until the process had a clock
    clock.switch("useful", 106.0)
    ledger.reported(0, clock.totals(107.0), at=16.0)
    assert seconds_of(ledger, 20.0) == {(0, 0): {"startup": 4 + 6, "useful": 1}}
    (account,) = ledger.book(20.0).accounts
    assert (account.began_s, account.until_s, account.unaccounted_s) == (5, 16, 0)


def test_what_a_rank_does_not_tell_is_unaccounted_and_no_kind(ledger):
    ledger.started(0, 0.0)
    ledger.reported(0, {"startup": 2.0}, at=2.0)
    ledger.reported(0, {"startup": 2.0, "useful": 5.0}, at=10.0)
    ledger.ended(11.0)
    (account,) = ledger.book(11.0).accounts
    assert account.unaccounted_s == 4
    assert sum(account.seconds.values()) == 7
    assert Report.of(ledger.book(11.0)).unaccounted == 4 / 11


def test_failure_is_lost_work_then_detection_then_absence(ledger):
    ledger.started(3, 0.0)
    ledger.reported(3, {"useful": 10.0}, at=10.0)
    ledger.failed(3, last_alive_at=14.0, noticed_at=20.0)
    assert seconds_of(ledger, 25.0) == {(3, 0): {"useful": 10, "repeated": 4, "detection": 6, "absent": 5}}
    ledger.started(3, 30.0)
    ledger.reported(3, {}, at=32.0)
    ledger.ended(33.0)
    assert seconds_of(ledger, 40.0) == {
        (3, 0): {"useful": 10, "repeated": 4, "detection": 6, "absent": 10},
        (3, 1): {"startup": 2},
    }


@pytest.mark.parametrize(
    ("last_alive_at", "repeated", "detection"), [(2.0, 0, 10), (99.0, 10, 0)], ids=["before its report", "after"]
)
def test_last_sign_of_life_lies_between_report_and_notice(ledger, last_alive_at, repeated, detection):
    ledger.started(0, 0.0)
    ledger.reported(0, {"useful": 10.0}, at=10.0)
    ledger.failed(0, last_alive_at=last_alive_at, noticed_at=20.0)
    expected = {"useful": 10, "repeated": repeated, "detection": detection}
    assert seconds_of(ledger, 20.0)[0, 0] == {kind: seconds for kind, seconds in expected.items() if seconds}


def test_death_before_the_first_report_was_start_up(ledger):
    ledger.started(0, 0.0)
    ledger.failed(0, last_alive_at=3.0, noticed_at=4.0)
    assert seconds_of(ledger, 4.0) == {(0, 0): {"startup": 3, "detection": 1}}


def test_report_of_the_dead_comes_too_late(ledger):
    ledger.started(0, 0.0)
    ledger.failed(0, last_alive_at=3.0, noticed_at=4.0)
    before = seconds_of(ledger, 6.0)
    ledger.reported(0, {"useful": 4.0}, at=6.0)
    assert seconds_of(ledger, 6.0) == before


def test_device_that_leaves_or_never_came_is_absent(ledger):
    ledger.started(0, 0.0)
    ledger.reported(0, {"useful": 4.0}, at=4.0)
    ledger.left(0, 4.0)
    ledger.left(1, 6.0)
    ledger.ended(10.0)
    assert seconds_of(ledger, 10.0) == {(0, 0): {"useful": 4, "absent": 6}, (1, 0): {"absent": 4}}


def test_book_does_not_go_back_when_a_notice_is_late(ledger):
    ledger.started(0, 0.0)
    ledger.started(1, 0.0)
    ledger.reported(0, {"useful": 10.0}, at=10.0)
    ledger.failed(1, last_alive_at=8.0, noticed_at=9.0)
    assert seconds_of(ledger, 10.0)[1, 0] == {"startup": 8, "detection": 2}


def test_contradictions_are_refused_with_their_times(ledger):
    with pytest.raises(GoodputError, match=r"device 2 has not been started; known are \[\]"):
        ledger.reported(2, {}, at=0.0)
    ledger.started(2, 1.0)
    with pytest.raises(GoodputError, match="device 2 can't be started at 4 s: it is there since 1 s"):
        ledger.started(2, 4.0)
    with pytest.raises(GoodputError, match="report of device 2: 'rest' is no kind"):
        ledger.reported(2, {"rest": 1.0}, at=4.0)
    ledger.left(2, 5.0)
    with pytest.raises(GoodputError, match="device 2 can't go at 6 s: it is gone since 5 s"):
        ledger.failed(2, last_alive_at=5.0, noticed_at=6.0)


# The file


def test_file_says_what_the_ledger_says(tmp_path):
    job = write_run(tmp_path)
    assert Report.of(read_book(tmp_path / "goodput.jsonl")) == Report.of(job.ledger.book(job.time))
    assert Report.of(job.ledger.book(job.time)).unaccounted_s == 0


def test_flush_writes_only_what_has_changed(tmp_path):
    with Ledger(tmp_path / "g.jsonl", num_parameters=7) as ledger:
        ledger.started(0, 0.0)
        ledger.started(1, 0.0)
        ledger.reported(0, {"useful": 2.0}, at=2.0)
        ledger.reported(1, {"useful": 2.0}, at=2.0)
        ledger.flush(2.0)
        ledger.reported(1, {"useful": 3.0}, at=3.0)
        ledger.count(50, is_committed=True)
        ledger.flush(3.0)
    lines = [json.loads(line) for line in (tmp_path / "g.jsonl").read_text().splitlines()]
    assert lines == [
        {"format": "uneven.goodput/1", "time_s": 0.0, "num_parameters": 7},
        {"device": 0, "incarnation": 0, "began_s": 0.0, "until_s": 2.0, "seconds": {"useful": 2.0}},
        {"device": 1, "incarnation": 0, "began_s": 0.0, "until_s": 2.0, "seconds": {"useful": 2.0}},
        {"time_s": 2.0, "committed_tokens": 0, "computed_tokens": 0},
        {"device": 1, "incarnation": 0, "began_s": 0.0, "until_s": 3.0, "seconds": {"useful": 3.0}},
        {"time_s": 3.0, "committed_tokens": 50, "computed_tokens": 50},
    ]


def test_file_of_a_killed_job_is_read_up_to_its_last_whole_line(tmp_path):
    write_run(tmp_path)
    path = tmp_path / "goodput.jsonl"
    content = path.read_bytes()
    whole = content.rfind(b"\n", 0, len(content) - 1) + 1
    path.write_bytes(content[: whole + 25])
    cut = read_book(path)
    path.write_bytes(content[:whole])
    assert cut == read_book(path)
    for size in range(content.index(b"\n") + 1, len(content), 97):  # wherever the kill came
        path.write_bytes(content[:size])
        report = Report.of(read_book(path))
        assert report.unaccounted_s == 0
        assert sum(report.seconds.values()) == report.allocated_s


def test_resumed_job_goes_on_and_the_gap_belongs_to_nobody(tmp_path):
    path = tmp_path / "g.jsonl"
    with Ledger(path, num_parameters=7) as ledger:
        ledger.started(0, 0.0)
        ledger.reported(0, {"useful": 9.0}, at=9.0)
        ledger.count(10, is_committed=True)
        ledger.flush(9.0)
    with path.open("ab") as file:
        file.write(b'{"device": 0, "incar' + b" " * 2000)  # the launcher was killed
    with Ledger(path, num_parameters=7) as ledger:
        assert ledger.began_s == 9
        ledger.started(0, ledger.began_s + 1)
        ledger.started(1, ledger.began_s + 1)
        ledger.reported(0, {"useful": 3.0}, at=ledger.began_s + 6)
        ledger.count(5, is_committed=False)
        ledger.ended(ledger.began_s + 6)
        ledger.flush(ledger.began_s + 6)
        book = ledger.book(15.0)
    assert seconds_of(ledger, 15.0) == {
        (0, 0): {"useful": 9},
        (0, 1): {"startup": 2, "useful": 3},
        (1, 0): {"startup": 5},
    }
    assert path.read_bytes().endswith(b"}\n")
    found = read_book(path)
    assert Report.of(found) == Report.of(book)
    assert (found.time_s, found.resumed_s, found.tokens) == (15, (9,), Tokens(10, 15))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "has no whole line; expected a header of format 'uneven.goodput/1'"),
        ("[]\n", "line 1: expected an object, found list"),
        ("{oops\n", "line 1: not JSON: b'{oops'"),
        ('{"format": "uneven.goodput/9"}\n', "line 1: expected format 'uneven.goodput/1', found 'uneven.goodput/9'"),
        ('{"format": "uneven.goodput/1"}\n', "line 1: the field 'time_s' is missing"),
        ('HEADER{"device": 0}\n', "line 2: the field 'seconds' is missing"),
        ('HEADER{"device": 0, "seconds": {"rest": 1}}\n', "line 2: device 0: 'rest' is no kind of time"),
        ('HEADER{"time_s": "soon"}\n', "line 2: could not convert"),
    ],
)
def test_file_that_is_no_book_is_refused_with_its_line(content, message, tmp_path):
    path = tmp_path / "goodput.jsonl"
    path.write_text(content.replace("HEADER", '{"format": "uneven.goodput/1", "time_s": 0, "num_parameters": 1}\n'))
    with pytest.raises(GoodputError) as caught:
        read_book(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


def test_account_is_the_same_from_json():
    account = Account(2, 1, 3.0, 10.5, {"useful": 7.25, "idle": 0.25})
    assert Account.from_json(json.loads(json.dumps(account.to_json()))) == account


# Any job

NUM_DEVICES = 4
happenings = st.one_of(
    st.tuples(st.just("step"), st.lists(st.integers(0, 9), min_size=1, max_size=NUM_DEVICES), st.integers(0, 3)),
    st.tuples(st.just("fail"), st.integers(0, 9), st.integers(0, 9)),
    st.tuples(st.just("start"), st.integers(0, 5), st.integers(0, 5)),
    st.tuples(st.just("leave"), st.just(0), st.just(0)),
    st.tuples(st.sampled_from(["checkpoint", "reshard", "data"]), st.integers(0, 9), st.just(0)),
    st.tuples(st.just("kill"), st.just(0), st.just(0)),
    st.tuples(st.just("flush"), st.just(0), st.just(0)),
)


def apply(job, happening):
    what, first, second = happening
    present = sorted(job.clocks)
    missing = [device for device in range(NUM_DEVICES) if device not in job.clocks]
    if what == "step":
        job.step(first, bytes_s=second)
    elif what == "fail" and len(present) > 1:
        job.fail(present[first % len(present)], after_s=first, notice_s=second)
    elif what == "start" and missing:
        job.start(missing[0], boot_s=first, build_s=second)
    elif what == "leave" and len(present) > 1:
        job.leave(present[0])
    elif what in ("checkpoint", "reshard", "data"):
        job.spend(what, first)
    elif what == "flush":
        job.ledger.flush(job.time)


@given(jobs=st.lists(happenings, max_size=25))
def test_kinds_add_up_to_the_wall_clock_of_every_device_whatever_happens(jobs, tmp_path_factory):
    path = tmp_path_factory.mktemp("job") / "goodput.jsonl"
    job = SimulatedJob(Ledger(path, num_parameters=1))
    job.start(*range(NUM_DEVICES))
    for happening in jobs:
        if happening[0] == "kill":
            job.ledger.flush(job.time)
            job.ledger.close()
            job = SimulatedJob(Ledger(path, num_parameters=1))
            job.start(*range(NUM_DEVICES))
        else:
            apply(job, happening)
    job.end()
    report = Report.of(job.ledger.book(job.time))
    job.ledger.close()
    assert report == Report.of(read_book(path))
    for device in report.devices:
        assert device.unaccounted_s == 0
        assert sum(device.seconds.values()) == device.wall_s == job.time
        assert min(device.seconds.values()) >= 0
