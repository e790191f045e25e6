"""The picture of a plan: its rows, its labels and its file."""

from functools import cache
from xml.etree import ElementTree

import pytest

from tests.layouts import custom_layout, special_plan
from tests.models import PICTURED
from uneven.draw import draw_plan
from uneven.draw.palette import colours_of, ink_on
from uneven.draw.plan import MOST_PANELS, short_count
from uneven.draw.rows import MOST_ROWS, Gap, Row, rows_of
from uneven.errors import ConfigError
from uneven.layout import ParallelPlan, ReplicaPlan
from uneven.modelspec import parse_model

STRUCTURE = parse_model(PICTURED).structure


def model(**changes):
    return parse_model(PICTURED | changes).structure


def even(shares, **changes):
    return ParallelPlan.from_shares(model(**changes), shares)


def shifting_plan():
    """8+7 devices on 12 layers: no two layers are divided alike, and hardly a device holds one run."""
    structure = model(num_hidden_layers=12, num_attention_heads=32, num_key_value_heads=8)

    def owner(num_devices):
        def position(module, axis, unit):
            layer = int(module.split(".")[2]) if ".layers." in module else 0
            return (unit * num_devices // axis.num_units * 3 + layer + unit // 7) % num_devices

        return position

    layouts = (
        custom_layout(structure, tuple(range(8)), owner(8)),
        custom_layout(structure, tuple(range(8, 15)), owner(7)),
    )
    return ParallelPlan(tuple(ReplicaPlan(layout, len(layout.devices)) for layout in layouts))


PLANS = {
    "one device": lambda: even([[1]]),
    "2+1": lambda: even([[1, 1], [1]]),
    "4+3 of 32 layers": lambda: even([[1] * 4, [1] * 3], num_hidden_layers=32),
    "8+7 shifting": shifting_plan,
    "shared key and value heads": lambda: even([[1, 1, 1]], num_attention_heads=14, num_key_value_heads=2),
    "tied": lambda: even([[2, 1]], tie_word_embeddings=True),
    "more devices than heads": lambda: even([[1] * 30]),
    "more replicas than panels": lambda: even([[1]] * (MOST_PANELS + 2)),
    "no heads on the first": lambda: special_plan(STRUCTURE, "no heads on the first"),
    "no rows on the last": lambda: special_plan(STRUCTURE, "no rows on the last"),
    "interleaved": lambda: special_plan(STRUCTURE, "interleaved"),
}


@pytest.fixture(scope="module")
def labels_of(tmp_path_factory):
    """The texts in the picture of a plan of the table; each picture is drawn once."""

    @cache
    def texts(name):
        file = tmp_path_factory.mktemp("pictures") / "plan.svg"
        draw_plan(PLANS[name](), file)
        found = ElementTree.parse(file).iter("{http://www.w3.org/2000/svg}text")
        return tuple("".join(each.itertext()).strip() for each in found)

    return texts


@pytest.mark.parametrize("name", PLANS)
def test_picture_names_every_replica_row_and_device(name, labels_of):
    plan = PLANS[name]()
    labels = labels_of(name)
    for index, replica in enumerate(plan.replicas[:MOST_PANELS]):
        assert any(label.startswith(f"replica {index} · ") for label in labels)
        assert {str(device) for device in replica.layout.devices} <= set(labels)
    for row in rows_of(plan):
        assert (row.text if isinstance(row, Gap) else f"{row.name} ({row.size})") in labels


def test_picture_of_two_devices_beside_one_says_who_holds_what(labels_of):
    labels = labels_of("2+1")
    assert "llama · 1.56 M parameters · 2 replicas · 3 devices" in labels
    assert "replica 0 · 2 devices · batch share 2" in labels
    assert "replica 1 · 1 device · batch share 1" in labels
    assert "layers 0-4 attention (10 heads)" in labels
    assert "5 key/value heads" in labels
    assert {"device 0: 5 heads", "device 1: 224 channels", "device 2: 320 rows"} <= set(labels)
    assert {"795 k", "50.9%", "1.56 M", "100.0%"} <= set(labels)
    assert "key/value head held by several devices, a lane for each" in labels


def test_hatching_is_explained_only_where_there_is_any(labels_of):
    assert not any("several devices" in label for label in labels_of("one device"))


def test_picture_says_how_many_replicas_are_left_out(labels_of):
    assert "2 more replicas left out" in labels_of("more replicas than panels")


def test_png_is_written(tmp_path):
    draw_plan(PLANS["no heads on the first"](), tmp_path / "plan.PNG")
    picture = (tmp_path / "plan.PNG").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) > 5000


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_picture_is_the_same_each_time(suffix, tmp_path):
    for name in ("one", "two"):
        draw_plan(PLANS["one device"](), tmp_path / f"{name}.{suffix}")
    assert (tmp_path / f"one.{suffix}").read_bytes() == (tmp_path / f"two.{suffix}").read_bytes()


def test_suffix_that_is_no_picture_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"plan\.jpg: its suffix is '\.jpg'; use \.png or \.svg"):
        draw_plan(PLANS["one device"](), tmp_path / "plan.jpg")


def test_folder_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"can't write the picture .*absent/plan\.png: No such file"):
        draw_plan(PLANS["one device"](), tmp_path / "absent" / "plan.png")


def test_layers_divided_alike_share_a_row():
    rows = rows_of(PLANS["4+3 of 32 layers"]())
    assert [row.name for row in rows] == ["embedding", "layers 0-31 attention", "layers 0-31 mlp", "head"]
    assert [row.size for row in rows] == ["320 rows", "10 heads", "448 channels", "320 rows"]


def test_layers_divided_otherwise_have_rows_of_their_own():
    names = [row.name for row in rows_of(special_plan(STRUCTURE, "another in each layer"))]
    assert names == [
        *("embedding", "layer 0 attention", "layers 1-4 attention", "layer 0 mlp", "layers 1-4 mlp", "head"),
    ]


def test_tied_model_has_no_head_row():
    assert [row.name for row in rows_of(PLANS["tied"]())] == ["embedding", "layers 0-4 attention", "layers 0-4 mlp"]


def test_long_lists_of_rows_are_cut_and_say_so():
    rows = rows_of(shifting_plan())
    assert [row.text for row in rows if isinstance(row, Gap)] == ["layers 7-8: 2 more rows left out"] * 2
    assert sum(isinstance(row, Row) and row.kind == "attention" for row in rows) == MOST_ROWS
    assert rows[-1].name == "head"


def test_key_value_head_has_the_holders_of_its_query_heads():
    row = next(row for row in rows_of(PLANS["shared key and value heads"]()) if row.kind == "attention")
    assert (row.kv_group, row.num_kv_heads) == (7, 2)
    assert row.holders(0) == [(0, 1), (1, 2)]


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (9_999, "9,999"),
        (10_000, "10.0 k"),
        (99_960, "100 k"),
        (999_499, "999 k"),
        (999_500, "1.00 M"),
        (1_563_360, "1.56 M"),
        (8_030_261_248, "8.03 B"),
        (1_000_000_000_000_000, "1000 T"),
    ],
)
def test_counts_are_short(number, text):
    assert short_count(number) == text


def test_twenty_one_devices_have_different_colours():
    colours = colours_of(range(22))
    assert len({colours[device] for device in range(21)}) == 21
    assert colours[21] == colours[0]


def test_text_stands_out_from_its_ground():
    assert ink_on("#0072b2") == "#ffffff"
    assert ink_on("#f0e442") == "#222222"
