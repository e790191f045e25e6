"""What a budget of gradient groups costs after random failures and returns.

    .venv/bin/python -m benchmarks.groups

For 1,000 histories on 4 replicas of 8 devices (those of tests/unit/test_layout_grouping.py): in how many of them a
device would be in more groups than the budget, and the bytes that merging adds to the gradient reduction over all
devices. Counted, so that every machine prints the same.
"""

from statistics import mean, median, quantiles

from tests.unit.test_layout_grouping import NUM_SEQUENCES, elements_sent, histories, most_groups
from uneven.layout import bundle_sizes, groups_of

BUDGETS = (8, 12, 16, 24)


def main() -> None:
    unbounded = []
    growth: dict[int, list[float]] = {budget: [] for budget in BUDGETS}
    for plan, _ in histories(NUM_SEQUENCES):
        sizes = bundle_sizes(plan)
        own = {members: members for members in sizes}
        unbounded.append(most_groups(own))
        for budget, found in growth.items():
            groups = groups_of(plan, max_groups=budget)
            found.append(elements_sent(sizes, groups) / elements_sent(sizes, own) - 1)
    decile = quantiles(unbounded, n=10)[-1]
    print("Groups of the busiest device without a budget: ", end="")
    print(f"median {median(unbounded):g}, ninth decile {decile:g}, worst {max(unbounded)}.")
    print("\n| budget | sequences with merges | mean | ninth decile | worst |\n|---|---|---|---|---|")
    for budget, found in growth.items():
        merged = mean(count > budget for count in unbounded)
        decile = quantiles(found, n=10)[-1]
        print(f"| {budget} | {merged:.0%} | {mean(found):.2%} | {decile:.1%} | {max(found):.1%} |")


if __name__ == "__main__":
    main()
