"""`uneven goodput`: where the time of a run's devices went, as tables and as a page."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from uneven.cli.console import plain_console
from uneven.draw import TextTable, goodput_page, tables_of
from uneven.errors import GoodputError
from uneven.goodput import read_run

goodput_app = typer.Typer()


@goodput_app.command()
def goodput(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder; the run may be going on, or killed.")],
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The page, .html; default: goodput.html in the run's folder.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the numbers as JSON; a page is written only with --out.")
    ] = False,
) -> None:
    """Account for every second of every device of a run: useful, waiting, lost, absent."""
    if out is not None and out.suffix.lower() not in (".html", ".htm"):
        raise GoodputError(f"--out {out}: its suffix is {out.suffix!r}; the page is HTML, use .html")
    book, report = read_run(run)
    if as_json:
        typer.echo(json.dumps(report.to_json(), indent=1))
    else:
        console = plain_console()
        for table in tables_of(report):
            _print(table, console=console)
    if out is None and as_json:
        return
    page = out or run / "goodput.html"
    try:
        page.write_text(goodput_page(report, book, title=f"Goodput of {run.resolve().name}"))
    except OSError as error:
        raise GoodputError(f"can't write the page {page}: {error.strerror or error}") from None
    typer.echo(f"page: {page}", err=as_json)


def _print(table: TextTable, *, console: Console) -> None:
    gap = 2 if len(table.titles) <= 8 else 1
    drawn = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), show_header=any(table.titles))
    for index, title in enumerate(table.titles):
        drawn.add_column(title, justify="left" if index < table.num_words else "right", overflow="fold")
    for row in table.rows:
        drawn.add_row(*map(Text, row))
    console.print(Text(table.title, style="bold"))
    console.print(drawn)
    console.print()
