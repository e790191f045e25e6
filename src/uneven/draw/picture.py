"""A figure of a given size in inches, and its file: PNG or SVG by suffix, the same bytes for the same picture."""

from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from uneven.errors import ConfigError

DOTS_PER_INCH = 160


def blank_picture(width: float, height: float) -> Figure:
    """An empty figure that belongs to no window and no global state."""
    return Figure(figsize=(width, height), dpi=DOTS_PER_INCH, facecolor="white")


def save_picture(figure: Figure, path: Path) -> None:
    """Write `figure` as the suffix of `path` says; raises ConfigError where that is impossible."""
    kind = path.suffix.lower()
    if kind not in (".png", ".svg"):
        raise ConfigError(f"can't write the picture {path}: its suffix is {path.suffix!r}; use .png or .svg")
    # Text stays text in an SVG, so that it can be searched; ids and dates would differ from run to run.
    settings: dict[str, Any] = {"svg.fonttype": "none", "svg.hashsalt": "uneven"}
    try:
        with matplotlib.rc_context(settings):
            figure.savefig(path, format=kind[1:], metadata={"Date": None} if kind == ".svg" else {"Software": None})
    except OSError as error:
        raise ConfigError(f"can't write the picture {path}: {error.strerror or error}") from None
