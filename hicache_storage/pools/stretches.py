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

Numbers = npt.NDArray[np.int64]


class Copies(NamedTuple):
    """Copies of `size[i]` bytes; all three are (R * N,), in bytes."""

    source: Numbers
    target: Numbers
    size: Numbers


class Stretches:
    """Where the pages of a device pool and of a host pool are, by layer and part."""

    def __init__(self, ends: Sequence[Sequence[tuple[Tensor, Tensor]]]) -> None:
        """`ends` as of `stretches`."""
        places = np.array([[[end.data_ptr() for end in part] for part in parts] for parts in ends])
        device, host = places[:, :, :1], places[:, :, 1:]
        self._device, self._host = device[0], host[0]
        """Addresses of page 0 in the first layer, (R, 1)."""
        self._device_shift, self._host_shift = device - device[0], host - host[0]
        """Bytes from there to the same in each layer, (L, R, 1)."""
        steps = np.array([[end.stride(0) for end in part] for part in ends[0]])
        self._device_step, self._host_step = steps[:, :1], steps[:, 1:]
        """Bytes from page to page, (R, 1)."""
        self._size = np.array([[rows[0].numel()] for rows, _ in ends[0]])
        """Bytes of a page, (R, 1)."""
        self._adjacent = bool((steps == self._size).all())
        """Whether pages that follow each other are one stretch."""

    def of(self, device_slots: Slots, host_slots: Slots, found: Runs) -> Pages:
        """The pages with these slots; `found` are the runs of the two lists."""
        if not self._adjacent:
            return self.one_by_one(device_slots, host_slots)
        ends = device_slots[found.start], host_slots[found.start]
        return self._at(*ends, self._size * found.length)

    def one_by_one(self, device_slots: Slots, host_slots: Slots) -> Pages:
        """The same without looking for runs."""
        size = np.empty((len(self._size), len(host_slots)), dtype=np.int64)
        size[:] = self._size
        return self._at(device_slots, host_slots, size)

    def _at(self, device_slots: Slots, host_slots: Slots, size: Numbers) -> Pages:
        return Pages(
            device_slots * self._device_step + self._device,
            host_slots * self._host_step + self._host,
            size.ravel(),
            self._device_shift,
            self._host_shift,
        )


class Pages(NamedTuple):
    """Some pages. `device` and `host` are (R, N), the first layer's addresses."""

    device: Numbers
    host: Numbers
    size: Numbers
    device_shift: Numbers
    """(L, R, 1): bytes from the first layer's."""
    host_shift: Numbers

    def copies(self, layer: int, *, to_device: bool) -> Copies:
        """The copies of one layer."""
        device = (self.device + self.device_shift[layer]).ravel()
        host = (self.host + self.host_shift[layer]).ravel()
        return Copies(host, device, self.size) if to_device else Copies(device, host, self.size)


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
