"""Stores on the misbehaving server, and pages that know what they are."""

from __future__ import annotations

import hashlib
import random
from typing import Any

from backends.s3.misbehaving_server import BUCKET, MisbehavingServer

from hicache_storage import Namespace, Store
from hicache_storage.backends.s3 import S3Backend

PAGE_BYTES = 5000
NAMESPACE = Namespace(
    model="m",
    pool="opaque",
    dtype="uint8",
    page_size=16,
    page_bytes=PAGE_BYTES,
    layers=1,
    heads=1,
    head_dim=1,
    v_head_dim=1,
    order="opaque",
)
KEYS = [hashlib.sha256(str(i).encode()).hexdigest() for i in range(300)]


def page(number: int, size: int = PAGE_BYTES) -> bytes:
    """The page stored under KEYS[number]."""
    return random.Random(number).randbytes(size)


def backend_of(store: Store) -> S3Backend:
    backend = store._caller.backend
    assert isinstance(backend, S3Backend)
    return backend


def url_of(server: MisbehavingServer, **options: Any) -> str:
    given = {"access_key": "AKID", "secret_key": "s3cr3t", "region": "eu-test-1"} | options
    query = "&".join(f"{name}={value}" for name, value in given.items())
    return f"s3://{BUCKET}/kv?endpoint={server.url}&{query}"


class Opened:
    """A store, and short forms of what tests do with it."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.backend = backend_of(store)

    def fill(self, count: int, first: int = 0) -> None:
        numbers = range(first, first + count)
        assert all(
            self.store.batch_set(NAMESPACE, [KEYS[i] for i in numbers], [page(i) for i in numbers])
        )

    def get(self, numbers: list[int]) -> list[bool]:
        """Reads pages; a hit is checked to be the right page, and the bytes around the buffers
        to be untouched."""
        guarded = [bytearray(b"\xa5" * (PAGE_BYTES + 32)) for _ in numbers]
        spans = [split(memoryview(b)[16:-16], number) for number, b in enumerate(guarded)]
        hits = self.store.batch_get(NAMESPACE, [KEYS[i] for i in numbers], spans)
        for i, hit, buffer in zip(numbers, hits, guarded, strict=True):
            assert buffer[:16] == buffer[-16:] == b"\xa5" * 16
            if hit:
                assert buffer[16:-16] == page(i)
        return hits

    def exists(self, numbers: list[int]) -> int:
        return self.store.exists(NAMESPACE, [KEYS[i] for i in numbers])


def split(view: memoryview, seed: int) -> tuple[memoryview, ...]:
    """The view as one to nine spans of odd sizes."""
    cuts = sorted(random.Random(seed).sample(range(len(view)), seed % 9))
    return tuple(view[a:b] for a, b in zip([0, *cuts], [*cuts, len(view)], strict=True))
