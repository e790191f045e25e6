"""`uneven goodput` as a user types it, on the folder of a simulated job."""

import json
from pathlib import Path

import pytest

from tests.e2e.command import uneven_here
from tests.goodput_job import write_run
from uneven.goodput import read_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    write_run(tmp_path / "run")
    return tmp_path / "run"


def test_tables_and_page(run: Path) -> None:
    done = uneven_here("goodput", "run", cwd=run.parent)
    assert (done.returncode, done.stderr) == (0, "")
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    report = read_run(run)[1]
    assert f"of the allocated devices' time {report.goodput_allocated:.1%}" in lines
    assert f"of the healthy devices' time {report.goodput_healthy:.1%}" in lines
    assert "unaccounted 0.00 device-seconds, 0.00%" in lines
    assert any(line.startswith("detection from a failure until it was noticed 12.0 ") for line in lines)
    assert any(line == "recovery 74.0 1 4.00 3.00 1.0" for line in lines), done.stdout
    assert lines[-1] == "page: run/goodput.html"
    assert max(map(len, done.stdout.splitlines())) <= 120
    assert (run / "goodput.html").read_text().startswith("<!DOCTYPE html>")


def test_json_is_all_of_the_output(run: Path) -> None:
    done = uneven_here("goodput", "run", "--json", cwd=run.parent)
    assert json.loads(done.stdout) == read_run(run)[1].to_json()
    assert not (run / "goodput.html").exists()
    done = uneven_here("goodput", "run", "--json", "--out", "page.html", cwd=run.parent)
    assert json.loads(done.stdout)["num_devices"] == 3
    assert done.stderr == "page: page.html\n"
    assert (run.parent / "page.html").exists()


def test_job_that_was_killed_or_goes_on_has_a_report(run: Path) -> None:
    path = run / "goodput.jsonl"
    path.write_bytes(path.read_bytes()[:2500])
    (run / "events.jsonl").unlink()
    done = uneven_here("goodput", "run", cwd=run.parent)
    assert (done.returncode, done.stderr) == (0, "")
    assert "unaccounted" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("elsewhere",), "elsewhere: does not exist; expected the folder of a run"),
        (("file.txt",), "file.txt: is a file; expected the folder of a run"),
        (("empty",), "empty: has no goodput.jsonl; expected the folder of a run"),
        (("broken",), "broken/goodput.jsonl, line 1: not JSON: b'nothing'"),
        (("run", "--out", "page.pdf"), "--out page.pdf: its suffix is '.pdf'; the page is HTML, use .html"),
        (("run", "--out", "no/page.html"), "can't write the page no/page.html: No such file or directory"),
    ],
)
def test_mistake_is_one_message(run: Path, arguments: tuple[str, ...], message: str) -> None:
    (run.parent / "file.txt").write_text("")
    (run.parent / "empty").mkdir()
    (run.parent / "broken").mkdir()
    (run.parent / "broken" / "goodput.jsonl").write_text("nothing\n")
    done = uneven_here("goodput", *arguments, cwd=run.parent)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {message}")
    assert "Traceback" not in done.stderr
