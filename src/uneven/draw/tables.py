"""The tables of a goodput report, as cells of text: the same on a page and in a terminal."""

from dataclasses import dataclass

from uneven.draw.goodput import kind_name
from uneven.goodput import KINDS, MAX_UNACCOUNTED, Event, Report


@dataclass(frozen=True, slots=True)
class TextTable:
    """Rows of as many cells as there are titles. `num_words` of the first columns are words, the others numbers."""

    title: str
    titles: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    num_words: int = 1


def tables_of(report: Report) -> tuple[TextTable, ...]:
    """Results, kinds, devices, and what happened, if anything did."""
    events = (_events(report.events),) if report.events else ()
    return (_results(report), _kinds(report), _devices(report), *events)


def _results(report: Report) -> TextTable:
    tokens = report.tokens
    warning = "" if report.unaccounted < MAX_UNACCOUNTED else f", above {MAX_UNACCOUNTED:.0%}: don't rely on all this"
    rows = (
        ("of the allocated devices' time", f"{report.goodput_allocated:.1%}"),
        ("of the healthy devices' time", f"{report.goodput_healthy:.1%}"),
        ("wall clock", f"{report.wall_s:,.1f} s of {len(report.devices):,} devices"),
        ("unaccounted", f"{report.unaccounted_s:,.2f} device-seconds, {report.unaccounted:.2%}{warning}"),
        ("tokens", f"{tokens.committed:,} committed of {tokens.computed:,} computed, {report.useful_tokens:.2%}"),
        ("FLOPs", f"{report.flops(tokens.committed):.3g} of {report.flops(tokens.computed):.3g}, by 6 per parameter"),
        ("a useful second", f"{report.device_tokens_per_s:,.1f} tokens of one device"),
    )
    return TextTable("Goodput", ("", ""), rows, num_words=2)


def _kinds(report: Report) -> TextTable:
    seconds, allocated_s = report.seconds, report.allocated_s
    rows = tuple(
        (kind_name(kind), meaning, f"{seconds[kind]:,.1f}", f"{seconds[kind] / allocated_s if allocated_s else 0:.2%}")
        for kind, meaning in KINDS.items()
    )
    total = ("all", "from each device's first start on", f"{allocated_s:,.1f}", "")
    return TextTable("Kinds of time", ("kind", "", "device-seconds", "share"), (*rows, total), num_words=2)


def _devices(report: Report) -> TextTable:
    """Seconds; without the kinds that no device has spent."""
    total = report.seconds
    kinds = [kind for kind in KINDS if total[kind] > 0]
    rows = tuple(
        (
            f"{device.device}",
            f"{device.goodput:.1%}",
            *(f"{device.seconds[kind]:,.1f}" for kind in kinds),
            f"{device.unaccounted_s:,.2f}",
        )
        for device in report.devices
    )
    titles = ("device", "goodput", *map(kind_name, kinds), "unaccounted")
    return TextTable("Seconds of each device", titles, rows)


def _events(events: tuple[Event, ...]) -> TextTable:
    rows = tuple(
        (
            event.kind,
            f"{event.time_s:,.1f}",
            _or_nothing(event.device, "d"),
            _or_nothing(event.step, ",d"),
            _or_nothing(event.detect_s, ",.2f"),
            _or_nothing(event.recover_s, ",.2f"),
            _or_nothing(event.bytes_moved and event.bytes_moved / 1e6, ",.1f"),
        )
        for event in events
    )
    titles = ("event", "at, s", "device", "step", "noticed after, s", "recovered in, s", "moved, MB")
    return TextTable("Events", titles, rows)


def _or_nothing(value: float | None, form: str) -> str:
    return "" if value is None else f"{value:{form}}"
