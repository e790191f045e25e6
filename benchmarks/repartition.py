"""What repartitioning costs and leaves behind.

    .venv/bin/python -m benchmarks.repartition

Prints the tables of docs/concepts/repartition.md. All but the times are counted, so that every machine prints the
same. The histories are those of tests/unit/test_planner_repartition.py, on 4 replicas of 8 devices.
"""

from collections.abc import Callable
from statistics import mean, median, quantiles
from time import process_time

from tests.unit.test_layout_grouping import elements_sent, most_groups
from tests.unit.test_planner_repartition import (
    EQUAL,
    HOME,
    elements_share,
    histories,
    imbalance,
    llama,
    made_anew,
    outcome,
    outcome_of_stand_in,
)
from uneven.layout import MAX_GROUPS_PER_DEVICE, ModelLayout, ParallelPlan, bundle_sizes, groups_of
from uneven.planner import repartition
from uneven.planner.modules import modules_of


def main() -> None:
    print_durations()
    print_speeds()
    print("\n| layers | histories | rule | slowest over mean: mean | worst |")
    print("|---|---|---|---|---|")
    groups = [*print_histories(HOME, 1000), *print_histories(twelve_layers(), 100)]
    print("\n| layers | rule | groups: median | ninth decile | most | bytes of merging: mean | worst |")
    print("|---|---|---|---|---|---|---|")
    print("\n".join(groups))


def twelve_layers() -> ParallelPlan:
    return ParallelPlan.from_shares(llama(num_hidden_layers=12), [[1] * 8] * 4)


def print_durations() -> None:
    """Llama 3 70B on 4 replicas of 8."""
    sizes = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "vocab_size": 128256}
    home = ParallelPlan.from_shares(llama(**sizes, num_attention_heads=64), [[1] * 8] * 4)
    everyone = set(home.devices)
    reduced = repartition(home, home=home, devices=everyone - {3})
    cases = {
        "one device lost": lambda: repartition(home, home=home, devices=everyone - {3}),
        "it returns": lambda: repartition(reduced, home=home, devices=everyone),
        "a replica lost": lambda: repartition(home, home=home, devices=everyone - set(range(8))),
        "one device lost in each replica": lambda: repartition(home, home=home, devices=everyone - {3, 12, 21, 30}),
    }
    print("\n| 80 layers, 4 replicas of 8 | ms of CPU time |\n|---|---|")
    for name, case in cases.items():
        print(f"| {name} | {1000 * best(case):.0f} |")


def best(case: Callable[[], object]) -> float:
    times = []
    for _ in range(9):
        start = process_time()
        case()
        times.append(process_time() - start)
    return min(times)


def print_speeds() -> None:
    """Seven of eight devices against seven eighths of the undisturbed speed."""
    home = ParallelPlan.from_shares(llama(), [[1] * 8])
    after = repartition(home, home=home, devices=set(home.devices) - {3})
    layouts = [plan.replicas[0].layout for plan in (home, after)]
    in_turn = [
        sum(max(module.held(layout.partitions[module.name].owners).values()) for module in modules_of(layout.structure))
        for layout in layouts
    ]
    moved = [
        [moved_share(home, layout) for layout in (after.replicas[0].layout, *made_anew(after, weights=EQUAL))]
        for dead in range(8)
        for after in [repartition(home, home=home, devices=set(home.devices) - {dead})]
    ]
    for name, shares in zip(("repartition", "divided anew, in runs"), zip(*moved, strict=True), strict=True):
        print(f"Moved after the loss of any one of 8, {name}: {min(shares):.0%} to {max(shares):.0%} of a replica.")
    print("\n| 7 of 8 devices, 32 layers, 32 heads, 8 key and value heads | speed over 7/8 |\n|---|---|")
    print(f"| slowest device, by elements | {elements_share(home, after):.4f} |")
    print(f"| slowest device, by query heads | {elements_share(home, after, axis='heads'):.4f} |")
    print(f"| slowest device of each module in turn, by elements | {in_turn[0] / in_turn[1] * 8 / 7:.4f} |")


def moved_share(home: ParallelPlan, layout: ModelLayout) -> float:
    """The part of the divided elements that has another owner than in the first replica at home."""
    before = home.replicas[0].layout.partitions
    moved = total = 0
    for module in modules_of(layout.structure):
        owners = zip(before[module.name].owners, layout.partitions[module.name].owners, strict=True)
        moved += module.unit * sum(old != new for old, new in owners)
        total += module.num_elements
    return moved / total


def print_histories(home: ParallelPlan, num_histories: int) -> list[str]:
    """Prints imbalances, returns the rows of the groups."""
    num_layers = sum(axis.name == "heads" for axis in home.structure.axes.values())
    rules: dict[str, list[ParallelPlan]] = {"repartition": [], "handed out in turns": []}
    anew = []
    for history in histories(home, num_histories):
        rules["repartition"].append(outcome(home, history))
        rules["handed out in turns"].append(outcome_of_stand_in(home, history))
        anew.append(max(imbalance(each, weights=EQUAL) for each in made_anew(rules["repartition"][-1], weights=EQUAL)))
    for name, plans in rules.items():
        uneven = [max(imbalance(replica.layout, weights=EQUAL) for replica in plan.replicas) for plan in plans]
        print(f"| {num_layers} | {num_histories} | {name} | {mean(uneven):.3f} | {max(uneven):.3f} |")
    print(f"| {num_layers} | {num_histories} | divided anew, in runs | {mean(anew):.3f} | {max(anew):.3f} |")
    return [f"| {num_layers} | {name} | {group_cells(plans)} |" for name, plans in rules.items()]


def group_cells(plans: list[ParallelPlan]) -> str:
    unbounded, growth = [], []
    for plan in plans:
        sizes = bundle_sizes(plan)
        own = {members: members for members in sizes}
        unbounded.append(most_groups(own))
        merged = groups_of(plan, max_groups=MAX_GROUPS_PER_DEVICE)
        growth.append(elements_sent(sizes, merged) / elements_sent(sizes, own) - 1)
    decile = quantiles(unbounded, n=10)[-1]
    return f"{median(unbounded):g} | {decile:g} | {max(unbounded)} | {mean(growth):.2%} | {max(growth):.1%}"


if __name__ == "__main__":
    main()
