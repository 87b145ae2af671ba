"""Where the models' KV rows live: the access protocol and two simple implementations.

A model never owns a cache. Each layer hands its new rows to a `KVAccess` and gets the rows of the
whole sequence back. Shapes: T new tokens, S tokens of the sequence so far (new ones included),
H key/value heads, D size of one head's row. A latent (MLA) row has H = 1 and D = R, and no V.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class KVAccess(Protocol):
    """One sequence's KV rows, as the layers see them during one forward call."""

    def update(self, layer: int, k: Tensor, v: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Store the rows of the new tokens and return all rows of the sequence, in order.

        `k` and `v` are (T, H, D), rotated already; for an MLA layer `k` is (T, 1, R) and `v` is
        None. Returns (S, H, D) tensors, the new rows last, in any floating dtype: the layer casts
        them. Each layer calls it once in a forward call, layer 0 first.
        """
        ...


class NoCache:
    """Keeps nothing: the new tokens are the whole sequence. For training; takes batches too."""

    def update(self, layer: int, k: Tensor, v: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the arguments."""
        return k, v


class ContiguousCache:
    """The reference: each layer's rows in one growing bfloat16 tensor."""

    def __init__(self, layers: int, dtype: torch.dtype = torch.bfloat16) -> None:
        self.dtype = dtype
        self.k: list[Tensor | None] = [None] * layers
        self.v: list[Tensor | None] = [None] * layers

    @property
    def length(self) -> int:
        """Tokens stored."""
        last = self.k[-1]
        return 0 if last is None else last.shape[0]

    def update(self, layer: int, k: Tensor, v: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Append the rows, rounded to the cache's dtype, and return the layer's rows."""
        rows = self.k[layer] = _append(self.k[layer], k.to(self.dtype))
        if v is None:
            return rows, None
        values = self.v[layer] = _append(self.v[layer], v.to(self.dtype))
        return rows, values

    def truncate(self, length: int) -> None:
        """Forget the rows of the tokens from position `length` on, as after rejected guesses."""
        self.k = [None if rows is None else rows[:length] for rows in self.k]
        self.v = [None if rows is None else rows[:length] for rows in self.v]

    def zero(self, start: int, stop: int) -> None:
        """Set the K and V rows of positions `start` to `stop` to zero, in place."""
        for rows in (*self.k, *self.v):
            if rows is not None:
                rows[start:stop] = 0


def _append(rows: Tensor | None, new: Tensor) -> Tensor:
    return new if rows is None else torch.cat((rows, new))
