"""Where commands print."""

from rich.console import Console

NARROWEST = 120
"""Columns of output that goes to no terminal, so that tables and paths in files are not folded."""


def plain_console(*, quiet: bool = False) -> Console:
    """Standard output: as wide as its terminal, or wide enough for a file; or nowhere."""
    console = Console(highlight=False, quiet=quiet)
    if not console.is_terminal and console.width < NARROWEST:
        console.width = NARROWEST
    return console
