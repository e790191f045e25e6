"""Bytes that each device sends for gradients, by formula, and the time they take where bandwidth is all that counts.

Two replicas of n1 and n2 <= n1 devices hold n bytes of gradients each. `NIC` is what leaves a replica, `NVLink` what
stays within one. An all-reduce of two members sends from each what the sum is long.
"""

from dataclasses import dataclass
from fractions import Fraction

UNIFORM, OWNERS, GATHER = "uniform", "owners", "gather"
NVLINK_BYTES_PER_S = 0.9e12
"""In each direction: 1.8 TB/s are both together, as NVIDIA counts."""
NIC_BYTES_PER_S = 1e11
"""800 Gb/s."""


@dataclass(frozen=True, slots=True)
class Load:
    """What one device sends, as a part of its replica's gradients, and its gradient buffer on the same scale."""

    nic: Fraction
    nvlink: Fraction
    buffer: Fraction


def loads(scheme: str, healthy: int, reduced: int) -> dict[str, Load]:
    """By role: the `core` of the healthy replica, its `extra` devices, and the `reduced` replica.

    `uniform` is two healthy replicas. `owners` sums by tuples of owners. `gather` is the published scheme.
    """
    none, whole, wide = Fraction(0), Fraction(1, healthy), Fraction(1, reduced)
    if scheme == UNIFORM:
        return {"core": Load(whole, none, whole), "reduced": Load(whole, none, whole)}
    if scheme == OWNERS:
        healthy_load = Load(whole, none, whole)
        return {"core": healthy_load, "extra": healthy_load, "reduced": Load(wide, none, wide)}
    return {
        "core": Load(wide, wide - whole, wide),
        "extra": Load(none, whole, whole),
        "reduced": Load(wide, none, wide),
    }


def times(scheme: str, healthy: int, reduced: int) -> tuple[float, float]:
    """Seconds for a byte of gradients in each replica, one phase after the other, and with phases wholly overlapped.

    Gather and return are a phase each, in which the busiest device sends, or receives, what an extra one holds; the
    two use the two directions of a link.
    """
    by_role = loads(scheme, healthy, reduced)
    between = float(max(load.nic for load in by_role.values())) / NIC_BYTES_PER_S
    inside = float(max(load.nvlink for load in by_role.values())) / NVLINK_BYTES_PER_S
    return between + 2 * inside, max(between, inside)


def table() -> list[str]:
    """For a results page: the degrees of machines that are of interest, relative to two healthy replicas."""
    lines = [
        "| replicas | scheme | NIC, core / extra / reduced | NVLink, core / extra | idle NICs | buffer, core | "
        "time, phases in turn | time, overlapped |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for healthy, reduced in ((8, 7), (32, 30)):
        uniform = times(UNIFORM, healthy, reduced)[0]
        unit = Fraction(1, healthy)
        for scheme in (UNIFORM, OWNERS, GATHER):
            by_role = loads(scheme, healthy, reduced)
            extra = by_role.get("extra", by_role["core"])
            other = healthy if scheme == UNIFORM else reduced
            nic = " / ".join(f"{float(load.nic / unit):.3f}" for load in (by_role["core"], extra, by_role["reduced"]))
            nvlink = " / ".join(f"{float(load.nvlink / unit):.3f}" for load in (by_role["core"], extra))
            idle = healthy - reduced if extra.nic == 0 else 0
            in_turn, overlapped = (time / uniform for time in times(scheme, healthy, reduced))
            lines.append(
                f"| {healthy}+{other} | {scheme} | {nic} | {nvlink} | {idle} of {healthy} | "
                f"{float(by_role['core'].buffer / unit):.3f} | {in_turn:.3f} | {overlapped:.3f} |"
            )
    return lines
