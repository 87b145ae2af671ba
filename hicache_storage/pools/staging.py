"""Staging: pages by copy engine through memory on the device, some at a time.

A pipeline of two halves of a lane's memory: one is gathered or scattered on the device while the
other crosses the link.
"""

from __future__ import annotations

import itertools
from typing import Literal

from .indices import Slots
from .lanes import Lane
from .routes import Route
from .row_copies import RowCopies, Runs, runs, view_copies

_FEW = 8
"""One part in so many of a staging half's pages makes a few."""
Few = Literal["first", "last", "none"]
"""Where a piece of a few pages goes."""


def pieces_of(count: int, at_a_time: int, few: Few) -> list[slice]:
    """`count` pages, so many at a time at most: evenly but for a few that go first, for which the
    link waits, or last, for which the device does."""
    apart = 0 if few == "none" else max(1, at_a_time // _FEW)
    rest = max(0, count - apart)
    pieces = -(-rest // at_a_time)
    bounds = [count - rest + rest * i // pieces for i in range(pieces)] if pieces else []
    bounds = sorted({0, *bounds, count})
    if few == "last":
        bounds = [count - bound for bound in reversed(bounds)]
    return [slice(start, stop) for start, stop in itertools.pairwise(bounds)]


def pages_at_a_time(lane: Lane, page_bytes: int) -> int:
    """Pages of so many bytes that a staging half takes."""
    return max(1, lane.staged_bytes // page_bytes)


def part_copies(
    source: Route, target: Route, source_slots: Slots, target_slots: Slots
) -> list[RowCopies]:
    """Copies between the other ends of two routes, of the layers that both have."""
    layers = source.layers if len(source.layers) <= len(target.layers) else target.layers
    found: Runs = runs(source_slots, target_slots)
    copies: list[RowCopies] = []
    for ends in zip(source.over(layers), target.over(layers), strict=True):
        copies += view_copies(*ends, source_slots, target_slots, found)
    return copies
