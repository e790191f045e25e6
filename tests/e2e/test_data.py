"""Data as people have it, from the command line: records, conversations, boundaries, evaluation, events and traces."""

import json
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.chats import CHATML, chat_tokenizer
from tests.e2e.command import TinyJob

ALONE, DIVIDED = ["--replicas", "1"], ["--replicas", "2,1"]
EXACT: dict[str, Any] = {"train__precision": "fp64", "train__lr": 0.01, "train__warmup_steps": 1}


def write_chats(tiny: TinyJob, count: int = 120) -> dict[str, Any]:
    """Settings of a job on conversations: a file of them, and a tokenizer with a template."""
    with (tiny.folder / "chats.jsonl").open("w") as file:
        for n in range(count):
            messages = [{"role": "user", "content": f"{n} + {n}?"}]
            messages += [{"role": "assistant", "content": f"{n + n}, of course " * (1 + n % 3)}]
            file.write(json.dumps({"messages": messages, "id": n}) + "\n")
    chat_tokenizer(tiny.folder / "tokenizer", CHATML)
    return {
        "data__paths": ["chats.jsonl"],
        "tokenizer": "tokenizer",
        "train__seq_len": 127,
        "train__global_batch": 5,
    }


def steps(tiny: TinyJob, out: str) -> list[dict[str, Any]]:
    return [line for line in tiny.metrics(out) if "loss" in line]


def evaluations(tiny: TinyJob, out: str) -> list[dict[str, Any]]:
    return [line for line in tiny.metrics(out) if "heldout_loss" in line]


def assert_same_course(tiny: TinyJob, one: str, other: str) -> None:
    for key in ("loss", "grad_norm"):
        found, needed = ([line[key] for line in steps(tiny, out)] for out in (other, one))
        np.testing.assert_allclose(found, needed, rtol=1e-12)
    assert [line["tokens"] for line in steps(tiny, one)] == [line["tokens"] for line in steps(tiny, other)]


def test_conversations_train_alike_on_every_division(tiny: TinyJob) -> None:
    chats = write_chats(tiny) | EXACT | {"eval__every": 2, "eval__reload": True}
    for out, division in (("one", ALONE), ("many", DIVIDED)):
        result = tiny.train(*division, out=out, **chats)
        assert result.returncode == 0, result.stderr
    assert "120 conversations in rows of 128 tokens" in result.stdout
    assert_same_course(tiny, "one", "many")
    tokens = [line["tokens"] for line in steps(tiny, "many")]
    assert len(set(tokens)) > 1, "rows have unlike numbers of targets"
    summary = tiny.summary("many")
    assert summary["tokens"] == sum(tokens)
    assert summary["reloaded_heldout_loss"] == pytest.approx(summary["heldout_loss"], rel=1e-5)
    data = json.loads((tiny.folder / "many/data.json").read_text())
    assert (data["documents"], data["files"], data["cut_documents"], data["dropped_documents"]) == (120, 1, 0, 0)
    assert 0 < data["padding_tokens"] < data["tokens"]
    template = (tiny.folder / "many/model/chat_template.jinja").read_text()
    assert template == CHATML


def test_conversations_that_are_cut_are_reported(tiny: TinyJob) -> None:
    result = tiny.train(*ALONE, **write_chats(tiny) | {"train__seq_len": 55, "train__steps": 1})
    assert result.returncode == 0, result.stderr
    data = json.loads((tiny.folder / "run/data.json").read_text())
    assert data["cut_documents"] > 0
    assert data["documents"] + data["dropped_documents"] == 120
    shown = " ".join(result.stdout.split())
    assert f"{data['cut_documents']} were cut at their end, {data['dropped_documents']} left out" in shown


def test_boundaries_inside_rows_train_alike_on_every_division(tiny: TinyJob) -> None:
    lines = [json.dumps({"text": f"line {n} of {n * n % 17}"}) for n in range(400)]
    (tiny.folder / "texts.jsonl").write_text("\n".join(lines))
    texts = {"data__paths": "texts.jsonl"} | EXACT
    for out, division in (("one", ALONE), ("many", ["--replicas", "3,2,1"])):
        result = tiny.train(*division, out=out, **texts)
        assert result.returncode == 0, result.stderr
    assert_same_course(tiny, "one", "many")
    assert all(7 * 28 <= line["tokens"] < 7 * 32 for line in steps(tiny, "many"))
    assert tiny.train(*DIVIDED, out="joined", data__restart_at_documents=False, **texts).returncode == 0
    assert all(line["tokens"] == 7 * 32 for line in steps(tiny, "joined"))
    assert steps(tiny, "joined")[0]["loss"] != steps(tiny, "one")[0]["loss"]


def test_the_held_out_loss_is_taken_every_so_many_steps(tiny: TinyJob) -> None:
    for out, division, every in (("one", ALONE, 2), ("many", DIVIDED, 2), ("short", DIVIDED, 0)):
        result = tiny.train(*division, out=out, eval__every=every, train__steps=5, **EXACT)
        assert result.returncode == 0, result.stderr
        if every:
            assert f"step 4/5  held out {evaluations(tiny, out)[1]['heldout_loss']:.3f}" in result.stdout
    found = evaluations(tiny, "many")
    assert [line["step"] for line in found] == [2, 4, 5]
    needed = [line["heldout_loss"] for line in evaluations(tiny, "one")]
    np.testing.assert_allclose([line["heldout_loss"] for line in found], needed, rtol=1e-12)
    assert found[-1]["heldout_loss"] == tiny.summary("many")["heldout_loss"]
    assert found[0]["heldout_loss"] > found[-1]["heldout_loss"]
    assert [line["loss"] for line in steps(tiny, "short")] == [line["loss"] for line in steps(tiny, "many")]
    assert evaluations(tiny, "short") == []


def test_files_of_their_own_are_held_out(tiny: TinyJob) -> None:
    (tiny.folder / "other.jsonl").write_text(json.dumps({"text": "x" * 33 * 4}))
    result = tiny.train(*ALONE, data__heldout_paths="other.jsonl", train__steps=1)
    assert result.returncode == 0, result.stderr
    data = json.loads((tiny.folder / "run/data.json").read_text())
    assert (data["heldout_corpus"], data["heldout_sequences"]) == ("other.jsonl", 4)
    assert data["train_sequences"] * 32 < data["tokens"] <= (data["train_sequences"] + 1) * 32


# Events and traces


def read_events(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Steps and values by name, from the event files of a folder: records with their length, in protocol buffers."""
    from tensorboardX.proto.event_pb2 import Event

    found: dict[str, list[tuple[int, float]]] = {}
    for path in folder.iterdir():
        content = path.read_bytes()
        while content:
            (length,) = struct.unpack_from("<Q", content)
            event = Event.FromString(content[12 : 12 + length])
            content = content[12 + length + 4 :]
            for value in event.summary.value:
                found.setdefault(value.tag, []).append((event.step, value.simple_value))
    return found


def test_events_say_what_the_metrics_say(tiny: TinyJob) -> None:
    pytest.importorskip("tensorboardX", reason="event files need the extra uneven[tensorboard]")
    result = tiny.train(*DIVIDED, log__tensorboard=True, eval__every=3)
    assert result.returncode == 0, result.stderr
    events = read_events(tiny.folder / "run/tensorboard")
    for name in ("loss", "grad_norm", "lr", "tokens"):
        needed = [(line["step"], pytest.approx(line[name], rel=1e-6)) for line in steps(tiny, "run")]
        assert events[f"train/{name}"] == needed
    needed = [(line["step"], pytest.approx(line["heldout_loss"], rel=1e-6)) for line in evaluations(tiny, "run")]
    assert events["heldout/loss"] == needed
    assert len(needed) == 2


def test_events_without_the_package_say_how_to_install_it(tiny: TinyJob, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    result = tiny.train(*ALONE, log__tensorboard=True)
    assert result.returncode == 2
    assert result.stderr.startswith("error: log.tensorboard needs the package tensorboardX")
    assert "pip install 'uneven[tensorboard]'" in result.stderr
    assert not (tiny.folder / "run").exists()


def test_parquet_without_the_package_is_a_mistake_of_the_user(tiny: TinyJob, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    (tiny.folder / "a.parquet").write_bytes(b"PAR1")
    result = tiny.train(*ALONE, data__paths="a.parquet")
    assert result.returncode == 2
    assert "pip install 'uneven[datasets]'" in result.stderr
    assert not (tiny.folder / "run").exists()


@pytest.mark.parametrize(("num_steps", "traced"), [(6, [3, 4, 5]), (1, [1])])
def test_every_rank_leaves_a_trace_of_a_few_steps(tiny: TinyJob, num_steps: int, traced: list[int]) -> None:
    result = tiny.train(*DIVIDED, "--profile", train__steps=num_steps)
    assert result.returncode == 0, result.stderr
    names = [f"profile/rank-{device}.json" for device in range(3)]
    assert tiny.summary()["profile"] == names
    for name in names:
        assert f"run/{name}" in result.stdout
        events = json.loads((tiny.folder / "run" / name).read_text())["traceEvents"]
        assert all({"name", "ph"} <= event.keys() for event in events)
        spans = [event["name"] for event in events if event["ph"] == "X"]
        assert [span for span in spans if span.startswith("step ")] == [f"step {step}" for step in traced]
        for part in ("forward", "backward", "sync", "commit and apply"):
            assert spans.count(part) >= len(traced), part
        assert any("all_reduce" in span for span in spans)
