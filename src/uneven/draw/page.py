"""A job's goodput as one page of HTML that needs nothing else: numbers, pictures as SVG, tables. Light or dark."""

from collections.abc import Sequence
from html import escape

from uneven.draw.goodput import draw_bars, draw_timeline
from uneven.draw.palette import FAINT_INK, FAINT_LINE, INK, PAPER
from uneven.draw.picture import inline_svg
from uneven.draw.tables import TextTable, tables_of
from uneven.goodput import Book, Report, Timeline

STYLE = f"""
:root {{ color-scheme: light dark; --ink: {INK}; --faint: {FAINT_INK}; --line: {FAINT_LINE}; --paper: {PAPER}; }}
@media (prefers-color-scheme: dark) {{
  :root {{ --ink: #e6e6e6; --faint: #a3a3a3; --line: #3d3d3d; --paper: #191919; }}
}}
body {{ font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }}
h1, h2 {{ line-height: 1.2; }}
svg {{ width: 100%; height: auto; }}
table {{ border-collapse: collapse; display: block; overflow-x: auto; }}
th, td {{ padding: .2rem .7rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }}
th {{ color: var(--faint); font-weight: normal; }}
.word {{ text-align: left; }}
"""


def goodput_page(report: Report, book: Book, *, title: str) -> str:
    """The page. `book` is what the report was made from: its lines tell when each second was."""
    results, *details = map(_html_table, tables_of(report))
    bars, bar_tips = draw_bars(report)
    timeline, timeline_tips = draw_timeline(report, Timeline.of(book))
    parts = (
        f"<h1>{escape(title)}</h1>",
        results,
        "<h2>Where the time of each device went</h2>",
        inline_svg(bars, name="bars", tips=bar_tips),
        "<h2>When</h2>",
        inline_svg(timeline, name="timeline", tips=timeline_tips),
        *details,
    )
    head = (
        '<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title>",
        f"<style>{STYLE}</style>",
    )
    return "\n".join(
        ("<!DOCTYPE html>", '<html lang="en"><head>', *head, "</head><body>", *parts, "</body></html>", "")
    )


def _html_table(table: TextTable) -> str:
    rows = [_html_row(table.titles, cell="th", num_words=table.num_words)] if any(table.titles) else []
    rows += [_html_row(row, cell="td", num_words=table.num_words) for row in table.rows]
    return "\n".join((f"<h2>{escape(table.title)}</h2>", "<table>", *rows, "</table>"))


def _html_row(texts: Sequence[str], *, cell: str, num_words: int) -> str:
    words = [f'<{cell} class="word">{escape(text)}</{cell}>' for text in texts[:num_words]]
    numbers = [f"<{cell}>{escape(text)}</{cell}>" for text in texts[num_words:]]
    return f"<tr>{''.join((*words, *numbers))}</tr>"
