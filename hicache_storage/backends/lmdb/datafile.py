"""Reads an LMDB data file as plain bytes, so that a damaged one can't kill the process.

LMDB maps the file and trusts it: a file cut short, or with garbage in its tree, ends in SIGBUS,
SIGSEGV or an endless loop. Here every read is a `pread`, every number is checked before use.

Data format 1 (LMDB 0.9), 64 bits, this machine's byte order:

    LMDB page   0 number u64 | 8 pad u16 | 10 flags u16 | 12 lower u16 | 14 upper u16
                (12 count u32 on the first page of a long value) | 16 content
    content of pages 0 and 1 (the metas)
                0 magic u32 | 4 version u32 | 8 address u64 | 16 map size u64 |
                24 free tree | 72 main tree | 120 last page u64 | 128 transaction u64
    tree        0 page size (free tree) u32 | 4 flags u16 | 6 depth u16 | 8, 16, 24 counts u64 |
                32 entries u64 | 40 root u64
    node        0 low u16 | 2 high u16 | 4 flags u16 | 6 key length u16 | 8 key, value
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

MAGIC = 0xBEEFC0DE
FORMAT = 1
HEADER = 16
NO_PAGE = (1 << 64) - 1
MOST_DEPTH = 32
MOST_PAGE_BYTES = 1 << 15

BRANCH, LEAF, LONG, META = 0x01, 0x02, 0x04, 0x08
LONG_VALUE, SUBTREE = 0x01, 0x02

_PAGE = struct.Struct("=QHHHH")
_META = struct.Struct("=IIQQ")
_TREE = struct.Struct("=IHHQQQQQ")
_TAIL = struct.Struct("=QQ")
_NODE = struct.Struct("=HHHH")
_NUMBER = struct.Struct("=Q")
_COUNT = struct.Struct("=I")
META_BYTES = HEADER + _META.size + 2 * _TREE.size + _TAIL.size


class Damaged(Exception):
    """The file is not what LMDB wrote; the text says where and how."""


class OtherFormat(Exception):
    """A data file of an LMDB release whose format isn't read here."""


@dataclass(frozen=True)
class Tree:
    """One B-tree as its parent describes it."""

    page_bytes: int
    depth: int
    entries: int
    root: int


@dataclass(frozen=True)
class Meta:
    """The newest committed state of the file."""

    page_bytes: int
    map_bytes: int
    last_page: int
    transaction: int
    free: Tree
    main: Tree


@dataclass
class Extent:
    """What a walk over the whole file found, in LMDB pages."""

    page_bytes: int
    pages: int
    """Pages that the file has or may have, free ones and the two metas included."""
    used_pages: int = 0
    free_pages: int = 0
    longest_free_run: int = 0
    last_used: int = 1
    """Highest page that is part of a tree or of a value."""
    entries: dict[str, int] = field(default_factory=dict)
    """Entries of each named tree."""


def read_metas(fd: int) -> list[Meta]:
    """Both metas, the newer one first. Raises Damaged, or OtherFormat."""
    first = _meta_at(fd, 0)
    second = _meta_at(fd, first.page_bytes)
    if second.page_bytes != first.page_bytes:
        raise Damaged(f"metas disagree on the page size: {first.page_bytes}, {second.page_bytes}")
    return sorted((first, second), key=lambda meta: -meta.transaction)


def read_meta(fd: int) -> Meta:
    """The newest state of the file. Raises Damaged, or OtherFormat."""
    return read_metas(fd)[0]


def needed_bytes(meta: Meta) -> int:
    """Length of a file that holds every page up to the last. A sound file may be shorter: pages
    freed by the transaction that took them were never written."""
    return (meta.last_page + 1) * meta.page_bytes


def walk(fd: int, meta: Meta | None = None, *, long_pages: bool = True) -> Extent:
    """Reads all trees and checks that they are sound, inside the file and apart from each other.

    Without `long_pages` the first pages of long values are not read, only counted, and free
    pages aren't looked at. Nobody may write meanwhile, unless a read transaction is under way
    and `meta` is the state that it sees. Raises Damaged, or OtherFormat.
    """
    return _Walk(fd, meta or read_meta(fd), long_pages).run()


def _meta_at(fd: int, offset: int) -> Meta:
    raw = os.pread(fd, META_BYTES, offset)
    if len(raw) != META_BYTES:
        raise Damaged(f"no meta at byte {offset}: the file ends there")
    flags = _PAGE.unpack_from(raw)[2]
    magic, version, _, map_bytes = _META.unpack_from(raw, HEADER)
    if magic != MAGIC:
        if any(struct.unpack_from("=I", raw, place)[0] == MAGIC for place in range(0, 64, 4)):
            raise OtherFormat("an LMDB data format with another page header")
        raise Damaged(f"no LMDB meta at byte {offset}")
    if version != FORMAT:
        raise OtherFormat(f"LMDB data format {version}")
    start = HEADER + _META.size
    free, main = _tree(raw, start), _tree(raw, start + _TREE.size)
    last_page, transaction = _TAIL.unpack_from(raw, start + 2 * _TREE.size)
    size = free.page_bytes
    if not flags & META or size < 256 or size > MOST_PAGE_BYTES or size & (size - 1):
        raise Damaged(f"meta at byte {offset} has flags {flags:#x} and page size {size}")
    if last_page < 1 or last_page >= 1 << 52:
        raise Damaged(f"meta at byte {offset} says that the last page is {last_page}")
    return Meta(size, map_bytes, last_page, transaction, free, main)


def _tree(raw: bytes, offset: int) -> Tree:
    page_bytes, _, depth, _, _, _, entries, root = _TREE.unpack_from(raw, offset)
    return Tree(page_bytes, depth, entries, root)


class _Walk:
    def __init__(self, fd: int, meta: Meta, long_pages: bool) -> None:
        self._fd = fd
        self._long_pages = long_pages
        self._meta = meta
        self._size = self._meta.page_bytes
        self._file_bytes = os.fstat(fd).st_size
        pages = self._meta.last_page + 1
        self._extent = Extent(self._size, pages)
        # One byte a page of the file; 1: in use, 2: free. Pages beyond its end can only be free.
        self._taken = bytearray(min(pages, -(-self._file_bytes // self._size)))
        self._taken[:2] = b"\1\1"

    def run(self) -> Extent:
        names: list[tuple[str, Tree]] = []
        free: list[int] = []
        for _, value, flags in self._entries("free", self._meta.free):
            if flags or len(value) % 8 or len(value) < 8:
                raise Damaged("free list with a record of the wrong form")
            count, *pages = struct.unpack(f"={len(value) // 8}Q", value)
            if count != len(pages):
                raise Damaged(f"free list with a record of {len(pages)} pages that says {count}")
            free += pages
        for key, value, flags in self._entries("main", self._meta.main):
            if flags == SUBTREE and len(value) == _TREE.size:
                names.append((key.decode("latin-1"), _tree(value, 0)))
        self._extent.entries["main"] = self._meta.main.entries
        for name, tree in names:
            for _ in self._entries(name, tree, values=False):
                pass
            self._extent.entries[name] = tree.entries
        self._extent.used_pages = self._taken.count(1)
        if self._long_pages:
            self._take_free(free)
        return self._extent

    def _entries(
        self, name: str, tree: Tree, *, values: bool = True
    ) -> Iterator[tuple[bytes, bytes, int]]:
        """(key, value, node flags) of every entry, in order; b"" for a value that isn't wanted."""
        if tree.root == NO_PAGE:
            if tree.entries:
                raise Damaged(f"tree {name}: no root, but {tree.entries} entries")
            return
        if not 0 < tree.depth <= MOST_DEPTH:
            raise Damaged(f"tree {name}: depth {tree.depth}")
        count = 0
        stack = [(tree.root, 1)]
        while stack:
            number, level = stack.pop()
            page, kind = self._tree_page(name, number)
            if kind == BRANCH:
                if level >= tree.depth:
                    raise Damaged(f"tree {name}: page {number} lies below the leaves")
                below = [low | high << 16 | flags << 32 for low, high, flags, _, _ in _nodes(page)]
                stack += [(child, level + 1) for child in reversed(below)]
                continue
            if level != tree.depth:
                raise Damaged(f"tree {name}: page {number} is a leaf at level {level}")
            for low, high, flags, key_length, start in _nodes(page):
                count += 1
                length = low | high << 16
                value = start + key_length
                key = page[start:value]
                if flags & LONG_VALUE:
                    yield key, self._long_value(name, page, value, length, values), 0
                elif value + length > self._size:
                    raise Damaged(f"tree {name}: an entry of page {number} leaves the page")
                else:
                    yield key, page[value : value + length] if values else b"", flags
        if count != tree.entries:
            raise Damaged(f"tree {name}: {count} entries found, {tree.entries} expected")

    def _tree_page(self, name: str, number: int) -> tuple[bytes, int]:
        self._take(name, number, 1)
        page = os.pread(self._fd, self._size, number * self._size)
        if len(page) != self._size:
            raise Damaged(f"tree {name}: page {number} lies beyond the end of the file")
        own, _, flags, lower, upper = _PAGE.unpack_from(page)
        if (
            own != number
            or flags not in (BRANCH, LEAF)
            or not HEADER <= lower <= upper <= self._size
        ):
            raise Damaged(f"tree {name}: page {number} is not a page of a tree")
        return page, flags

    def _long_value(self, name: str, page: bytes, start: int, length: int, wanted: bool) -> bytes:
        if start + _NUMBER.size > self._size:
            raise Damaged(f"tree {name}: an entry leaves its page")
        (number,) = _NUMBER.unpack_from(page, start)
        count = (HEADER - 1 + length) // self._size + 1
        self._take(name, number, count)
        place = number * self._size
        if place + HEADER + length > self._file_bytes:
            raise Damaged(f"tree {name}: the value at page {number} ends beyond the file")
        if self._long_pages:
            raw = os.pread(self._fd, HEADER, place)
            own, _, flags = _PAGE.unpack_from(raw)[:3]
            if own != number or flags != LONG or _COUNT.unpack_from(raw, 12) != (count,):
                raise Damaged(f"tree {name}: page {number} does not begin a value of {count} pages")
        return os.pread(self._fd, length, place + HEADER) if wanted else b""

    def _take(self, name: str, number: int, count: int) -> None:
        end = number + count
        if number < 2 or end > self._extent.pages:
            raise Damaged(f"tree {name}: page {number} does not exist")
        if end > len(self._taken):
            raise Damaged(f"tree {name}: page {end - 1} lies beyond the end of the file")
        if self._taken.find(1, number, end) != -1:
            raise Damaged(f"tree {name}: page {number} is in use twice")
        self._taken[number:end] = b"\1" * count
        self._extent.last_used = max(self._extent.last_used, end - 1)

    def _take_free(self, free: list[int]) -> None:
        run = previous = 0
        for number in sorted(free):
            inside = number < len(self._taken)
            if not 2 <= number < self._extent.pages or (inside and self._taken[number] == 1):
                raise Damaged(f"free list: page {number} is in use or does not exist")
            if number == previous:
                raise Damaged(f"free list: page {number} is free twice")
            run = run + 1 if number == previous + 1 else 1
            previous = number
            self._extent.longest_free_run = max(self._extent.longest_free_run, run)
        self._extent.free_pages = len(free)


def _nodes(page: bytes) -> Iterator[tuple[int, int, int, int, int]]:
    """(low, high, flags, key length, place of the key) of every node of a tree page."""
    lower = _PAGE.unpack_from(page)[3]
    for place in range(HEADER, lower, 2):
        (offset,) = struct.unpack_from("=H", page, place)
        if offset < lower or offset + _NODE.size > len(page):
            raise Damaged("a tree page with a node outside of it")
        low, high, flags, key_length = _NODE.unpack_from(page, offset)
        start = offset + _NODE.size
        if start + key_length > len(page):
            raise Damaged("a tree page with a key outside of it")
        yield low, high, flags, key_length, start
