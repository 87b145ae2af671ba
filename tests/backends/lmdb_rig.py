"""What the tests of lmdb:// share: keys, pages, stores, children, and a look at the raw files."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

from backends import children

from hicache_storage.backends.lmdb import LmdbBackend, LmdbConfig
from hicache_storage.backends.lmdb.datafile import Extent, walk
from hicache_storage.backends.lmdb.records import Record, read_totals

DIGEST = "0123456789abcdef" * 2
HEADER_BYTES = 64
PAGE = 16 << 10
HELD = PAGE + HEADER_BYTES
"""Bytes that a page of PAGE counts for: its header is stored too."""


def key(number: int, tag: str = "") -> str:
    """A stored key, as Store makes them."""
    name = hashlib.sha256(str(number).encode()).hexdigest()
    return f"{DIGEST}/{tag}:{name}" if tag else f"{DIGEST}/{name}"


def page(number: int, size: int, parts: int = 1) -> tuple[memoryview, ...]:
    """Header and payload, told by the number; the payload in `parts` spans."""
    seed = hashlib.sha256(f"{number} {size}".encode()).digest()
    payload = memoryview((seed * (size // 32 + 1))[:size])
    step = -(-size // parts)
    spans = [payload[start : start + step] for start in range(0, size, step)]
    return (memoryview(hashlib.sha512(f"{number} {size}".encode()).digest()), *spans)


def pages(numbers: Any, size: int) -> list[tuple[memoryview, ...]]:
    return [page(number, size) for number in numbers]


def opened(path: Any, **options: Any) -> LmdbBackend:
    """An open backend; options as of LmdbConfig."""
    backend = LmdbBackend(LmdbConfig(str(path), **options))
    backend.open()
    return backend


def store(backend: LmdbBackend, numbers: Any, size: int = 4096) -> list[bool]:
    numbers = list(numbers)
    return backend.batch_set([key(number) for number in numbers], pages(numbers, size))


def found(backend: LmdbBackend, numbers: Any, size: int = 4096) -> list[bool]:
    """Which pages are there; each that is must be the right one, whole."""
    numbers = list(numbers)
    buffers = [(memoryview(bytearray(64)), memoryview(bytearray(size))) for _ in numbers]
    hits = backend.batch_get([key(number) for number in numbers], list(buffers))
    for number, hit, buffer in zip(numbers, hits, buffers, strict=True):
        if hit:
            assert tuple(buffer) == page(number, size), f"page {number} came back changed"
    return hits


def there(backend: LmdbBackend, numbers: range) -> list[int]:
    """Which pages are there, without using them."""
    return [number for number in numbers if backend.exists([key(number)])]


def check_consistency(backend: LmdbBackend) -> int:
    """That the trees agree with each other and the file is sound; how many pages there are."""
    environment = backend.environment
    with environment.reading() as (txn, trees):
        records = {
            bytes(name): Record.parse(bytes(raw)) for name, raw in txn.cursor(db=trees.pages)
        }
        bodies = {bytes(number): len(body) for number, body in txn.cursor(db=trees.bodies)}
        order = {bytes(place): bytes(name) for place, name in txn.cursor(db=trees.recency)}
        totals = read_totals(txn, trees)
        with open(f"{environment.path}/data.mdb", "rb") as file:
            walk(file.fileno())
    assert order == {record.order_key: name for name, record in records.items()}
    assert bodies == {r.number_key: r.body_bytes for r in records.values() if r.body_bytes}
    assert totals.stored_bytes == sum(record.page_bytes for record in records.values())
    assert totals.next_number > max([record.number for record in records.values()], default=0)
    return len(records)


def extent(path: Any) -> Extent:
    """A walk over the data file of an environment that nobody has open."""
    with open(f"{path}/data.mdb", "rb") as file:
        return walk(file.fileno())


def file_bytes(path: Any) -> int:
    return os.stat(f"{path}/data.mdb").st_size


def data_file(directory: Path) -> Path:
    return directory / "data.mdb"


def aside(directory: Path) -> list[Path]:
    """The damaged files that were put aside."""
    return list(directory.glob("data.mdb.damaged-*"))


def filled(directory: Path, count: int = 200, **options: object) -> None:
    """Makes a store of `count` pages and closes it."""
    backend = opened(directory, **options)
    assert store(backend, range(count), 8192) == [True] * count
    backend.close()


class Child(children.Child):
    rig = "backends.lmdb_rig"
