"""Store: one backend, asked for whole pages of a namespace, every byte checked on the way back."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from .calling import Caller
from .errors import (
    BackendError,
    ConfigError,
    CorruptPage,
    InvalidKey,
    PageSizeMismatch,
    StoreClosed,
)
from .failures import FailureLog
from .forking import renew_lock_in_child
from .hookspecs import Scope, StoredPage, Usage
from .keys import RECORD_TAG, split_stored_key, stored_key
from .namespace import RECORD_BYTES, Namespace
from .page import (
    HEADER_BYTES,
    AnyPage,
    PageSpans,
    as_page,
    as_spans,
    check_page,
    framed,
    make_header,
    spans_bytes,
)
from .staging import Staging, gathered, scatter

BAD_PAGES_REMEMBERED = 10_000


@dataclass
class StoreCounts:
    """What a Store has seen since it was made."""

    set_pages: int = 0
    refused_pages: int = 0
    """Pages that `batch_set` could not store."""
    hit_pages: int = 0
    missed_pages: int = 0
    corrupt_pages: int = 0
    """Pages read that were not what was written; each counts as missed too."""


class Store:
    """Pages in one backend. Thread-safe as far as the backend is.

    Frames every page with a checked header, names it by namespace and key, and lets nothing
    through that isn't exactly what was written. A miss is a value; errors of the backend as a
    whole are raised (`BackendError` and below), and StoreClosed after `close`.
    """

    def __init__(
        self, backend: object, *, name: str | None = None, wrappers: Sequence[object] = ()
    ) -> None:
        self.name = name or type(backend).__name__
        self.counts = StoreCounts()
        self.failures = FailureLog(f"store {self.name!r}")
        self._caller = Caller(backend, name=self.name, wrappers=wrappers)
        self._lock = threading.Lock()
        renew_lock_in_child(self)
        self._recorded: set[str] = set()
        self._bad: OrderedDict[str, None] = OrderedDict()
        self._staging = Staging()
        self._closed = False

    def __repr__(self) -> str:
        return f"Store({self.name!r}, {'closed' if self._closed else 'open'})"

    @property
    def capabilities(self) -> frozenset[str]:
        """Names of the optional hooks that the backend has."""
        return self._caller.capabilities

    @property
    def scope(self) -> Scope:
        """Who shares the backend's pages; see `hookspecs`."""
        return self._caller.scope

    def open(self) -> None:
        """Opens the backend; `open_store` does it."""
        self._caller.open()

    def batch_set(
        self,
        namespace: Namespace,
        keys: Sequence[str],
        pages: Sequence[Any],
        prefix_keys: Sequence[str] | None = None,
    ) -> list[bool]:
        """Stores pages; True for each that is stored.

        A page is a buffer or a tuple of buffers, in all `namespace.page_bytes` long.
        """
        self._check_open()
        names, payloads = self._prepare(namespace, keys, pages, writable=False)
        if not names:
            return []
        self._record(namespace)
        digest = bytes.fromhex(namespace.digest)
        prefix = _names(namespace, prefix_keys)
        stored = [False] * len(names)

        def write(part: slice) -> None:
            with self._staging.lent():
                places = self._staging.places(payloads[part])
                frames = [
                    framed(self._header(payload, place, digest, key), place)
                    for key, payload, place in zip(keys[part], payloads[part], places, strict=True)
                ]
                stored[part] = self._caller.batch_set(
                    names[part], frames, _extended(prefix, names, part)
                )

        self._caller.spread("batch_set", namespace.page_bytes, len(names), write)
        self._trust(names, stored)
        count = sum(stored)
        with self._lock:
            self.counts.set_pages += count
            self.counts.refused_pages += len(stored) - count
        return stored

    def batch_get(
        self,
        namespace: Namespace,
        keys: Sequence[str],
        buffers: Sequence[Any],
        prefix_keys: Sequence[str] | None = None,
    ) -> list[bool]:
        """Reads pages into their buffers; True for each that arrived whole and unchanged.

        The buffers of a miss are undefined. A page that is proven bad is a miss, is counted and
        logged, and is deleted if the backend can.
        """
        self._check_open()
        names, payloads = self._prepare(namespace, keys, buffers, writable=True)
        if not names:
            return []
        headers = memoryview(bytearray(HEADER_BYTES * len(names)))
        digest = bytes.fromhex(namespace.digest)
        prefix = _names(namespace, prefix_keys)
        hits = [False] * len(names)

        def read(part: slice) -> None:
            with self._staging.lent():
                places = self._staging.places(payloads[part])
                frames = [
                    framed(headers[HEADER_BYTES * i : HEADER_BYTES * (i + 1)], place)
                    for i, place in enumerate(places, part.start)
                ]
                arrived = self._caller.batch_get(
                    names[part], frames, _extended(prefix, names, part)
                )
                for i, hit, frame, place in zip(
                    range(part.start, part.stop), arrived, frames, places, strict=True
                ):
                    if hit:
                        try:
                            whole = self._staging.in_a_row(payloads[i], place)
                            check_page(frame[0], whole, digest, keys[i])
                            scatter(place, payloads[i])
                            hits[i] = True
                        except CorruptPage as error:
                            self._put_aside(names[i], error, payloads[i], digest)

        self._caller.spread("batch_get", namespace.page_bytes, len(names), read)
        self._trust(names, hits)
        count = sum(hits)
        with self._lock:
            self.counts.hit_pages += count
            self.counts.missed_pages += len(hits) - count
        return hits

    def exists(
        self,
        namespace: Namespace,
        keys: Sequence[str],
        prefix_keys: Sequence[str] | None = None,
    ) -> int:
        """The length of the leading run of stored keys."""
        names = [stored_key(namespace.digest, key) for key in keys]
        return self._leading_run(names, _names(namespace, prefix_keys))

    def exists_across(
        self,
        keys: Sequence[tuple[Namespace, str]],
        prefix_keys: Sequence[tuple[Namespace, str]] | None = None,
    ) -> int:
        """The same for keys of several namespaces, as of targets and their drafts in turn."""
        names, prefix = (
            None if each is None else [stored_key(space.digest, key) for space, key in each]
            for each in (keys, prefix_keys)
        )
        return self._leading_run(names or [], prefix)

    def _leading_run(self, names: list[str], prefix: list[str] | None) -> int:
        self._check_open()
        if not names:
            return 0
        run = self._caller.exists(names, prefix)
        if self._bad:
            run = next((i for i, name in enumerate(names[:run]) if name in self._bad), run)
        return run

    def delete(self, namespace: Namespace, keys: Sequence[str]) -> list[bool]:
        """Deletes pages; True for each that is not stored any more. Needs the capability."""
        self._check_open()
        names = [stored_key(namespace.digest, key) for key in keys]
        return self._caller.delete(names) if names else []

    def scan(self, prefix: str = "") -> Iterator[StoredPage]:
        """Every stored page, of all namespaces, by stored key. Needs the capability."""
        self._check_open()
        for page in self._caller.scan(prefix):
            if not _is_record(page.key):
                yield page

    def namespaces(self) -> dict[str, Namespace | None]:
        """Every namespace of which something is stored, by digest; None where its record is
        lost or of another format. Needs the capability "scan"."""
        self._check_open()
        digests = {split_stored_key(page.key)[0] for page in self._caller.scan("")}
        return {digest: self._read_record(digest) for digest in sorted(digests)}

    def usage(self) -> Usage:
        """What the store holds. Needs the capability."""
        self._check_open()
        return self._caller.usage()

    def flush(self) -> None:
        """Returns once all pages acknowledged before are durable."""
        self._check_open()
        self._caller.flush()

    def clear(self) -> None:
        """Deletes every page of every namespace. Needs the capability."""
        self._check_open()
        with self._lock:
            self._recorded.clear()
        self._caller.clear()

    def close(self) -> None:
        """Closes the backend. A second call does nothing."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._caller.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosed(f"store {self.name!r} is closed; open it again with open_store")

    def _prepare(
        self, namespace: Namespace, keys: Sequence[str], pages: Sequence[Any], *, writable: bool
    ) -> tuple[list[str], list[AnyPage]]:
        """Stored keys and checked spans; raises before any byte moves."""
        if len(keys) != len(pages):
            raise PageSizeMismatch(f"{len(keys)} keys but {len(pages)} pages")
        names = [stored_key(namespace.digest, key) for key in keys]
        found = [as_page(page, writable=writable) for page in pages]
        for key, page in zip(keys, found, strict=True):
            if (length := spans_bytes(page)) != namespace.page_bytes:
                raise PageSizeMismatch(
                    f"page {key} has {length} bytes; its namespace has pages of "
                    f"{namespace.page_bytes}"
                )
        return names, found

    def _header(self, page: AnyPage, place: PageSpans, digest: bytes, key: str) -> memoryview:
        """A page's header, the page being copied to its place if it is staged."""
        whole = self._staging.in_a_row(page, gathered(page, place))
        return memoryview(make_header(whole, digest, key))

    def _put_aside(self, name: str, error: CorruptPage, payload: AnyPage, digest: bytes) -> None:
        """Counts and logs a bad page, and deletes it if a second read proves it bad again.

        Where it can't be deleted it counts as missing until it is written or read well.
        """
        with self._lock:
            self.counts.corrupt_pages += 1
            self._bad[name] = None
            while len(self._bad) > BAD_PAGES_REMEMBERED:
                self._bad.popitem(last=False)
        self.failures.note("corrupt", error)
        if "delete" not in self.capabilities:
            return
        header = memoryview(bytearray(HEADER_BYTES))
        again = (memoryview(bytearray(spans_bytes(payload))),)
        try:
            if self._caller.batch_get([name], [(header, *again)], None) == [True]:
                check_page(header, again, digest, error.key)
                self._trust([name], [True])
        except CorruptPage:
            self._trust([name], self._caller.delete([name]))
        except BackendError as unreadable:
            self.failures.note("corrupt", unreadable)

    def _trust(self, names: list[str], good: list[bool]) -> None:
        """Forgets that pages were bad, where they are gone, rewritten or read well since."""
        if self._bad:
            with self._lock:
                for name, answer in zip(names, good, strict=True):
                    if answer:
                        self._bad.pop(name, None)

    def _record(self, namespace: Namespace) -> None:
        """Stores the namespace's readable record once per process."""
        if namespace.digest in self._recorded:
            return
        name = _record_name(namespace.digest)
        payload = as_spans(namespace.record)
        header = make_header(
            payload, bytes.fromhex(namespace.digest), _record_key(namespace.digest)
        )
        if self._caller.batch_set([name], [(memoryview(header), *payload)], None) == [True]:
            with self._lock:
                self._recorded.add(namespace.digest)

    def _read_record(self, digest: str) -> Namespace | None:
        header, payload = bytearray(HEADER_BYTES), bytearray(RECORD_BYTES)
        spans = as_spans((header, payload), writable=True)
        if self._caller.batch_get([_record_name(digest)], [spans], None) != [True]:
            return None
        try:
            check_page(spans[0], spans[1:], bytes.fromhex(digest), _record_key(digest))
            return Namespace.from_record(bytes(payload))
        except (CorruptPage, ConfigError) as error:
            self.failures.note("namespace record", error)
            return None


def _extended(prefix: list[str] | None, names: list[str], part: slice) -> list[str] | None:
    """The prefix of a part of the batch: that of the batch and the keys before."""
    return None if prefix is None else prefix + names[: part.start]


def _names(namespace: Namespace, keys: Sequence[str] | None) -> list[str] | None:
    return None if keys is None else [stored_key(namespace.digest, key) for key in keys]


def _record_key(digest: str) -> str:
    return f"{RECORD_TAG}:{digest}"


def _record_name(digest: str) -> str:
    return stored_key(digest, _record_key(digest))


def _is_record(name: str) -> bool:
    try:
        digest, key = split_stored_key(name)
    except InvalidKey:
        return False
    return key == _record_key(digest)
