"""How pages lie in the LMDB trees, and the changes that one transaction makes to them.

    pages     stored key -> record: number u64, last use u64 (ms since the epoch), page length u64,
              head length u16, tail length u16, then head and tail
    bodies    number, 8 bytes -> the page without its head and tail
    recency   last use, number, 8 bytes each -> stored key
    totals    b"format" -> FORMAT, b"totals" -> stored bytes u64, next number u64

Numbers are given in order and never again, so bodies are appended. All integers are big-endian:
their order is that of their bytes.

LMDB puts a long value behind a header of its own on LMDB pages of its own, so a value of 64 KiB
would waste the better part of one. The head (the page header, if there is one) and a short tail
therefore stay in the record, and the body ends where an LMDB page ends. It also means that a
page of one span is written without a copy of it being made first, and that looking a page up, or
finding that it is stored already, doesn't touch its body. Record and body change in one
transaction: there is no moment at which one of them is older.
"""

from __future__ import annotations

import struct
from collections.abc import Container
from dataclasses import dataclass
from typing import Any, NamedTuple

from ...page import PageSpans, spans_bytes
from .copying import gather

FORMAT = b"hicache-storage lmdb 1"
FORMAT_KEY, TOTALS_KEY = b"format", b"totals"
TREES = ("pages", "bodies", "recency", "totals")

LONG_HEADER_BYTES = 16
"""What LMDB puts before a long value."""
MOST_HEAD_BYTES = 256
MOST_TAIL_BYTES = 512
MOST_PAGE_BYTES = (1 << 31) - (1 << 20)
"""Just below 2 GiB: more than some releases of LMDB can write at once."""

_RECORD = struct.Struct(">QQQHH")
_NUMBER = struct.Struct(">Q")
_ORDER = struct.Struct(">QQ")
_TOTALS = struct.Struct(">QQ")


@dataclass(frozen=True)
class Trees:
    """Handles of the named trees; `Any` since the client has no types of its own in all
    releases."""

    pages: Any
    bodies: Any
    recency: Any
    totals: Any


@dataclass
class Totals:
    """Counts that change with every transaction."""

    stored_bytes: int = 0
    next_number: int = 1


class Record(NamedTuple):
    """What stands under a stored key."""

    number: int
    used_ms: int
    page_bytes: int
    head_bytes: int
    tail_bytes: int
    raw: bytes | memoryview

    @classmethod
    def parse(cls, raw: bytes | memoryview) -> Record:
        number, used_ms, page_bytes, head_bytes, tail_bytes = _RECORD.unpack_from(raw)
        return cls(number, used_ms, page_bytes, head_bytes, tail_bytes, raw)

    def holds(self, header: memoryview, page_bytes: int) -> bool:
        """Whether this is the page with that header and length, so that it is stored already."""
        return self.page_bytes == page_bytes and self.head_bytes > 0 and self.head == header

    @property
    def body_bytes(self) -> int:
        return self.page_bytes - self.head_bytes - self.tail_bytes

    @property
    def number_key(self) -> bytes:
        return _NUMBER.pack(self.number)

    @property
    def order_key(self) -> bytes:
        return _ORDER.pack(self.used_ms, self.number)

    @property
    def head(self) -> bytes | memoryview:
        return self.raw[_RECORD.size : _RECORD.size + self.head_bytes]

    @property
    def tail(self) -> bytes | memoryview:
        return self.raw[_RECORD.size + self.head_bytes :]


class Scratch:
    """Memory in which a page of several spans is put together; kept for the next one."""

    def __init__(self) -> None:
        self._memory = bytearray()

    def joined(self, spans: PageSpans) -> memoryview:
        """The spans as one; valid until the next call. One span is given back as it is."""
        if len(spans) == 1:
            return spans[0]
        length = spans_bytes(spans)
        if len(self._memory) < length:
            self._memory = bytearray(length)
        view = memoryview(self._memory)[:length]
        gather(view, spans)
        return view


class Changes:
    """The changes of one write transaction. Nothing counts before it is committed."""

    def __init__(self, transaction: Any, trees: Trees, page_bytes: int) -> None:
        """`page_bytes` is the length of an LMDB page."""
        self._txn = transaction
        self._trees = trees
        self._page_bytes = page_bytes
        self._changed = False
        self.totals = read_totals(transaction, trees)

    def record(self, key: bytes) -> Record | None:
        raw = self._txn.get(key, db=self._trees.pages)
        return None if raw is None else Record.parse(raw)

    def put(self, key: bytes, spans: PageSpans, used_ms: int, scratch: Scratch) -> None:
        """Stores a page under a key that holds none."""
        head, payload = (spans[0], spans[1:])
        if len(head) > MOST_HEAD_BYTES:
            head, payload = head[:0], spans
        joined = scratch.joined(payload) if payload else head[:0]
        tail_bytes = self._tail_bytes(len(joined))
        body, tail = joined[: len(joined) - tail_bytes], joined[len(joined) - tail_bytes :]
        page_bytes = len(head) + len(joined)
        number = self.totals.next_number
        fixed = _RECORD.pack(number, used_ms, page_bytes, len(head), tail_bytes)
        key_of_body = _NUMBER.pack(number)
        if len(body) and not self._txn.put(key_of_body, body, db=self._trees.bodies, append=True):
            raise Inconsistent(f"body {number} is not the newest")
        self._txn.put(key, b"".join((fixed, head, tail)), db=self._trees.pages)
        self._txn.put(_ORDER.pack(used_ms, number), key, db=self._trees.recency)
        self.totals.next_number += 1
        self.totals.stored_bytes += page_bytes
        self._changed = True

    def drop(self, key: bytes, record: Record | None = None) -> None:
        """Removes a page if it is there; `record` is what stands under the key, if known."""
        record = record or self.record(key)
        if record is None:
            return
        self._txn.delete(key, db=self._trees.pages)
        if record.body_bytes:
            self._txn.delete(record.number_key, db=self._trees.bodies)
        self._txn.delete(record.order_key, db=self._trees.recency)
        self.totals.stored_bytes -= record.page_bytes
        self._changed = True

    def touch(self, key: bytes, used_ms: int) -> None:
        """Makes a page's last use `used_ms` unless it was used later, or is gone."""
        record = self.record(key)
        if record is None or record.used_ms >= used_ms:
            return
        fixed = _RECORD.pack(
            record.number, used_ms, record.page_bytes, record.head_bytes, record.tail_bytes
        )
        self._txn.put(key, fixed + bytes(record.raw[_RECORD.size :]), db=self._trees.pages)
        self._txn.delete(record.order_key, db=self._trees.recency)
        self._txn.put(_ORDER.pack(used_ms, record.number), key, db=self._trees.recency)

    def evict(self, excess_bytes: int, kept: Container[bytes]) -> int:
        """Removes the least recently used pages, those in `kept` apart, until `excess_bytes` are
        freed or there is none left; the bytes that were freed."""
        before = self.totals.stored_bytes
        with self._txn.cursor(db=self._trees.recency) as cursor:
            more = cursor.first()
            while more and before - self.totals.stored_bytes < excess_bytes:
                order, key = cursor.item()
                if key in kept:
                    more = cursor.next()
                    continue
                self.drop(key)
                # Gone with the page; if it never was that page's, it would come up for ever.
                self._txn.delete(order, db=self._trees.recency)
                more = cursor.set_range(order)
        return before - self.totals.stored_bytes

    def finish(self, *, even_unchanged: bool = False) -> None:
        """Writes the totals, if pages came or went; the last change of the transaction."""
        if not self._changed and not even_unchanged:
            return
        packed = _TOTALS.pack(self.totals.stored_bytes, self.totals.next_number)
        self._txn.put(TOTALS_KEY, packed, db=self._trees.totals)

    def _tail_bytes(self, length: int) -> int:
        if length <= MOST_TAIL_BYTES:
            return length
        over = (length + LONG_HEADER_BYTES) % self._page_bytes
        return over if over <= MOST_TAIL_BYTES else 0


def read_totals(transaction: Any, trees: Trees) -> Totals:
    raw = transaction.get(TOTALS_KEY, db=trees.totals)
    return Totals() if raw is None else Totals(*_TOTALS.unpack(raw))


class Inconsistent(Exception):
    """The trees contradict each other, which no transaction of this backend leaves behind."""
