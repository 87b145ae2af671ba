"""Routes: a device pool's pages at one end, the same pages elsewhere at the other.

Elsewhere is the host pool, or a staging area on the device that holds some layers of some pages as
a host pool of the same layout would. Legend: P pages, L layers, S page_size, H heads, B bytes a
head's row.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import layouts
from .device import DevicePool
from .host import HostPool
from .stretches import Stretches, stretches

_ALIGNMENT = 256
_KEPT = 4096
"""Staged routes that are kept; there are as many as staging halves times layer groups."""


class Route:
    """`layers` of `pool` at one end; at the other `parts`, uint8 views (P, L, S, H, B)."""

    def __init__(self, pool: DevicePool, parts: Sequence[Tensor], layers: range) -> None:
        self.pool = pool
        self.parts = tuple(parts)
        self.layers = layers
        self.prepared: Any = None
        """What the kernels keep about this route."""
        self._over: dict[range, tuple[Tensor, ...]] = {layers: self.parts}

    def ends(self, layer: int) -> list[tuple[Tensor, Tensor]]:
        """Both ends of each part of a layer: device pages (P, S, H, B) and the others'."""
        return [
            (rows, part[:, layer - self.layers.start])
            for rows, part in zip(self.pool.page_rows(layer), self.parts, strict=True)
        ]

    def over(self, layers: range) -> tuple[Tensor, ...]:
        """The parts in these layers alone."""
        if layers not in self._over:
            start = layers.start - self.layers.start
            self._over[layers] = tuple(part[:, start : start + len(layers)] for part in self.parts)
        return self._over[layers]


class Routes:
    """The routes of one device pool that has one host pool."""

    def __init__(self, pool: DevicePool, host: HostPool) -> None:
        # Not the host pool itself: this object lives as long as it does.
        self.layout = host.layout
        self.pinned = host.pinned
        self.geometry = host.geometry
        self.pool = pool
        parts = [host.page_rows(part) for part in range(len(self.geometry.row_dims))]
        self.host = Route(pool, parts, range(self.geometry.layers))
        self._staged: dict[tuple[int, range, int], Route] = {}
        ends = [self.host.ends(layer) for layer in self.host.layers]
        self.stretches = stretches(ends)
        """Where pages of one layer are, if each is one stretch at both ends; else None."""
        self.spaced = _spaced(pool)
        """The pool's parts as views (P, L, S, H, B) if their layers lie in one allocation at equal
        distances, else None."""

    def needed_stretches(self) -> Stretches:
        """`stretches`, of a pair whose pages go direct."""
        if self.stretches is None:
            raise AssertionError("only stretches go direct")
        return self.stretches

    def staged_bytes(self, layers: range) -> int:
        """What a page takes in a staging area that holds these layers."""
        page = self.geometry.page_bytes // self.geometry.layers * len(layers)
        return -(-page // _ALIGNMENT) * _ALIGNMENT + len(self.host.parts) * _ALIGNMENT

    def staged(self, memory: Tensor, layers: range, pages: int) -> Route:
        """The route to a staging area for `pages` pages at the start of `memory`, uint8 on the
        device."""
        key = (memory.data_ptr(), layers, pages)
        found = self._staged.get(key)
        if found is None:
            if len(self._staged) >= _KEPT:
                if memory.is_cuda:
                    torch.cuda.synchronize(memory.device)  # kernels may have yet to read them
                self._staged.clear()
            found = self._staged[key] = self.area(memory, layers, pages)
        return found

    def area(self, memory: Tensor, layers: range, pages: int) -> Route:
        """The same, made anew."""
        areas = []
        start = 0
        geometry = self.geometry
        for part, dim in enumerate(geometry.row_dims):
            shape = layouts.part_shape(self.layout, geometry, pages, part, layers=len(layers))
            shape[-1] = dim * geometry.dtype.itemsize
            length = math.prod(shape)
            area = memory[start : start + length].view(shape)
            areas.append(layouts.by_page(self.layout, geometry.page_size, area))
            start += -(-length // _ALIGNMENT) * _ALIGNMENT
        return Route(self.pool, areas, layers)


_known: weakref.WeakKeyDictionary[HostPool, dict[int, Routes]] = weakref.WeakKeyDictionary()


def routes(pool: DevicePool, host: HostPool) -> Routes:
    """The routes of these two pools, made once."""
    found = _known.setdefault(host, {})
    if id(pool) not in found:
        found[id(pool)] = Routes(pool, host)
    return found[id(pool)]


def _spaced(pool: DevicePool) -> tuple[Tensor, ...] | None:
    parts = []
    for rows in zip(*(pool.page_rows(layer) for layer in range(pool.geometry.layers)), strict=True):
        first = rows[0]
        addresses = [layer.data_ptr() for layer in rows]
        steps = {after - before for before, after in itertools.pairwise(addresses)} or {1}
        storages = {layer.untyped_storage().data_ptr() for layer in rows}
        strides = {layer.stride() for layer in rows}
        if len(steps) != 1 or min(steps) <= 0 or len(storages) != 1 or len(strides) != 1:
            return None
        shape, stride = list(first.shape), list(first.stride())
        shape.insert(1, len(rows))
        stride.insert(1, steps.pop())
        parts.append(first.as_strided(shape, stride, first.storage_offset()))
    return tuple(parts)
