"""Where a job's time went, as pictures: a bar for each device, and a row for each device along time.

Both are figures with a tooltip for each of their parts, by gid.
"""

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator, PercentFormatter

from uneven.draw.palette import FAINT_INK, FAINT_LINE, HUES, INK
from uneven.draw.picture import blank_picture
from uneven.goodput import KINDS, DeviceTime, Event, Kind, Report, Timeline

WIDTH = 10.0
MOST_ROWS = 64
"""Of more devices, those with the least goodput are drawn."""
MOST_COLUMNS = 7
BLUE, ORANGE, GREEN, PINK, SKY, RED, YELLOW = HUES
KIND_COLOURS: Mapping[Kind, str] = MappingProxyType(
    {
        "useful": GREEN,
        "idle": YELLOW,
        "communication": ORANGE,
        "detection": RED,
        "recovery": PINK,
        "reshard": "#7b4173",
        "repeated": "#7f3b08",
        "checkpoint": SKY,
        "startup": BLUE,
        "data": "#8fd6bf",
        "absent": "#b3b3b3",
    }
)
MARKS: Mapping[str, str] = MappingProxyType(
    {"failure": "X", "hang": "X", "recovery": "o", "join": "^", "drain": "v", "reshard": "s", "checkpoint": "|"}
)
OTHER_MARK = "D"
JOB_ROW = -1
Drawn = tuple[Figure, dict[str, str]]
"""A figure, and the tooltips of its artists by gid."""


def kind_name(kind: str) -> str:
    """As it is written for people."""
    return "start-up" if kind == "startup" else kind


def draw_bars(report: Report) -> Drawn:
    """A bar for each device: shares of its time by kind."""
    devices = _drawn_devices(report)
    figure, axes = _rows(devices, report=report, extra=0.0)
    tips: dict[str, str] = {}
    left = [0.0] * len(devices)
    for kind in _kinds_in(report):
        shares = [100 * device.seconds.get(kind, 0.0) / device.wall_s if device.wall_s else 0.0 for device in devices]
        bars = axes.barh(range(len(devices)), shares, left=left, height=0.72, color=KIND_COLOURS[kind], linewidth=0)
        for device, bar in zip(devices, bars, strict=True):
            bar.set_gid(f"bar-{device.device}-{kind}")
            tips[bar.get_gid()] = _tip(device, kind)
        left = [before + share for before, share in zip(left, shares, strict=True)]
    axes.set_xlim(0, max([100.0, *left]))
    axes.xaxis.set_major_formatter(PercentFormatter(decimals=0))
    axes.set_xlabel("of the device's time")
    _finish(figure, axes, kinds=_kinds_in(report), marks=())
    return figure, tips


def draw_timeline(report: Report, timeline: Timeline) -> Drawn:
    """A row for each device: shares of its time by kind, along time, with a mark for each event."""
    devices = _drawn_devices(report)
    figure, axes = _rows(devices, report=report, extra=0.45)
    tips: dict[str, str] = {}
    edges = [index * timeline.bin_s for index in range(timeline.num_bins + 1)]
    for row, device in enumerate(devices):
        bins = timeline.devices.get(device.device, ())
        floor = [row + 0.36] * len(bins)
        for kind in _kinds_in(report):
            top = [low - 0.72 * each[kind] / timeline.bin_s for low, each in zip(floor, bins, strict=True)]
            if top != floor:
                steps = [[*values, values[-1]] for values in (floor, top)]
                has = [low != high for low, high in zip(floor, top, strict=True)]
                where = [before or here for before, here in zip([False, *has], [*has, False], strict=True)]
                area = axes.fill_between(edges, *steps, where, step="post", color=KIND_COLOURS[kind], linewidth=0)
                area.set_gid(f"row-{device.device}-{kind}")
                tips[area.get_gid()] = _tip(device, kind)
            floor = top
    tips |= _draw_events(axes, report.events, rows={device.device: row for row, device in enumerate(devices)})
    axes.set_xlim(0, max(report.wall_s, 1e-9))
    axes.set_xlabel("seconds of the job")
    _finish(figure, axes, kinds=_kinds_in(report), marks=tuple(dict.fromkeys(event.kind for event in report.events)))
    return figure, tips


def event_text(event: Event) -> str:
    """All of an event in a line."""
    parts = [f"{event.time_s:,.1f} s: {event.kind}"]
    parts += [] if event.device is None else [f"of device {event.device}"]
    parts += [] if event.step is None else [f"at step {event.step:,}"]
    parts += [] if event.detect_s is None else [f"noticed after {event.detect_s:.2f} s"]
    parts += [] if event.recover_s is None else [f"recovered in {event.recover_s:.2f} s"]
    parts += [] if event.bytes_moved is None else [f"{event.bytes_moved / 1e6:,.1f} MB moved"]
    return ", ".join(parts)


def _draw_events(axes: Any, events: Sequence[Event], *, rows: Mapping[int, int]) -> dict[str, str]:
    """A mark in the row of its device, or of the job; for what concerns no device that is drawn, in that of the job."""
    tips = {}
    if events:
        axes.set_ylim(max(rows.values(), default=0) + 0.5, JOB_ROW - 0.4)
        axes.set_yticks([JOB_ROW, *rows.values()], ["events", *(f"device {device}" for device in rows)])
    for index, event in enumerate(events):
        row = JOB_ROW if event.device is None else rows.get(event.device, JOB_ROW)
        mark = MARKS.get(event.kind, OTHER_MARK)
        points = axes.plot(event.time_s, row, marker=mark, markersize=7, linestyle="", **_mark_style(mark))
        points[0].set_gid(f"event-{index}")
        tips[f"event-{index}"] = event_text(event)
    return tips


def _mark_style(mark: str) -> dict[str, Any]:
    """Edges are visible on every colour of a row."""
    return {"color": INK, "markeredgecolor": INK if mark == "|" else "#ffffff", "markeredgewidth": 0.8, "zorder": 5}


def _drawn_devices(report: Report) -> list[DeviceTime]:
    worst = sorted(report.devices, key=lambda device: device.goodput)[:MOST_ROWS]
    return sorted(worst, key=lambda device: device.device)


def _kinds_in(report: Report) -> list[Kind]:
    return [kind for kind in KINDS if report.seconds[kind] > 0]


def _tip(device: DeviceTime, kind: Kind) -> str:
    seconds = device.seconds.get(kind, 0.0)
    share = seconds / device.wall_s if device.wall_s else 0.0
    return f"device {device.device}, {kind_name(kind)}: {seconds:,.1f} s, {share:.1%}"


def _rows(devices: list[DeviceTime], *, report: Report, extra: float) -> tuple[Figure, Any]:
    """A figure with a row for each device, from the top."""
    figure = blank_picture(WIDTH, 1.5 + 0.34 * max(len(devices), 1) + extra)
    figure.set_layout_engine("constrained")
    axes = figure.add_subplot()
    axes.set_ylim(max(len(devices), 1) - 0.5, -0.5)
    axes.set_yticks(range(len(devices)), [f"device {device.device}" for device in devices])
    if len(devices) < len(report.devices):
        title = f"the {len(devices)} of {len(report.devices):,} devices with the least goodput"
        axes.set_title(title, fontsize=9, color=FAINT_INK, loc="left")
    return figure, axes


def _finish(figure: Figure, axes: Any, *, kinds: Sequence[Kind], marks: Sequence[str]) -> None:
    """Legends and ink."""
    patches = [Patch(color=KIND_COLOURS[kind], label=kind_name(kind)) for kind in kinds]
    points = []
    for kind in marks:
        mark = MARKS.get(kind, OTHER_MARK)
        points += axes.plot([], [], marker=mark, linestyle="", label=kind, **_mark_style(mark))
    for handles, place in ((patches, "upper"), (points, "lower")):
        if handles:
            columns = math.ceil(len(handles) / math.ceil(len(handles) / MOST_COLUMNS))
            where = f"outside {place} left"
            figure.legend(handles=handles, loc=where, ncols=columns, frameon=False, fontsize=9, labelcolor=INK)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(FAINT_INK)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(colors=INK)
    axes.xaxis.label.set_color(INK)
    axes.xaxis.set_major_locator(MaxNLocator(10))
    axes.grid(axis="x", color=FAINT_LINE, linewidth=0.7)
    axes.set_axisbelow(True)
