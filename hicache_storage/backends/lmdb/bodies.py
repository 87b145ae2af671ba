"""Reads the bodies of pages: from the map while they are in memory, else from the file.

Copying from the map is about twice as fast as reading the file, as long as no page fault stands
in the way. A body that isn't in memory would come in page faults, each of which reads either 4 KiB
or, with the kernel's read-ahead for maps, megabytes around it. So LMDB's map is opened without
read-ahead, and cold bodies are read past it: the places of all of them are looked up, the kernel
is told of the whole ranges at once, and each is read straight into the caller's spans. A disk that
fails is an error then; in the map it would end the process.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

from .copying import address, copy, scatter
from .datafile import HEADER, LONG_VALUE

PROBE_EVERY = 8
"""Of small bodies one in so many is looked at, to tell whether those around it are in memory."""
LARGE_BYTES = 128 << 10
"""From this length on every body is looked at, at both ends."""
SMALL_SPAN_BYTES = 2 << 10
"""Into spans below this length, on average, one call of the system is faster than many copies."""
MOST_SPANS = 1024
"""That one call reads into."""

_ENTRY = struct.Struct("=HHHH8sQ")
_probe = bytearray(1)


class Body(NamedTuple):
    """One body that is to be read: its number in the tree, its length, and where it goes."""

    number_key: bytes
    length: int
    spans: Sequence[memoryview]


def read_bodies(txn: Any, tree: Any, fd: int, page_bytes: int, bodies: Sequence[Body]) -> list[int]:
    """Reads bodies into their spans; the places of those that the tree doesn't hold whole.

    `fd` is the data file, `page_bytes` the length of an LMDB page. Nothing of the map is kept.
    """
    scattered = bodies[0].length < SMALL_SPAN_BYTES * len(bodies[0].spans)
    with txn.cursor(db=tree) as cursor:
        if not scattered and not _any_cold(cursor, fd, page_bytes, bodies):
            return [i for i, body in enumerate(bodies) if not _from_map(txn, tree, body)]
        places = [_place(cursor, body, page_bytes) for body in bodies]
    _announce(fd, places, bodies)
    bad = []
    for i, (body, place) in enumerate(zip(bodies, places, strict=True)):
        good = _from_map(txn, tree, body) if place is None else _from_file(fd, place, body)
        if not good:
            bad.append(i)
    return bad


def _any_cold(cursor: Any, fd: int, page_bytes: int, bodies: Sequence[Body]) -> bool:
    for i, body in enumerate(bodies):
        large = body.length >= LARGE_BYTES
        if large or i % PROBE_EVERY == 0 or i == len(bodies) - 1:
            place = _place(cursor, body, page_bytes)
            if place is None:
                continue
            ends = (place, place + body.length - 1) if large else (place + body.length - 1,)
            if not all(resident(fd, end) for end in ends):
                return True
    return False


def resident(fd: int, place: int) -> bool:
    """Whether this byte of the file is in memory; True if that can't be told."""
    try:
        os.preadv(fd, [_probe], place, os.RWF_NOWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _place(cursor: Any, body: Body, page_bytes: int) -> int | None:
    """Where in the file a body begins; None if it lies in a page of the tree, or not at all.

    LMDB doesn't say, but the tree does: an entry's header and value stand around its key, in the
    map. What is found there must agree with what is known of the entry.
    """
    if not cursor.set_key(body.number_key):
        return None
    key = address(cursor.key())
    low, high, flags, key_length, _, page = _ENTRY.unpack(ctypes.string_at(key - 8, _ENTRY.size))
    if flags != LONG_VALUE or key_length != 8 or low | high << 16 != body.length:
        return None
    return int(page) * page_bytes + HEADER


def _announce(fd: int, places: Sequence[int | None], bodies: Sequence[Body]) -> None:
    """Has the kernel read the bodies, neighbours together."""
    start = end = 0
    for place, length in sorted(
        (place, body.length) for place, body in zip(places, bodies, strict=True) if place
    ):
        if place - end > HEADER:
            if end:
                os.posix_fadvise(fd, start, end - start, os.POSIX_FADV_WILLNEED)
            start = place
        end = place + length
    if end:
        os.posix_fadvise(fd, start, end - start, os.POSIX_FADV_WILLNEED)


def _from_map(txn: Any, tree: Any, body: Body) -> bool:
    value = txn.get(body.number_key, db=tree)
    if value is None or len(value) != body.length:
        return False
    if len(body.spans) == 1:
        copy(body.spans[0], memoryview(value))
    else:
        scatter(body.spans, [memoryview(value)])
    return True


def _from_file(fd: int, place: int, body: Body) -> bool:
    spans, end = list(body.spans), place + body.length
    while place < end:
        got = os.preadv(fd, spans[:MOST_SPANS], place)
        if not got:
            return False
        place += got
        if place < end:
            spans = _rest(spans, got)
    return True


def _rest(spans: list[memoryview], done: int) -> list[memoryview]:
    """The spans without their first `done` bytes."""
    for i, span in enumerate(spans):
        if done < len(span):
            return [span[done:], *spans[i + 1 :]]
        done -= len(span)
    return []
