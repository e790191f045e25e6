"""A plan as a picture: who holds what.

A panel for each replica; a row for modules divided alike; in it a strip of units, coloured by the device that owns
them. Under the query heads lie the key and value heads, in as many lanes as devices hold one. All lengths are inches.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.patches import Rectangle

from uneven.draw.holdings import Holding, holdings_of, num_elements
from uneven.draw.palette import FAINT_INK, INK, PAPER, colours_of, ink_on
from uneven.draw.picture import blank_picture, save_picture
from uneven.draw.rows import Gap, Row, noun_of, rows_of
from uneven.layout import LogicalAxis, ParallelPlan, Partition

PANELS_A_LINE, MOST_PANELS = 3, 12
MARGIN, NAMES_WIDTH, PANEL_WIDTH, PANEL_GAP = 0.25, 2.2, 4.0, 0.35
TITLE_HEIGHT, PANEL_TITLE_HEIGHT, FOOT_HEIGHT = 0.55, 0.27, 0.3
STRIP, KV_GAP, KV_STRIP, ROW_GAP = 0.25, 0.03, 0.14, 0.13
LEGEND_GAP, LEGEND_LINE, SWATCH = 0.1, 0.19, 0.12
FONT, SMALL_FONT, TITLE_FONT = 8.5, 7.5, 11.0
HATCH = "////"


@dataclass(frozen=True, slots=True)
class Canvas:
    """One set of axes over the whole figure, in inches from its upper left corner; a colour for each device."""

    axes: Any
    colours: dict[int, str]

    def text(self, at: tuple[float, float], text: str, **style: Any) -> None:
        settings = {"fontsize": FONT, "color": INK, "va": "center_baseline", "ha": "left"} | style
        self.axes.text(*at, text, **settings)

    def box(self, at: tuple[float, float], size: tuple[float, float], **style: Any) -> None:
        self.axes.add_artist(Rectangle(at, *size, **({"linewidth": 0.0} | style)))


@dataclass(frozen=True, slots=True)
class Arrangement:
    """What the picture shows, and where: lines of panels, in each panel the same rows."""

    plan: ParallelPlan
    rows: tuple[Row | Gap, ...]
    holdings: dict[int, Holding]

    @property
    def num_panels(self) -> int:
        return min(len(self.plan.replicas), MOST_PANELS)

    @property
    def num_left_out(self) -> int:
        return len(self.plan.replicas) - self.num_panels

    @property
    def has_shared_heads(self) -> bool:
        """Whether a key and value head that is shown is held by several devices of its replica."""
        grouped = [row for row in self.rows if isinstance(row, Row) and row.kv_group > 1]
        return any(len(held) > 1 for row in grouped for r in range(self.num_panels) for held in row.holders(r))

    @property
    def lines(self) -> list[range]:
        """The replicas that stand side by side, line by line."""
        starts = range(0, self.num_panels, PANELS_A_LINE)
        return [range(start, min(start + PANELS_A_LINE, self.num_panels)) for start in starts]

    @property
    def tops(self) -> list[float]:
        """The upper edge of each row below the top of its panel, and at last that of the legend."""
        return list(itertools.accumulate(map(_height, self.rows), initial=PANEL_TITLE_HEIGHT))

    @property
    def width(self) -> float:
        return MARGIN + NAMES_WIDTH + len(self.lines[0]) * (PANEL_WIDTH + PANEL_GAP) - PANEL_GAP + MARGIN

    def line_height(self, replicas: range) -> float:
        most = max(len(self.plan.replicas[index].layout.devices) for index in replicas)
        return self.tops[-1] + LEGEND_GAP + (1 + -(-most // _legend_columns(most))) * LEGEND_LINE + 2 * ROW_GAP


def draw_plan(plan: ParallelPlan, path: Path) -> None:
    """Write the picture as PNG or SVG, by the suffix of `path`.

    Layers that every replica divides alike share a row; of many rows or replicas some are left out, and the picture
    says how many. Percentages are of the whole model. Raises ConfigError if the file can't be written.
    """
    holdings = {holding.device: holding for holding in holdings_of(plan)}
    arrangement = Arrangement(plan, rows_of(plan), holdings)
    foot = FOOT_HEIGHT if arrangement.has_shared_heads or arrangement.num_left_out else 0.0
    height = TITLE_HEIGHT + sum(map(arrangement.line_height, arrangement.lines)) + foot
    figure = blank_picture(arrangement.width, height)
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, arrangement.width), ylim=(height, 0))
    axes.set_axis_off()
    canvas = Canvas(axes, colours_of(plan.devices))
    canvas.text((MARGIN, MARGIN + 0.05), _title(plan), fontsize=TITLE_FONT, weight="bold")
    top = TITLE_HEIGHT
    for replicas in arrangement.lines:
        _draw_line(canvas, arrangement, replicas=replicas, top=top)
        top += arrangement.line_height(replicas)
    _draw_foot(canvas, arrangement, top=top)
    save_picture(figure, path)


def _draw_line(canvas: Canvas, arrangement: Arrangement, *, replicas: range, top: float) -> None:
    """Some replicas side by side, the names of the rows to their left."""
    placed = [(row, top + offset) for row, offset in zip(arrangement.rows, arrangement.tops[:-1], strict=True)]
    for row, row_top in placed:
        _draw_name(canvas, row, top=row_top)
    for position, index in enumerate(replicas):
        left = MARGIN + NAMES_WIDTH + position * (PANEL_WIDTH + PANEL_GAP)
        replica = arrangement.plan.replicas[index]
        devices = replica.layout.devices
        title = f"replica {index} · {_count(len(devices), 'device')} · batch share {replica.batch_share}"
        canvas.text((left, top + 0.08), title, weight="bold")
        for row, row_top in placed:
            if isinstance(row, Row):
                _draw_row(canvas, row, replica=index, at=(left, row_top))
        held = [arrangement.holdings[device] for device in devices]
        at = (left, top + arrangement.tops[-1] + LEGEND_GAP)
        _draw_legend(canvas, held, at=at, whole=arrangement.plan.structure.num_parameters)


def _draw_name(canvas: Canvas, row: Row | Gap, *, top: float) -> None:
    if isinstance(row, Gap):
        canvas.text((MARGIN, top + 0.07), row.text, color=FAINT_INK, fontsize=SMALL_FONT, style="italic")
        return
    canvas.text((MARGIN, top + STRIP / 2), f"{row.name} ({row.size})")
    if row.kv_group > 1:
        middle = top + STRIP + KV_GAP + KV_STRIP / 2
        text = _count(row.num_kv_heads, "key/value head")
        canvas.text((MARGIN + 0.12, middle), text, color=FAINT_INK, fontsize=SMALL_FONT)


def _draw_row(canvas: Canvas, row: Row, *, replica: int, at: tuple[float, float]) -> None:
    left, top = at
    partition = row.partitions[replica]
    unit = PANEL_WIDTH / len(partition.owners)
    runs = _runs(partition)
    spans = [(left + start * unit, (stop - start) * unit) for _, start, stop in runs]
    colours = [canvas.colours[device] for device, _, _ in runs]
    is_wide = min(width for _, width in spans) > 0.05
    edge = {"edgecolors": PAPER, "linewidths": 1.0} if is_wide else {"linewidths": 0.0}
    canvas.axes.broken_barh(spans, (top, STRIP), facecolors=colours, **edge)
    labels = _labels(row.axis, runs, widths=[width for _, width in spans])
    for text, (x, width), (device, _, _) in zip(labels, spans, runs, strict=True):
        if text:
            canvas.text((x + width / 2, top + STRIP / 2), text, ha="center", color=ink_on(canvas.colours[device]))
    if row.kv_group > 1:
        _draw_kv_heads(canvas, row, replica=replica, at=(left, top + STRIP + KV_GAP))


def _draw_kv_heads(canvas: Canvas, row: Row, *, replica: int, at: tuple[float, float]) -> None:
    """Each key and value head below its query heads, a lane for each holder, hatched if there are several."""
    unit = PANEL_WIDTH / row.axis.num_units
    x, top = at
    for head, holders in enumerate(row.holders(replica)):
        width = (min((head + 1) * row.kv_group, row.axis.num_units) - head * row.kv_group) * unit
        lane = KV_STRIP / len(holders)
        for index, device in enumerate(holders):
            canvas.box((x, top + index * lane), (width, lane), facecolor=canvas.colours[device])
        if len(holders) > 1:
            canvas.box((x, top), (width, KV_STRIP), fill=False, hatch=HATCH, edgecolor=INK)
        canvas.box((x, top), (width, KV_STRIP), fill=False, edgecolor=PAPER, linewidth=1.0)
        x += width


def _draw_legend(canvas: Canvas, held: Sequence[Holding], *, at: tuple[float, float], whole: int) -> None:
    columns = _legend_columns(len(held))
    lines = -(-len(held) // columns)
    width = PANEL_WIDTH / columns
    style = {"fontsize": SMALL_FONT, "color": FAINT_INK}
    for column in range(columns):
        x = at[0] + column * width
        canvas.text((x, at[1]), "device", **style)
        canvas.text((x + 1.2, at[1]), "parameters", ha="right", **style)
        canvas.text((x + 1.78, at[1]), "of model", ha="right", **style)
    for index, holding in enumerate(held):
        x, y = at[0] + index // lines * width, at[1] + (1 + index % lines) * LEGEND_LINE
        canvas.box((x, y - SWATCH / 2), (SWATCH, SWATCH), facecolor=canvas.colours[holding.device])
        canvas.text((x + SWATCH + 0.08, y), f"{holding.device}")
        canvas.text((x + 1.2, y), short_count(holding.num_parameters), ha="right")
        canvas.text((x + 1.78, y), f"{holding.num_parameters / whole:.1%}", ha="right")


def _draw_foot(canvas: Canvas, arrangement: Arrangement, *, top: float) -> None:
    """What the hatching means, if there is any, and what was left out."""
    x = MARGIN
    style = {"fontsize": SMALL_FONT, "color": FAINT_INK}
    if arrangement.has_shared_heads:
        canvas.box((x, top - KV_STRIP / 2), (0.3, KV_STRIP), fill=False, hatch=HATCH, edgecolor=INK)
        canvas.text((x + 0.4, top), "key/value head held by several devices, a lane for each", **style)
        x += NAMES_WIDTH + PANEL_WIDTH
    if arrangement.num_left_out:
        canvas.text((x, top), f"{_count(arrangement.num_left_out, 'more replica')} left out", **style)


def short_count(number: int) -> str:
    """Exact below 10,000, else three digits and k, M, B or T."""
    if number < 10_000:
        return f"{number:,}"
    power = next((power for power in (1, 2, 3) if number < 999.5 * 1000**power), 4)
    scaled = number / 1000**power
    return f"{scaled:.{2 if scaled < 9.995 else 1 if scaled < 99.95 else 0}f} {' kMBT'[power]}"


def _title(plan: ParallelPlan) -> str:
    structure = plan.structure
    size = f"{short_count(structure.num_parameters)} parameters"
    return (
        f"{structure.family} · {size} · {_count(len(plan.replicas), 'replica')} · {_count(len(plan.devices), 'device')}"
    )


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _height(row: Row | Gap) -> float:
    if isinstance(row, Gap):
        return 0.14 + ROW_GAP
    return STRIP + (KV_GAP + KV_STRIP if row.kv_group > 1 else 0.0) + ROW_GAP


def _legend_columns(num_devices: int) -> int:
    return 1 if num_devices <= 4 else 2


def _runs(partition: Partition) -> list[tuple[int, int, int]]:
    """Maximal runs of units with one owner: owner, first unit, the unit after the last."""
    runs = []
    start = 0
    for device, run in itertools.groupby(partition.owners):
        stop = start + len(list(run))
        runs.append((device, start, stop))
        start = stop
    return runs


def _labels(axis: LogicalAxis, runs: list[tuple[int, int, int]], *, widths: list[float]) -> list[str]:
    """The longest kind of label that fits into every run; if none does, the device's id in those that hold it."""
    noun = noun_of(axis)
    sizes = [num_elements(axis, stop - start, has_last=stop == axis.num_units) for _, start, stop in runs]
    owned = [(device, f"{size:,}") for (device, _, _), size in zip(runs, sizes, strict=True)]
    kinds = (
        [f"device {device}: {size} {noun}" for device, size in owned],
        [f"{device}: {size} {noun}" for device, size in owned],
        [f"{device}: {size}" for device, size in owned],
    )
    for labels in kinds:
        if all(_fits(label, width) for label, width in zip(labels, widths, strict=True)):
            return labels
    ids = [f"{device}" for device, _ in owned]
    return [text if _fits(text, width) else "" for text, width in zip(ids, widths, strict=True)]


def _fits(text: str, width: float) -> bool:
    """Whether a label is narrower than `width` inches; digits are 0.64 em wide, letters less on average."""
    return sum(0.64 if letter.isdigit() else 0.56 for letter in text) * FONT / 72 + 0.06 < width
