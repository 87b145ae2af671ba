"""Direct: pages that copy engines move between the pools: of each layer and part a copy for pages
that follow each other."""

from __future__ import annotations

import functools

from . import copy_engine
from .lanes import Lane
from .moves import Moves
from .routes import Routes
from .stretches import Copies, Pages

_FIRST_COPIES = 156
"""Of the first layer so many copies go first, three calls: the others are put in order meanwhile,
which takes 40 us, on a slow processor 120. Out of order, host memory is written at 51 GB/s and not
at 54."""


class Direct:
    """The pages of a pair, of which each layer is one stretch at both ends."""

    def __init__(self, lane: Lane, pair: Routes, moves: Moves, *, to_device: bool) -> None:
        self._lane = lane
        self._pair = pair
        self._moves = moves
        self._to_device = to_device
        self._first = _FIRST_COPIES // len(pair.host.parts)
        """How many pages go first, if `begin` is called."""
        self._begun = False

    def begin(self) -> None:
        """Asks for the first pages of layer 0, as they were given, since the link has nothing to
        do."""
        copies = self._pair.needed_stretches().one_by_one(
            0,
            self._moves.device[: self._first],
            self._moves.host[: self._first],
            to_device=self._to_device,
        )
        self._ask(copies, copy_engine.FIRST_BATCH)
        self._begun = True

    def copy(self, layer: int) -> None:
        """Asks for a layer, or what is left of it."""
        if layer > 0 or not self._begun:
            self._ask(self._pages.of(layer), copy_engine.BATCH)
            return
        _, rest = self._moves.split(self._first)
        if len(rest):
            self._ask(self._of(rest).of(layer), copy_engine.NEXT_BATCH)

    @functools.cached_property
    def _pages(self) -> Pages:
        return self._of(self._moves)

    def _of(self, moves: Moves) -> Pages:
        ordered = moves.in_order
        return self._pair.needed_stretches().of(
            ordered.device, ordered.host, ordered.runs, to_device=self._to_device
        )

    def _ask(self, copies: Copies, batch: int) -> None:
        self._lane.copy_stretches(copies, pinned=self._pair.pinned, batch=batch)
