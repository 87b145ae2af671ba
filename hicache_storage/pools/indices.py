"""Checks of page indices, before any byte moves."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..errors import PageSizeMismatch

Slots = npt.NDArray[np.int64]


def page_list(name: str, indices: Any, num_pages: int, *, distinct: bool = False) -> Slots:
    """`indices` as a host array; raises PageSizeMismatch unless it is an int64 tensor (n,) of
    slots below `num_pages`, each at most once if `distinct`."""
    if not isinstance(indices, torch.Tensor):
        raise PageSizeMismatch(f"{name}: expected an int64 tensor, got {type(indices).__name__}")
    if indices.dtype != torch.int64 or indices.ndim != 1:
        raise PageSizeMismatch(
            f"{name}: expected an int64 tensor of shape (n,), got {indices.dtype} of shape "
            f"{tuple(indices.shape)}"
        )
    slots: Slots = (indices if indices.is_cpu else indices.cpu()).numpy()
    if len(slots) == 0:
        return slots
    highest = int(np.maximum.reduce(slots.view(np.uint64)))  # a negative one counts as very high
    if highest >= num_pages:
        wrong = highest if highest < 1 << 63 else int(slots.min())
        raise PageSizeMismatch(
            f"{name}: page {wrong} is outside of the pool's {num_pages} pages "
            "(these are page indices, not token indices)"
        )
    if distinct:
        seen = np.zeros(highest + 1, dtype=np.bool_)
        seen[slots] = True
        if np.count_nonzero(seen) != len(slots):
            raise PageSizeMismatch(f"{name}: a page is given twice")
    return slots
