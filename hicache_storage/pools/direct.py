"""Direct: pages that copy engines move between the pools: of each layer and part a copy for pages
that follow each other."""

from __future__ import annotations

import functools

from .lanes import Lane
from .moves import Moves
from .routes import Routes
from .stretches import Pages

_FIRST_SHARE = 4
"""1 in this many pages of the first layer goes first: the others are put in order meanwhile, which
takes 60 us, on a slow processor 120. Out of order, host memory is written at 51 GB/s and not at
54."""


class Direct:
    """The pages of a pair, of which each layer is one stretch at both ends."""

    def __init__(self, lane: Lane, pair: Routes, moves: Moves, *, to_device: bool) -> None:
        self._lane = lane
        self._pair = pair
        self._moves = moves
        self._to_device = to_device

    def copy(self, layer: int, *, idle: bool) -> None:
        """Asks for a layer. `idle`: the link has nothing to do yet, so the first pages go as they
        were given, before the others are put in order."""
        if not idle:
            self._ask(self._pages, layer, idle)
            return
        first, rest = self._moves.split(-(-len(self._moves) // _FIRST_SHARE))
        stretches = self._pair.needed_stretches()
        pages = stretches.one_by_one(first.device, first.host, to_device=self._to_device)
        self._ask(pages, layer, idle)
        if len(rest):
            self._ask(self._of(rest), layer, idle)

    @functools.cached_property
    def _pages(self) -> Pages:
        return self._of(self._moves)

    def _of(self, moves: Moves) -> Pages:
        ordered = moves.in_order
        return self._pair.needed_stretches().of(
            ordered.device, ordered.host, ordered.runs, to_device=self._to_device
        )

    def _ask(self, pages: Pages, layer: int, idle: bool) -> None:
        self._lane.copy_stretches(pages.of(layer), pinned=self._pair.pinned, idle=idle)
