"""What every benchmark says beside its numbers: the spread over repetitions, the machine, its load, the command.

Ratios are of neighbours in one interleaved run. Times of different runs are not compared, least of all on a machine
that others use too.
"""

import argparse
import json
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, smallest and largest of some repetitions."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f} to {self.high:.2f})"


def spread(values: Sequence[float]) -> Spread:
    return Spread(statistics.median(values), min(values), max(values))


def ratio(found: Sequence[float], against: Sequence[float]) -> Spread:
    """Of each repetition to its neighbour in the same round."""
    return spread([a / b for a, b in zip(found, against, strict=True)])


def verdict(found: float, *, at_most: float | None = None, at_least: float | None = None) -> str:
    """Whether a target was met, in the words of a results page."""
    if at_most is not None:
        return f"at most {at_most:g}: {'met' if found <= at_most else 'MISSED'}"
    return f"at least {at_least:g}: {'met' if at_least is not None and found >= at_least else 'MISSED'}"


def parse_arguments(description: str | None, argv: Sequence[str] | None, **numbers: str) -> argparse.Namespace:
    """The options that all benchmarks have, and those of one that take whole numbers, with what they mean."""
    parser = argparse.ArgumentParser(description=(description or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="small sizes and few repetitions; no result to keep")
    parser.add_argument("--write", action="store_true", help="write the page to benchmarks/results")
    for name, meaning in numbers.items():
        parser.add_argument(f"--{name}", type=int, help=meaning)
    return parser.parse_args(argv)


def machine() -> str:
    """The processor as the kernel names it, and the memory."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{len(os.sched_getaffinity(0))} cores of {model}, {gib:.0f} GiB"


def surroundings(name: str, *, load_before: float) -> str:
    """The last paragraph of a results page. The load after a run is that of the run itself and of others."""
    return (
        f"{machine()}; torch {torch.__version__}, transformers {transformers.__version__}, Python "
        f"{platform.python_version()}; load average of a minute {load_before:.2f} before and {os.getloadavg()[0]:.2f} "
        f"after; `.venv/bin/python -m benchmarks.{name} --write`"
    )


def publish(name: str, lines: Sequence[str], *, raw: Any, options: argparse.Namespace) -> None:
    """Print a page; with `--write` keep it and the numbers behind it."""
    text = "\n".join(lines) + "\n"
    print(text)
    if options.write:
        folder = ROOT / "benchmarks/results"
        (folder / f"{name}.md").write_text(text)
        (folder / f"{name}.json").write_text(json.dumps(raw, indent=1) + "\n")
