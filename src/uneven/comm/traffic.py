"""Counters of what a rank puts into collectives, by purpose; the only record of communication that is needed.

Bytes sent are those of the bandwidth-optimal algorithm that NCCL and gloo both run: an all-reduce of n bytes over g
ranks sends 2 (g - 1) / g n from each.
"""

from collections import Counter
from fractions import Fraction
from typing import Literal

Operation = Literal["all_reduce", "send", "receive"]


class Traffic:
    """Counts one rank's collectives. Payload is the size of the full tensor that an operation works on."""

    def __init__(self) -> None:
        self._payload: Counter[tuple[str, str, int]] = Counter()
        self._calls: Counter[str] = Counter()

    def record(self, purpose: str, operation: Operation, *, num_bytes: int, group_size: int) -> None:
        self._payload[purpose, operation, group_size] += num_bytes
        self._calls[purpose] += 1

    def calls(self, purpose: str) -> int:
        return self._calls[purpose]

    def payload_bytes(self, purpose: str) -> int:
        return sum(count for (of, _, _), count in self._payload.items() if of == purpose)

    def sent_bytes(self, purpose: str) -> Fraction:
        """What this rank sends; a fraction, because a ring divides a tensor into equal parts."""
        total = Fraction(0)
        for (of, operation, size), count in self._payload.items():
            if of != purpose or operation == "receive":
                continue
            total += Fraction(count) if operation == "send" else Fraction(2 * (size - 1) * count, size)
        return total

    def received_bytes(self, purpose: str) -> int:
        """What this rank was sent by name, by `receive` or in an all-to-all."""
        return sum(
            count for (of, operation, _), count in self._payload.items() if (of, operation) == (purpose, "receive")
        )

    def purposes(self) -> list[str]:
        return sorted(self._calls)
