"""Bench: what a clause works with - one store under test, fresh namespaces, pages to write."""

from __future__ import annotations

import hashlib
import itertools
import random
import threading
import uuid
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

from ..calling import Caller
from ..errors import HiCacheStorageError
from ..keys import RECORD_TAG, stored_key
from ..namespace import Namespace
from ..page import HEADER_BYTES, PageSpans, as_spans, make_header
from ..store import Store
from .clause import NotSelected
from .subject import Subject
from .worker import Worker

GUARD = 0xA5


def kit_namespace(page_bytes: int, salt: str, **fields: Any) -> Namespace:
    """A namespace that no server uses: pages of this many bytes without a geometry."""
    values: dict[str, Any] = {
        "model": "conformance-kit",
        "pool": "opaque",
        "dtype": "uint8",
        "page_size": 1,
        "layers": 1,
        "heads": 1,
        "head_dim": 1,
        "v_head_dim": 0,
        "order": "opaque",
    }
    return Namespace(**{**values, "page_bytes": page_bytes, "tenant": salt, **fields})


class Bench:
    """One clause's workplace. It writes only under namespaces and keys of its own.

    `clean` removes what was written, as far as the backend can delete, and closes every store
    that the clause opened.
    """

    def __init__(self, subject: Subject, number: str) -> None:
        self.subject = subject
        self.random = random.Random(number)
        self.salt = uuid.uuid4().hex
        self._stores: list[Store] = []
        self._workers: list[Worker] = []
        self._namespaces: dict[str, Namespace] = {}
        self._keys: list[str] = []
        self._lock = threading.Lock()

    # -- stores ------------------------------------------------------------------------------

    @cached_property
    def store(self) -> Store:
        """The store under test, opened at first use."""
        return self.open()

    def open(self, *, wrappers: Sequence[object] = (), **options: Any) -> Store:
        """One more opening of the same store; closed by `clean`."""
        store = self.subject.open(wrappers=wrappers, **options)
        self._stores.append(store)
        return store

    def close_all(self) -> None:
        """Closes what is open; an error of closing is left to the clauses on it."""
        for store in self._stores:
            with suppress(HiCacheStorageError):
                store.close()

    def raw(self, store: Store | None = None) -> Caller:
        """The backend's own hooks, without the header check."""
        return (store or self.store)._caller

    def check_alone(self) -> None:
        """Raises NotSelected if the store holds pages of anyone else, which `clear` would take."""
        if self.subject.private or self.store.scope == "process":
            return
        if "scan" not in self.store.capabilities:
            raise NotSelected("needs the hook `scan`, to see that only the kit's pages are there")
        own = tuple(f"{digest}/" for digest in self._namespaces)
        if any(not page.key.startswith(own) for page in self.raw().scan("")):
            raise NotSelected("the store holds pages that the kit did not write (or --destructive)")

    def spawn(self, job: str, **arguments: Any) -> Worker:
        """Starts `worker.<job>` on the same store in another process."""
        worker = Worker(self.subject, job, arguments)
        self._workers.append(worker)
        return worker

    # -- names and pages ---------------------------------------------------------------------

    def namespace(self, page_bytes: int = 512, **fields: Any) -> Namespace:
        """A namespace of this clause's own; equal arguments give an equal one."""
        namespace = kit_namespace(page_bytes, self.salt, **fields)
        self._namespaces[namespace.digest] = namespace
        return namespace

    def keys(self, count: int, tag: str = "") -> list[str]:
        """`count` page hashes that were not given before, with a pool tag if asked."""
        with self._lock:
            start = len(self._keys)
            names = [
                hashlib.sha256(f"{self.salt} {start + i}".encode()).hexdigest()
                for i in range(count)
            ]
            keys = [f"{tag}:{name}" if tag else name for name in names]
            self._keys += keys
        return keys

    def note_keys(self, keys: Sequence[str]) -> None:
        """Names keys that the clause made itself, so that `clean` removes their pages."""
        self._keys += keys

    def page(self, size: int) -> bytes:
        """Random bytes."""
        return self.random.randbytes(size)

    def pages(self, count: int, size: int = 512) -> list[bytes]:
        return [self.page(size) for _ in range(count)]

    def split(self, page: bytes, parts: int) -> PageSpans:
        """The page as `parts` spans of random sizes, none empty, each in memory of its own."""
        cuts = sorted(self.random.sample(range(1, len(page)), parts - 1))
        edges = [0, *cuts, len(page)]
        return tuple(memoryview(bytearray(page[a:b])) for a, b in itertools.pairwise(edges))

    def framed(self, namespace: Namespace, key: str, page: bytes) -> PageSpans:
        """What Store hands to a backend for this page."""
        payload = as_spans(page)
        header = make_header(payload, bytes.fromhex(namespace.digest), key)
        return (memoryview(header), *payload)

    # -- stored bytes ------------------------------------------------------------------------

    def stored(self, namespace: Namespace, key: str, store: Store | None = None) -> bytes | None:
        """Header and payload as the backend gives them; None for a miss."""
        buffer = bytearray(HEADER_BYTES + namespace.page_bytes)
        view = memoryview(buffer)
        spans = (view[:HEADER_BYTES], view[HEADER_BYTES:])
        name = stored_key(namespace.digest, key)
        if not self.raw(store).batch_get([name], [spans], None)[0]:
            return None
        return bytes(buffer)

    def tamper(self, namespace: Namespace, key: str, stored: bytes) -> None:
        """Makes `stored` what the store holds under the key."""
        name = stored_key(namespace.digest, key)
        if self.subject.tamper is not None:
            self.subject.tamper(self.store, name, stored)
            return
        # A backend may skip a page whose header is stored already: give it another one first.
        other = bytes(HEADER_BYTES) + b"x"
        for content in (other, stored):
            view = memoryview(content)
            self.raw().batch_set([name], [(view[:HEADER_BYTES], view[HEADER_BYTES:])], None)
            if "flush" in self.store.capabilities:
                # A store that copies later would leave the good page in a second place.
                with suppress(HiCacheStorageError):
                    self.raw().flush()

    # -- the end -----------------------------------------------------------------------------

    def clean(self) -> int:
        """Removes what was written and closes all. Returns how many pages may be left over."""
        for worker in self._workers:
            worker.kill()
        left = 0
        try:
            if self._namespaces:
                left = self._remove()
        finally:
            self.close_all()
        return left

    def _remove(self) -> int:
        open_ones = [store for store in self._stores if not store._closed]
        store = open_ones[0] if open_ones else self.open()
        if store.scope == "process":
            return 0  # its pages end with it
        if "delete" not in store.capabilities:
            return len(self._keys)
        caller = self.raw(store)
        for digest in self._namespaces:
            records = [f"{digest}/{RECORD_TAG}:{digest}"]
            if "scan" in store.capabilities:
                names = [page.key for page in caller.scan(f"{digest}/")]
            else:
                names = [stored_key(digest, key) for key in self._keys]
            names = list(dict.fromkeys(names + records))
            for start in range(0, len(names), 128):
                caller.delete(names[start : start + 128])
        return 0


class Guarded:
    """A buffer of `size` bytes between guard bytes, which nobody may write to."""

    MARGIN = 64

    def __init__(self, size: int) -> None:
        self.memory = bytearray([GUARD]) * (size + 2 * self.MARGIN)
        self.view = memoryview(self.memory)[self.MARGIN : self.MARGIN + size]

    @property
    def intact(self) -> bool:
        guard = bytes([GUARD]) * self.MARGIN
        return self.memory[: self.MARGIN] == guard and self.memory[-self.MARGIN :] == guard


def buffers_for(namespace: Namespace, count: int) -> list[bytearray]:
    """Zeroed buffers for `count` pages."""
    return [bytearray(namespace.page_bytes) for _ in range(count)]
