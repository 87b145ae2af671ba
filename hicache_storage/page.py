"""Page spans, and the 64-byte header that makes a stored page checkable.

A stored page is the header and then the payload, one whole object in the store:

    offset  bytes  field
    0       4      magic "HKVP"
    4       2      header version, little-endian
    6       2      zero
    8       8      payload length in bytes, little-endian
    16      16     XXH3-128 of the payload
    32      16     namespace digest
    48      16     XXH3-128 of the page key

All of it follows from the namespace, the key and the payload, so a page is good exactly if its
stored header equals the one computed from what was read.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import xxhash

from .errors import CorruptPage, PageSizeMismatch

PageSpans = tuple[memoryview, ...]
"""The parts of a page in order, each a flat memoryview of bytes: one for a contiguous page,
2 x layers for a layer-first MHA page."""

HEADER_BYTES = 64
_HEADER = struct.Struct("<4sHHQ16s16s16s")
_MAGIC = b"HKVP"
_VERSION = 1
_ZEROS = bytes(1 << 20)
_HELD_BYTES = 512 << 10
_PIECE_BYTES = 96 << 10
"""Of pages up to _HELD_BYTES, what is hashed at a time: for more xxhash gives the interpreter lock
up, and beside a busy thread it takes longer to get it back than to hash such a page."""


class SizedSpans(tuple[memoryview, ...]):
    """Spans that know their total length: adding up the many of a layer-first page takes a while.

    Whoever makes them may set `length_bytes`; else it is added up once.
    """

    length_bytes: int | None = None


class FlatSpans(SizedSpans):
    """Spans that are known to be flat, contiguous and writable, so that nobody checks them again.

    For whoever makes spans of memory of its own; `as_spans` passes them on as they are.
    """


class ScatteredPage:
    """A page of many short spans, which whoever made it copies as a whole, at less cost than they
    take one by one.

    To iterate over it gives the spans. `Store` gathers it into memory of its own before it is
    written, and scatters it once what was read has been checked.
    """

    __slots__ = ()
    length_bytes: int

    def gather(self, into: memoryview) -> None:
        """Copies the page into `length_bytes` bytes in a row."""
        raise NotImplementedError

    def scatter(self, source: memoryview) -> None:
        """Copies `length_bytes` bytes in a row to the page's places."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[memoryview]:
        raise NotImplementedError


AnyPage = PageSpans | ScatteredPage


def as_page(page: Any, *, writable: bool = False) -> AnyPage:
    """`page` as it is if it is scattered, else as spans."""
    return page if isinstance(page, ScatteredPage) else as_spans(page, writable=writable)


def as_spans(page: Any, *, writable: bool = False) -> PageSpans:
    """`page` as spans: a buffer, or an iterable of buffers, each contiguous.

    Nothing is copied. Raises PageSizeMismatch for a buffer that isn't contiguous, or is
    read-only although `writable` is asked for.
    """
    if type(page) is FlatSpans:
        return page
    if isinstance(page, ScatteredPage):
        spans = FlatSpans(page)
        spans.length_bytes = page.length_bytes
        return spans
    parts: Iterable[Any] = page if isinstance(page, (tuple, list)) else (page,)
    found = []
    for part in parts:
        view = part if isinstance(part, memoryview) else memoryview(part)
        if view.format != "B" or view.ndim != 1:
            if not view.c_contiguous:
                raise PageSizeMismatch("a page span must be contiguous; give several spans")
            view = view.cast("B")
        elif not view.c_contiguous:
            raise PageSizeMismatch("a page span must be contiguous; give several spans")
        if writable and view.readonly:
            raise PageSizeMismatch("a span to read into must be writable")
        found.append(view)
    return tuple(found)


def spans_bytes(spans: Sequence[memoryview] | ScatteredPage) -> int:
    """Total length of flat byte spans."""
    if isinstance(spans, ScatteredPage):
        return spans.length_bytes
    if not isinstance(spans, SizedSpans):
        return sum(map(len, spans))
    if spans.length_bytes is None:
        spans.length_bytes = sum(map(len, spans))
    return spans.length_bytes


def framed(header: memoryview, payload: PageSpans) -> PageSpans:
    """A stored page: the header, then the payload."""
    page = SizedSpans((header, *payload))
    page.length_bytes = len(header) + spans_bytes(payload)
    return page


def zero_spans(spans: Iterable[memoryview]) -> None:
    """Fills the spans with zero bytes."""
    for span in spans:
        for start in range(0, len(span), len(_ZEROS)):
            part = span[start : start + len(_ZEROS)]
            part[:] = _ZEROS[: len(part)]


def key_digest(page_key: str) -> bytes:
    """XXH3-128 of a page key, as the header holds it."""
    return xxhash.xxh3_128_digest(page_key.encode())


def make_header(payload: Sequence[memoryview], namespace_digest: bytes, page_key: str) -> bytes:
    """The header of the page with this payload under this key."""
    length = spans_bytes(payload)
    return _HEADER.pack(
        _MAGIC,
        _VERSION,
        0,
        length,
        _checksum(payload, length),
        namespace_digest,
        key_digest(page_key),
    )


def _checksum(payload: Sequence[memoryview], length: int) -> bytes:
    """XXH3-128 of the payload."""
    if len(payload) == 1 and not _PIECE_BYTES < length <= _HELD_BYTES:
        return xxhash.xxh3_128_digest(payload[0])
    hasher = xxhash.xxh3_128()
    add = hasher.update
    for span in payload:
        if len(span) <= _PIECE_BYTES or length > _HELD_BYTES:
            add(span)
        else:
            for start in range(0, len(span), _PIECE_BYTES):
                add(span[start : start + _PIECE_BYTES])
    return hasher.digest()


def announced_bytes(header: bytes) -> int | None:
    """The length of the whole stored page, header included, that a header announces; None if it
    isn't a header of this release. For backends that want to tell a cut page from another one."""
    if len(header) != HEADER_BYTES or header[:6] != _MAGIC + _VERSION.to_bytes(2, "little"):
        return None
    return HEADER_BYTES + int.from_bytes(header[8:16], "little")


def check_page(
    header: memoryview | bytes,
    payload: Sequence[memoryview],
    namespace_digest: bytes,
    page_key: str,
) -> None:
    """Returns if header and payload are the page written under this key, else raises
    CorruptPage with what differs."""
    expected = make_header(payload, namespace_digest, page_key)
    if header == expected:
        return
    found = _HEADER.unpack(header)
    wanted = _HEADER.unpack(expected)
    reasons = (
        "not a page of this package (magic)",
        f"header version {found[1]}, this release reads {_VERSION}",
        "damaged header",
        f"payload of {found[3]} bytes, expected {wanted[3]}",
        "payload does not match its checksum",
        "page of another namespace",
        "page of another key",
    )
    differing = (why for why, a, b in zip(reasons, found, wanted, strict=True) if a != b)
    raise CorruptPage(page_key, next(differing, "damaged header"))
