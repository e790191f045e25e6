"""Packed sequences: what a model reads, and what it is to predict.

One idea: documents share a row, but need not see each other. Positions that start anew at each document say so to a
transformers model, which then lets no token attend beyond its document's start.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from uneven.data.documents import START, TARGET, Flags

IGNORE = -100
"""A target that does not count, as in transformers."""

Ids = npt.NDArray[np.int64]


def counted(flags: Flags, *, restarts: bool) -> npt.NDArray[np.bool_]:
    """Which tokens are targets: with `restarts`, none that starts a document, for nothing before it tells of it."""
    wanted = TARGET | START if restarts else TARGET
    return np.asarray(flags & wanted == TARGET)


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """`tokens` and their `flags`, both (rows, seq_len + 1): a row's inputs are all but its last token, its targets all
    but its first. With `restarts`, attention and positions restart where a document starts."""

    tokens: Ids
    flags: Flags
    restarts: bool

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, where: "slice[Any, Any, Any]") -> "Rows":
        return Rows(self.tokens[where], self.flags[where], self.restarts)

    @property
    def inputs(self) -> Ids:
        """(rows, seq_len)."""
        return self.tokens[:, :-1]

    @property
    def targets(self) -> Ids:
        """(rows, seq_len), IGNORE where the loss does not count."""
        return np.where(counted(self.flags[:, 1:], restarts=self.restarts), self.tokens[:, 1:], IGNORE)

    @property
    def position_ids(self) -> Ids | None:
        """(rows, seq_len), or None where no document starts inside a row: positions are then 0, 1, 2, ... anyway, and
        attention needs no mask."""
        starts = self.flags[:, :-1] & START != 0
        if not self.restarts or not starts[:, 1:].any():
            return None
        index = np.arange(starts.shape[1])
        return np.asarray(index - np.maximum.accumulate(np.where(starts, index, 0), axis=1))
