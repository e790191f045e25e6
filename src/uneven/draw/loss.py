"""Losses as a picture: one line for each run, dashed lines for what they are to be measured by."""

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.ticker import MaxNLocator

from uneven.draw.palette import FAINT_INK, FAINT_LINE, colours_of
from uneven.draw.picture import blank_picture, save_picture

# More points than this are drawn faintly, under a line that averages over a part of them.
MOST_RAW_POINTS = 50
AVERAGED_PART = 25
LEGEND_LETTERS = 90
DASHES = ((0, (6, 3)), (0, (2, 2)), (0, (6, 2, 1, 2)), (0, (1, 3)))


def draw_loss(
    path: Path, *, curves: Mapping[str, Sequence[tuple[int, float]]], references: Mapping[str, float]
) -> None:
    """Write losses, nats per token, against steps as PNG or SVG, by the suffix of `path`.

    `curves` are pairs of step and loss by label; losses that are not finite are left out. `references` are levels
    such as the unigram entropy. Raises ConfigError if the file can't be written.
    """
    figure = blank_picture(7.5, 4.5)
    figure.set_layout_engine("constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="loss (nats per token)")
    colours = colours_of(range(len(curves)))
    for index, (label, points) in enumerate(curves.items()):
        finite = [(step, loss) for step, loss in points if math.isfinite(loss)]
        # Dashes, so that a curve under another one is seen.
        _draw_curve(axes, finite, label=label, colour=colours[index], linestyle="-" if index == 0 else (0, (4, 2)))
    for index, (label, level) in enumerate(references.items()):
        if math.isfinite(level):
            dashes = DASHES[index % len(DASHES)]
            axes.axhline(
                level, label=f"{label} {level:.2f}", color=FAINT_INK, linewidth=1.1, linestyle=dashes, zorder=1
            )
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color=FAINT_LINE, linewidth=0.7)
    axes.set_axisbelow(True)
    labels = axes.get_legend_handles_labels()[1]
    if labels:
        columns = max(1, min(3, LEGEND_LETTERS // max(map(len, labels))))
        figure.legend(loc="outside upper left", ncols=columns, frameon=False, fontsize=9)
    save_picture(figure, path)


def _draw_curve(axes: Any, points: list[tuple[int, float]], *, label: str, colour: str, linestyle: Any) -> None:
    steps, losses = [step for step, _ in points], [loss for _, loss in points]
    if len(points) <= MOST_RAW_POINTS:
        marker = "o" if len(points) == 1 else None
        axes.plot(steps, losses, label=label, color=colour, linewidth=1.6, marker=marker, linestyle=linestyle)
        return
    axes.plot(steps, losses, color=colour, linewidth=0.7, alpha=0.3)
    smooth = _smooth(losses, len(losses) // AVERAGED_PART)
    axes.plot(steps, smooth, label=label, color=colour, linewidth=1.8, linestyle=linestyle)


def _smooth(values: list[float], reach: int) -> list[float]:
    """Means over up to `reach` neighbours on each side: early on fewer, since losses fall steeply there."""
    sums = list(itertools.accumulate(values, initial=0.0))
    windows = [(i - min(reach, i), min(i + min(reach, i) + 1, len(values))) for i in range(len(values))]
    return [(sums[stop] - sums[start]) / (stop - start) for start, stop in windows]
