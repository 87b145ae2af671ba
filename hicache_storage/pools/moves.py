"""Moves: the slots at both ends of a copy of pages, and the order that serves it best."""

from __future__ import annotations

import functools

from .indices import Slots
from .row_copies import Runs, runs

_LOOKED_AT = 1024
"""Pages that say how long runs are: 8 KiB of slots at each end."""


class Moves:
    """Device slot i goes to or comes from host slot i."""

    def __init__(self, device: Slots, host: Slots) -> None:
        self.device = device
        self.host = host

    def __len__(self) -> int:
        return len(self.host)

    @functools.cached_property
    def in_order(self) -> Moves:
        """The same in the order of host slots, in which pages that follow each other are found and
        memory is read or written fastest. Takes as long as the first copies, so let those go
        before."""
        order = self.host.argsort(kind="stable")
        return Moves(self.device[order], self.host[order])

    @functools.cached_property
    def runs(self) -> Runs:
        """Of pages that follow each other at both ends."""
        return runs(self.host, self.device)

    def run_pages(self, *, both_ends: bool = False) -> float:
        """How many pages follow each other in the host pool on average, or at both ends, as they
        are given: of the first ones, since of 16384 it would take longer than what it is for."""
        first, _ = self.split(_LOOKED_AT)
        found = runs(first.host, first.device if both_ends else first.host)
        return len(first) / len(found.start)

    def split(self, first: int) -> tuple[Moves, Moves]:
        """So many of them, and the rest."""
        return (
            Moves(self.device[:first], self.host[:first]),
            Moves(self.device[first:], self.host[first:]),
        )
