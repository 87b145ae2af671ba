"""PageAllocator: which page slots of a pool are free."""

from __future__ import annotations

import threading

import numpy as np
import torch
from torch import Tensor

from ..errors import PageSizeMismatch
from .indices import page_list


class PageAllocator:
    """Free page slots 0 to `num_pages` - 1. Thread-safe.

    What it hands out are copies: a slot list that someone keeps never holds on to the
    allocator's own memory.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = np.arange(num_pages - 1, -1, -1, dtype=np.int64)
        self._taken = np.zeros(num_pages, dtype=np.bool_)
        self._count = num_pages
        self._lock = threading.Lock()

    @property
    def available(self) -> int:
        """Free pages."""
        return self._count

    def alloc(self, n: int) -> Tensor | None:
        """`n` free slots as int64 (n,) on the CPU, or None if fewer are free."""
        if n < 0:
            raise PageSizeMismatch(f"can't allocate {n} pages")
        with self._lock:
            if n > self._count:
                return None
            slots = self._free[self._count - n : self._count][::-1].copy()
            self._count -= n
            self._taken[slots] = True
        return torch.from_numpy(slots)

    def free(self, indices: Tensor) -> None:
        """Takes slots back. Raises PageSizeMismatch, and takes none back, if one is not of this
        pool, is free already, or is given twice."""
        slots = page_list("freed pages", indices, self.num_pages, distinct=True)
        with self._lock:
            if not self._taken[slots].all():
                wrong = slots[~self._taken[slots]]
                raise PageSizeMismatch(f"page {wrong[0]} is freed, but it is free already")
            self._taken[slots] = False
            self._free[self._count : self._count + len(slots)] = slots[::-1]
            self._count += len(slots)
