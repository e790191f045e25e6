"""The order in which training sequences are read.

One idea: the order is a function, not a list. A sample's global number and the seed give its sequence, so a
job that lost ranks, was resumed or has another batch split reads exactly what an undisturbed job would have
read. Imports nothing but the standard library and the errors.
"""

import hashlib
from math import isqrt

from uneven.errors import DataError

_NUM_ROUNDS = 8


def sample_index(number: int, *, seed: int, num_sequences: int) -> int:
    """The sequence, in 0..num_sequences-1, that global sample `number` (0, 1, 2, ...) reads.

    Samples number//num_sequences belong to one epoch, which reads every sequence once; each epoch and each
    seed has its own order. The result depends on nothing but the arguments. Tens of microseconds, O(1)
    memory.

    The permutation is a generalised Feistel network over Z_a x Z_b with a*b just above num_sequences, keyed
    by seed, epoch and size, with cycle walking (methods 2 and 3 of Black and Rogaway, "Ciphers with Arbitrary
    Finite Domains", CT-RSA 2002). DataError: a negative number, or no sequences.
    """
    if number < 0 or num_sequences < 1:
        raise DataError(
            f"no sequence for sample {number} of {num_sequences} sequences; "
            "needed is a number >= 0 and at least 1 sequence"
        )
    epoch, index = divmod(number, num_sequences)
    keyed = hashlib.blake2b(f"{seed}:{epoch}:{num_sequences}:".encode(), digest_size=8)
    a = isqrt(num_sequences - 1) + 1
    b = -(-num_sequences // a)
    while True:
        index = _permute(index, a=a, b=b, keyed=keyed)
        if index < num_sequences:
            return index


def _permute(index: int, *, a: int, b: int, keyed: "hashlib.blake2b") -> int:
    """A bijection of 0..a*b-1: each round adds to one half a keyed hash of the other, which can be undone."""
    left, right = divmod(index, b)
    for round_number in range(_NUM_ROUNDS):
        is_left_changed = round_number % 2 == 0
        digest = keyed.copy()
        digest.update(b"%d:%d" % (round_number, right if is_left_changed else left))
        value = int.from_bytes(digest.digest(), "little")
        if is_left_changed:
            left = (left + value) % a
        else:
            right = (right + value) % b
    return left * b + right
