"""Colours that colour-blind readers tell apart: those of Okabe and Ito, then the same lighter and darker."""

from collections.abc import Iterable

from matplotlib.colors import to_rgb

INK = "#222222"
FAINT_INK = "#6b6b6b"
FAINT_LINE = "#e4e4e4"
PAPER = "#ffffff"
# Okabe and Ito, "Color Universal Design" (2008), without black, neighbours far apart in hue and lightness.
HUES = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442")
# What is mixed in, and how much of it, each time the hues are used up.
VARIANTS = ((PAPER, 0.0), (PAPER, 0.55), ("#000000", 0.4))


def colours_of(things: Iterable[int]) -> dict[int, str]:
    """A colour for each, in order; they repeat after 21."""
    return {thing: _colour(index) for index, thing in enumerate(things)}


def ink_on(colour: str) -> str:
    """Dark or white, whichever reads better on `colour`."""
    red, green, blue = to_rgb(colour)
    return INK if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else PAPER


def _colour(index: int) -> str:
    mixed, weight = VARIANTS[index // len(HUES) % len(VARIANTS)]
    pairs = zip(to_rgb(HUES[index % len(HUES)]), to_rgb(mixed), strict=True)
    return "#" + "".join(f"{round(255 * (own * (1 - weight) + other * weight)):02x}" for own, other in pairs)
