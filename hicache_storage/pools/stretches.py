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
        self._size = np.array([[rows[0].numel()] for rows, _ in ends[0]])
        """Bytes of a page, (R, 1)."""
        sizes = np.broadcast_to(self._size[:, 0], host.shape)
        ways = ((device, host), (host, device))
        first = [np.stack((*way, sizes), axis=1)[..., None] for way in ways]
        self._first: tuple[Copies, Copies] = (first[0], first[1])
        """The copies of page 0 in each layer, (L, 3, R, 1), to the host and to the device."""
        steps = np.array([[end.stride(0) for end in part] for part in ends[0]])
        self._device_step, self._host_step = steps[:, :1], steps[:, 1:]
        """Bytes from page to page, (R, 1)."""
        self._adjacent = bool((steps == self._size).all())
        """Whether pages that follow each other are one stretch."""

    def of(self, device_slots: Slots, host_slots: Slots, found: Runs, *, to_device: bool) -> Pages:
        """The pages with these slots; `found` are the runs of the two lists."""
        if not self._adjacent:
            return Pages(self._more(device_slots, host_slots, to_device), self._first[to_device])
        more = self._more(device_slots[found.start], host_slots[found.start], to_device)
        np.multiply(self._size, found.length - 1, more[2])
        return Pages(more, self._first[to_device])

    def one_by_one(
        self, layer: int, device_slots: Slots, host_slots: Slots, *, to_device: bool
    ) -> Copies:
        """The copies of one layer, without looking for runs. The link may be waiting for these: as
        few operations as possible."""
        copies = self._more(device_slots, host_slots, to_device)
        copies += self._first[to_device][layer]
        return copies.reshape(3, -1)

    def _more(self, device_slots: Slots, host_slots: Slots, to_device: bool) -> Copies:
        """What copies of these pages have more than those of page 0, (3, R, N)."""
        copies = np.zeros((3, len(self._size), len(host_slots)), np.int64)
        device, host = (1, 0) if to_device else (0, 1)
        np.multiply(device_slots, self._device_step, copies[device])
        np.multiply(host_slots, self._host_step, copies[host])
        return copies


class Pages(NamedTuple):
    """Copies of some pages, as what they have more than those of page 0."""

    more: Copies
    """(3, R, N)."""
    first: Copies
    """(L, 3, R, 1): those of page 0, by layer."""

    def of(self, layer: int) -> Copies:
        """The copies of one layer."""
        copies: Copies = self.more + self.first[layer]
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
