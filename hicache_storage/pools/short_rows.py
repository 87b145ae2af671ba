"""Pages of short rows at even distances: an array over the pool, so that one copy moves a page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from ..page import ScatteredPage

Bytes = npt.NDArray[np.uint8]

SHORT_ROW_BYTES = 512 << 10
"""Longest row that is rather copied than moved in place: of longer ones a few pages fill the
memory that there is for copies."""
FEWEST_ROWS = 8


class ShortRows(ScatteredPage):
    """A page as a (rows, bytes) view of its pool."""

    __slots__ = ("_rows", "length_bytes")

    def __init__(self, rows: Bytes, length_bytes: int) -> None:
        self._rows = rows
        self.length_bytes = length_bytes

    def gather(self, into: memoryview) -> None:
        np.copyto(np.frombuffer(into, np.uint8).reshape(self._rows.shape), self._rows)

    def scatter(self, source: memoryview) -> None:
        np.copyto(self._rows, np.frombuffer(source, np.uint8).reshape(self._rows.shape))

    def __iter__(self) -> Iterator[memoryview]:
        return (row.data for row in self._rows)


def short_rows(
    memory: memoryview, starts: Sequence[int], step: int, length: int, num_pages: int
) -> Bytes | None:
    """A view (pages, rows, bytes) of `memory`: row r of page p are `length` bytes from
    `starts[r] + p * step`. None where rows are few, long or at uneven distances."""
    if len(starts) < FEWEST_ROWS or length > SHORT_ROW_BYTES:
        return None
    pitch = starts[1] - starts[0]
    if pitch < length or list(starts) != [starts[0] + i * pitch for i in range(len(starts))]:
        return None
    shape, strides = (num_pages, len(starts), length), (step, pitch, 1)
    whole = np.frombuffer(memory, np.uint8)[starts[0] :]
    return np.lib.stride_tricks.as_strided(whole, shape, strides)
