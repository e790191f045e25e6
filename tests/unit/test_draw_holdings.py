"""What each device of a plan holds, in numbers."""

import pytest

from tests.layouts import SPECIAL, WORLDS, special_plan
from tests.models import PICTURED
from uneven import draw
from uneven.draw import KV_HEADS, Held, holdings_of
from uneven.layout import ParallelPlan
from uneven.modelspec import parse_model

STRUCTURE = parse_model(PICTURED).structure


def model(**changes):
    return parse_model(PICTURED | changes).structure


def test_package_exports_what_it_promises():
    assert draw.__all__ == [
        "KV_HEADS",
        "Held",
        "Holding",
        "TextTable",
        "draw_loss",
        "draw_plan",
        "goodput_page",
        "holdings_of",
        "tables_of",
    ]
    assert all(hasattr(draw, name) for name in draw.__all__)


def test_two_devices_beside_one_hold_what_a_calculation_by_hand_gives():
    first, second, alone = holdings_of(ParallelPlan.from_shares(STRUCTURE, [[1, 1], [1]]))
    halves = {"vocab": Held(160, 160, 320), "heads": Held(5, 5, 10), "mlp": Held(224, 224, 448)}
    assert first.axes == second.axes == halves | {KV_HEADS: Held(3, 3, 5)}
    attention = (5 + 3 + 3 + 5) * 16 * 160
    layer = attention + 3 * 224 * 160 + 2 * 160
    assert first.num_parameters == second.num_parameters == 5 * layer + 2 * 160 * 160 + 160
    assert alone.num_parameters == STRUCTURE.num_parameters
    assert [first.num_gradient_groups, second.num_gradient_groups, alone.num_gradient_groups] == [2, 2, 3]


def test_one_device_holds_everything_in_one_group():
    (alone,) = holdings_of(ParallelPlan.from_shares(STRUCTURE, [[1]]))
    assert all(held.least == held.most == held.total for held in alone.axes.values())
    assert (alone.num_parameters, alone.num_gradient_groups) == (STRUCTURE.num_parameters, 1)


@pytest.mark.parametrize("world", WORLDS)
def test_elements_of_an_axis_add_up_to_its_size(world):
    plan = ParallelPlan.from_shares(model(vocab_size=323, intermediate_size=449), WORLDS[world])
    holdings = {holding.device: holding for holding in holdings_of(plan)}
    assert list(holdings) == list(plan.devices)
    for replica in plan.replicas:
        for axis in plan.structure.axes.values():
            held = [holdings[device].axes[axis.name] for device in replica.layout.devices]
            assert sum(each.most for each in held) == sum(each.least for each in held) == axis.size
            assert {each.total for each in held} == {axis.size}


@pytest.mark.parametrize("name", SPECIAL)
def test_parameters_held_are_at_least_those_of_the_model(name):
    plan = special_plan(STRUCTURE, name)
    holdings = {holding.device: holding for holding in holdings_of(plan)}
    for replica in plan.replicas:
        assert sum(holdings[d].num_parameters for d in replica.layout.devices) >= STRUCTURE.num_parameters


def test_layers_that_differ_give_the_least_and_the_most():
    first, second, third, *_ = holdings_of(special_plan(STRUCTURE, "another in each layer"))
    assert first.axes["heads"] == Held(3, 5, 10)
    assert second.axes["heads"] == Held(2, 2, 10)
    assert third.axes["mlp"] == Held(112, 224, 448)
    assert first.axes[KV_HEADS] == Held(2, 3, 5)


def test_device_without_heads_holds_no_key_value_head():
    first, *_ = holdings_of(special_plan(STRUCTURE, "no heads on the first"))
    assert first.axes["heads"] == Held(0, 0, 10)
    assert first.axes[KV_HEADS] == Held(0, 0, 5)


def test_key_value_heads_are_those_of_the_query_heads_held():
    fourteen = model(num_attention_heads=14, num_key_value_heads=2)
    held = [holding.axes[KV_HEADS].most for holding in holdings_of(ParallelPlan.from_shares(fourteen, [[1, 1, 1]]))]
    assert held == [1, 2, 1]
    assert set(fourteen.kv_groups.values()) == {7}
    assert set(model(num_key_value_heads=10).kv_groups.values()) == {1}
