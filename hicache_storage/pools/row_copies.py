"""RowCopies: copies of pages as few, large, regular pieces, for an engine that takes such.

Legend: two views of pages, (P, ...) each with the same trailing shape, in any byte order; page i
of one list goes to page i of the other. Pages that follow each other at both ends are one piece.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from .indices import Slots

_LONGEST_PITCH = 2**31 - 1
"""Bytes from row to row that CUDA's two-dimensional copies take at most."""


class RowCopies(NamedTuple):
    """Copies of one shape: `height` rows of `width` bytes, from each source to its target."""

    source: npt.NDArray[np.uint64]
    """Addresses of the first rows."""
    target: npt.NDArray[np.uint64]
    width: int
    height: int
    source_pitch: int
    """Bytes from row to row; of no meaning with one row."""
    target_pitch: int


class Runs(NamedTuple):
    """Pages that follow each other at both ends: run i is `length[i]` pages from `start[i]` of the
    lists on."""

    start: Slots
    length: Slots


def runs(source: Slots, target: Slots) -> Runs:
    """The longest runs of two slot lists of one length, at least one page each."""
    if len(source) == 0:
        return Runs(source, source)
    (breaks,) = ((source[1:] - source[:-1] != 1) | (target[1:] - target[:-1] != 1)).nonzero()
    bounds = np.empty(len(breaks) + 2, dtype=np.int64)
    bounds[0], bounds[1:-1], bounds[-1] = 0, breaks + 1, len(source)
    return Runs(bounds[:-1], bounds[1:] - bounds[:-1])


def view_copies(
    source: Tensor,
    target: Tensor,
    source_slots: Slots,
    target_slots: Slots,
    found: Runs,
) -> list[RowCopies]:
    """The copies that bring the pages `source_slots` of `source` to `target_slots` of `target`.

    Both are uint8 views; `found` are the runs of the two lists.
    """
    page = source.shape[1:]
    steps = source.stride(), target.stride()
    starts, lengths = found.start, found.length
    if not _adjacent(page, *steps):
        starts, lengths = np.arange(len(source_slots)), np.ones(1, dtype=np.int64)
    from_pages = _addresses(source, source_slots[starts])
    to_pages = _addresses(target, target_slots[starts])
    result = []
    different = np.unique(lengths).tolist()
    for length in different:
        piece = _piece((length, *page), *steps)
        chosen = slice(None) if len(different) == 1 else lengths == length
        from_offsets, to_offsets = piece.offsets
        result.append(
            RowCopies(
                (from_pages[chosen, None] + from_offsets).ravel(),
                (to_pages[chosen, None] + to_offsets).ravel(),
                piece.width,
                piece.height,
                piece.source_pitch,
                piece.target_pitch,
            )
        )
    return result


class _Piece(NamedTuple):
    width: int
    height: int
    source_pitch: int
    target_pitch: int
    offsets: tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]
    """What to add to the addresses of a page, at each end, for one copy after the other."""


@functools.lru_cache(maxsize=4096)
def _piece(shape: tuple[int, ...], source: tuple[int, ...], target: tuple[int, ...]) -> _Piece:
    """The fewest copies that move `shape` bytes between these steps in bytes."""
    width, steps = _collapse(shape, source, target)
    height, source_pitch, target_pitch = 1, width, width
    if steps and max(steps[-1][1:]) <= _LONGEST_PITCH and min(steps[-1][1:]) >= width:
        height, source_pitch, target_pitch = steps.pop()
    outer = list(itertools.product(*(range(count) for count, _, _ in steps)))
    offsets = [
        np.array([sum(i * step[end] for i, step in zip(at, steps, strict=True)) for at in outer])
        for end in (1, 2)
    ]
    return _Piece(
        width,
        height,
        source_pitch,
        target_pitch,
        (offsets[0].astype(np.uint64), offsets[1].astype(np.uint64)),
    )


@functools.lru_cache(maxsize=4096)
def _adjacent(page: tuple[int, ...], source: tuple[int, ...], target: tuple[int, ...]) -> bool:
    """Whether pages that follow each other make larger pieces than one by one. Not if a page is one
    stretch: rows that lie apart are slower, and copies of several shapes take more calls."""
    width, steps = _collapse((1, *page), source, target)
    return bool(steps) or source[0] == target[0] == width


def _collapse(
    shape: Sequence[int], source: Sequence[int], target: Sequence[int]
) -> tuple[int, list[tuple[int, int, int]]]:
    """Adjacent bytes, and around them dimensions (count, source step, target step), the widest
    steps first; dimensions that are one at both ends are merged."""
    steps = sorted(
        (step for step in zip(shape, source, target, strict=True) if step[0] > 1),
        key=lambda step: (step[2], step[1]),
        reverse=True,
    )
    merged: list[tuple[int, int, int]] = []
    for count, from_step, to_step in steps:
        if merged:
            outer, *outer_steps = merged[-1]
            if outer_steps == [count * from_step, count * to_step]:
                merged[-1] = (outer * count, from_step, to_step)
                continue
        merged.append((count, from_step, to_step))
    if merged and merged[-1][1:] == (1, 1):
        return merged.pop()[0], merged
    return 1, merged


def _addresses(view: Tensor, slots: Slots) -> npt.NDArray[np.uint64]:
    return (slots * view.stride(0) + view.data_ptr()).astype(np.uint64)
