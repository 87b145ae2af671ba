"""Reads pages within one read transaction."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Any

from ...page import PageSpans, spans_bytes
from .bodies import Body, read_bodies
from .copying import scatter
from .records import Inconsistent, Trees

FIXED = struct.Struct(">8sQQHH")
"""The fixed part of a record (see `records`), its number as the key of its body."""
SLICE_BYTES = 16 << 20
SLICE_PAGES = 512
"""Most that one read transaction reads: pages freed meanwhile can't be reused before it ends."""


def slices(sizes: Sequence[int]) -> Iterator[slice]:
    """Parts of a batch of pages of these sizes, each for one transaction."""
    start = taken = 0
    for i, size in enumerate(sizes):
        if i > start and (taken + size > SLICE_BYTES or i - start >= SLICE_PAGES):
            yield slice(start, i)
            start, taken = i, 0
        taken += size
    yield slice(start, len(sizes))


def read_pages(
    txn: Any,
    trees: Trees,
    fd: int,
    page_bytes: int,
    keys: Sequence[bytes],
    buffers: Sequence[PageSpans],
    sizes: Sequence[int],
) -> list[int | None]:
    """Reads pages into their spans, which are `sizes` long; for each when it was last used, or
    None if it isn't there or has another length.

    `fd` is the data file, `page_bytes` the length of an LMDB page. The transaction gives views
    into the map; none of them is given back or kept.
    """
    used: list[int | None] = [None] * len(keys)
    bodies = []
    for i, key in enumerate(keys):
        raw = txn.get(key, db=trees.pages)
        if raw is None:
            continue
        number_key, used_ms, stored_bytes, head_bytes, tail_bytes = FIXED.unpack_from(raw)
        if stored_bytes != sizes[i]:
            continue
        used[i] = used_ms
        inner = _fill_ends(buffers[i], memoryview(raw)[FIXED.size :], head_bytes, tail_bytes)
        length = stored_bytes - head_bytes - tail_bytes
        if length:
            bodies.append(Body(number_key, length, inner))
    bad = read_bodies(txn, trees.bodies, fd, page_bytes, bodies) if bodies else []
    if bad:
        number = int.from_bytes(bodies[bad[0]].number_key, "big")
        raise Inconsistent(f"{len(bad)} pages have no whole body, the first is {number}")
    return used


def _fill_ends(
    spans: PageSpans, ends: memoryview, head_bytes: int, tail_bytes: int
) -> Sequence[memoryview]:
    """Fills the first and last bytes of a page with `ends`; what of the spans lies between."""
    first, last = spans[0], spans[-1]
    if len(first) == head_bytes and len(spans) > 1 and len(last) >= tail_bytes:
        # What Store asks for: a header, then a payload in spans that are longer than a tail.
        first[:] = ends[:head_bytes]
        if not tail_bytes:
            return spans[1:]
        place = len(last) - tail_bytes
        last[place:] = ends[head_bytes:]
        return (last[:place],) if len(spans) == 2 else (*spans[1:-1], last[:place])
    whole = spans_bytes(spans)
    scatter(_between(spans, 0, head_bytes), [ends[:head_bytes]])
    scatter(_between(spans, whole - tail_bytes, whole), [ends[head_bytes:]])
    return _between(spans, head_bytes, whole - tail_bytes)


def _between(spans: PageSpans, start: int, end: int) -> list[memoryview]:
    """What of the spans lies in that range of all their bytes."""
    found, place = [], 0
    for span in spans:
        low, high = max(start - place, 0), min(end - place, len(span))
        if low < high:
            found.append(span[low:high])
        place += len(span)
    return found
