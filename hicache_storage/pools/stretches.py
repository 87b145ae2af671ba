"""Stretches: where a page of one layer is one stretch of memory at both ends, copies are sums.

Legend: L layers, R parts (K and V, or one), N pages or runs of pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from .indices import Slots
from .row_copies import Runs

Copies = npt.NDArray[np.int64]
"""(3, copies): the addresses that they are from, those that they go to, and their bytes."""


class Stretches:
    """Where the pages of a device pool and of a host pool are, by layer and part."""

    def __init__(self, ends: Sequence[Sequence[tuple[Tensor, Tensor]]]) -> None:
        """`ends` as of `stretches`."""
        device, host = (
            np.array([[both[end].data_ptr() for both in parts] for parts in ends]) for end in (0, 1)
        )
        ways = ((device, host), (host, device))
        first = [np.stack((*way, np.zeros_like(host)), axis=1)[..., None] for way in ways]
        self._first: tuple[Copies, Copies] = (first[0], first[1])
        """Where copies of page 0 begin in each layer, (L, 3, R, 1), to the host and to the device;
        their bytes are 0."""
        steps = np.array([[end.stride(0) for end in part] for part in ends[0]])
        self._device_step, self._host_step = steps[:, :1], steps[:, 1:]
        """Bytes from page to page, (R, 1)."""
        self._size = np.array([[rows[0].numel()] for rows, _ in ends[0]])
        """Bytes of a page, (R, 1)."""
        self._adjacent = bool((steps == self._size).all())
        """Whether pages that follow each other are one stretch."""

    def of(self, device_slots: Slots, host_slots: Slots, found: Runs, *, to_device: bool) -> Pages:
        """The pages with these slots; `found` are the runs of the two lists."""
        if not self._adjacent:
            return self.one_by_one(device_slots, host_slots, to_device=to_device)
        ends = device_slots[found.start], host_slots[found.start]
        return self._at(*ends, self._size * found.length, to_device)

    def one_by_one(self, device_slots: Slots, host_slots: Slots, *, to_device: bool) -> Pages:
        """The same without looking for runs."""
        return self._at(device_slots, host_slots, self._size, to_device)

    def _at(self, device_slots: Slots, host_slots: Slots, size: Copies, to_device: bool) -> Pages:
        # The link may be waiting for these: as few operations as possible.
        copies = np.empty((3, len(self._size), len(host_slots)), dtype=np.int64)
        source, target, sizes = copies
        np.multiply(device_slots, self._device_step, out=target if to_device else source)
        np.multiply(host_slots, self._host_step, out=source if to_device else target)
        sizes[:] = size
        return Pages(copies, self._first[to_device])


class Pages(NamedTuple):
    """Some pages, and what to add for each layer."""

    copies: Copies
    """(3, R, N)."""
    first: Copies
    """(L, 3, R, 1)."""

    def of(self, layer: int) -> Copies:
        """The copies of one layer."""
        copies: Copies = self.copies + self.first[layer]
        return copies.reshape(3, -1)


def stretches(ends: Sequence[Sequence[tuple[Tensor, Tensor]]]) -> Stretches | None:
    """By layer and part, both ends' uint8 views of pages (P, S, H, B). None unless a page is one
    stretch at both ends, and lies alike in all layers."""
    for parts in ends:
        for both, first in zip(parts, ends[0], strict=True):
            if not all(end[0].is_contiguous() for end in both):
                return None
            if [end.stride() for end in both] != [end.stride() for end in first]:
                return None
    return Stretches(ends)
