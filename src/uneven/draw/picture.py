"""A figure of a given size in inches, and its file: PNG or SVG by suffix, the same bytes for the same picture.

For a page of HTML, an SVG whose ink and paper are the page's, with tooltips.
"""

import html
import io
import re
from collections.abc import Mapping
from pathlib import Path
from typing import IO

import matplotlib
from matplotlib.figure import Figure

from uneven.draw.palette import FAINT_INK, FAINT_LINE, INK, PAPER
from uneven.errors import ConfigError

DOTS_PER_INCH = 160


def blank_picture(width: float, height: float) -> Figure:
    """An empty figure that belongs to no window and no global state."""
    return Figure(figsize=(width, height), dpi=DOTS_PER_INCH, facecolor=PAPER)


def save_picture(figure: Figure, path: Path) -> None:
    """Write `figure` as the suffix of `path` says; raises ConfigError where that is impossible."""
    kind = path.suffix.lower()
    if kind not in (".png", ".svg"):
        raise ConfigError(f"can't write the picture {path}: its suffix is {path.suffix!r}; use .png or .svg")
    try:
        _write(figure, path, kind=kind[1:])
    except OSError as error:
        raise ConfigError(f"can't write the picture {path}: {error.strerror or error}") from None


def inline_svg(figure: Figure, *, name: str, tips: Mapping[str, str]) -> str:
    """`figure` as an <svg> element, once on a page by its `name`, with a tooltip for each gid of an artist.

    Ink, faint ink, faint lines and paper are the variables --ink, --faint, --line and --paper of the page.
    """
    file = io.BytesIO()
    _write(figure, file, kind="svg")
    text = file.getvalue().decode()
    # Without its prologue and metadata, and without the digits that nobody sees, which are half of it.
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r"(\d\.\d\d)\d+", r"\1", text)
    for colour, variable in ((INK, "ink"), (FAINT_INK, "faint"), (FAINT_LINE, "line"), (PAPER, "paper")):
        text = text.replace(colour, f"var(--{variable})")
    for gid, tip in tips.items():
        text = text.replace(f'<g id="{gid}">', f'<g id="{gid}"><title>{html.escape(tip)}</title>', 1)
    return re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", text)


def _write(figure: Figure, target: Path | IO[bytes], *, kind: str) -> None:
    # Text stays text in an SVG, so that it can be searched; ids and dates would differ from run to run.
    settings = {"svg.fonttype": "none", "svg.hashsalt": "uneven"}
    with matplotlib.rc_context(settings):
        figure.savefig(target, format=kind, metadata={"Date": None} if kind == "svg" else {"Software": None})
