"""The picture of losses."""

import math
import re

import pytest

from uneven.draw import draw_loss
from uneven.draw.loss import _smooth
from uneven.errors import ConfigError

FALLING = [(step, 2 + 3.7 * math.exp(-step / 60)) for step in range(1, 301)]


def text_of(path):
    return re.sub(r"\s+", " ", path.read_text())


def num_strokes(path):
    """Lines and edges of markers in the colour of the first curve; one of them is in the legend."""
    return len(re.findall(r"stroke: #0072b2", path.read_text()))


def test_labels_and_levels_are_in_the_picture(tmp_path):
    path = tmp_path / "loss.svg"
    draw_loss(path, curves={"2+1 devices": FALLING}, references={"unigram entropy": 3.2721})
    for text in ("2+1 devices", "unigram entropy 3.27", "step", "loss (nats per token)"):
        assert f">{text}</text>" in text_of(path)


def test_long_curve_has_a_faint_line_under_a_smooth_one(tmp_path):
    counts = []
    for points in (50, 51):
        path = tmp_path / f"{points}.svg"
        draw_loss(path, curves={"run": FALLING[:points]}, references={})
        counts.append(num_strokes(path))
    assert counts[1] == counts[0] + 1


def test_losses_that_are_not_finite_are_left_out(tmp_path):
    clean, dirty = tmp_path / "clean.svg", tmp_path / "dirty.svg"
    draw_loss(clean, curves={"run": FALLING[:10]}, references={})
    spoilt = [*FALLING[:5], (5, math.nan), (6, math.inf), *FALLING[5:10]]
    draw_loss(dirty, curves={"run": spoilt}, references={"nowhere": math.inf})
    assert clean.read_bytes() == dirty.read_bytes()


def test_single_point_is_marked(tmp_path):
    marked, plain = tmp_path / "marked.svg", tmp_path / "plain.svg"
    draw_loss(marked, curves={"run": [(1, 5.77)]}, references={})
    draw_loss(plain, curves={"run": FALLING[:2]}, references={})
    assert num_strokes(marked) > num_strokes(plain)


@pytest.mark.parametrize("curves", [{}, {"run": [(1, math.nan)]}], ids=["none", "not finite"])
def test_nothing_to_draw_is_an_empty_picture(curves, tmp_path):
    draw_loss(tmp_path / "loss.png", curves=curves, references={})
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_many_long_labels_fit(tmp_path):
    draw_loss(tmp_path / "loss.png", curves={f"{i} " + "long " * 12: FALLING[:5] for i in range(9)}, references={})
    assert (tmp_path / "loss.png").stat().st_size > 5000


def test_unknown_suffix_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"use \.png or \.svg"):
        draw_loss(tmp_path / "loss.pdf", curves={}, references={})


def test_smoothing_keeps_a_line_in_its_middle_and_its_length():
    line = [float(i) for i in range(20)]
    assert _smooth(line, 3)[:17] == line[:17]
    assert _smooth([5.0, 1.0, 3.0], 1) == [5.0, 3.0, 2.0]
    assert _smooth([], 2) == []
