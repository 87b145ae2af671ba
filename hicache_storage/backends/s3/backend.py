"""s3://: pages as objects of an S3-compatible store."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from ...errors import BackendError, BackendTimeout, BackendUnavailable, ConfigError
from ...failures import FailureLog
from ...hookspecs import StoredPage, Usage, hookimpl
from ...page import PageSpans
from ...parts import PartOf
from ..lending import THREADS, Lending, cut
from .answers import Meaning
from .call import FORBIDDEN_S, Batch, Call, Result
from .config import S3Config
from .live import Live, LiveHere
from .messages import Request
from .names import Names
from .plane import Plane, S3Counts
from .writing import write_pages

_BULK = 1000
_PROBE = ".probe"
BY_THREADS_BYTES = 1 << 20
"""Page size from which on a batch is read by THREADS: then a thread is kept busy by what the
sockets hold for it, not by waiting."""


class S3Backend:
    """One object a page, named `<prefix>/<hh>/<namespace digest>/<page key>`.

    Thread-safe; a child process made by fork gets connections of its own on its first call.
    """

    Config = S3Config
    scope = "shared"

    def __init__(self, config: S3Config) -> None:
        self.config = config
        self.counts = S3Counts()
        self.failures = FailureLog(f"s3 bucket {config.bucket!r}")
        self._names = Names(config.prefix)
        self._here = LiveHere(self._connect)
        self._lending = Lending("hicache-s3", THREADS, self.failures)
        self._part_of = PartOf[Batch]()

    def __repr__(self) -> str:
        return f"S3Backend(bucket={self.config.bucket!r}, prefix={self.config.prefix!r})"

    @hookimpl
    def open(self) -> None:
        live = self._here.now()
        try:
            if self.config.create_bucket:
                live.control.create_bucket(live.plane.endpoint.region)
            self._probe(live)
        except BackendError as error:
            self._here.close()
            if error.retryable:
                raise
            raise ConfigError(f"can't open {self!r}: {error}") from error

    @hookimpl
    def batch_get(self, keys: list[str], buffers: list[PageSpans]) -> list[bool]:
        live = self._here.now()
        requests = [
            Request("GET", self._path(live, key), into=spans)
            for key, spans in zip(keys, buffers, strict=True)
        ]
        try:
            results = self._run(live, requests, "batch_get")
        except BackendTimeout:
            for key in keys:
                live.doubts.add(key)
            raise
        batch = self._part_of.batch
        if batch is not None and batch.failure is not None and not batch.answered:
            batch.unread.append((keys, results))
            return [False] * len(keys)
        return [self._arrived(live, key, result) for key, result in zip(keys, results, strict=True)]

    @hookimpl
    def batch_set(self, keys: list[str], pages: list[PageSpans]) -> list[bool]:
        live = self._here.now()
        last = {key: i for i, key in enumerate(keys)}
        paths = [self._path(live, key) for key in last]
        chosen = [pages[i] for i in last.values()]
        results = write_pages(live.plane, paths, chosen, self._until_s())
        stored = {}
        for key, result in zip(last, results, strict=True):
            stored[key] = self._succeeded(live, result, "write")
            if stored[key]:
                live.doubts.clear(key)
        return [stored[key] for key in keys]

    def spread(self, hook: str, page_bytes: int, count: int, work: Callable[[slice], None]) -> None:
        """For Store: large pages are read, and their checksums made, by several threads, a part of
        the batch each."""
        if hook == "batch_set" or page_bytes < BY_THREADS_BYTES:
            work(slice(0, count))
            return
        batch = Batch(self._until_s(), in_parts=True)

        def read(part: slice) -> None:
            try:
                work(part)
            except BaseException:
                batch.given_up = True
                raise

        step = max(-(-count // THREADS), 1)
        part = self._part_of.of(batch, read)
        self._lending.serve(cut(count, step), count, part, min(THREADS, count))
        if batch.unread:
            self._settle(batch)

    @hookimpl
    def exists(self, keys: list[str]) -> int:
        live = self._here.now()
        asked = keys[: live.doubts.run_before(keys)]
        if not asked:
            return 0
        requests = [Request("HEAD", self._path(live, key)) for key in asked]
        results = self._run(live, requests, "exists", leading=True)
        found = [self._succeeded(live, result, "lookup") for result in results]
        return found.index(False) if False in found else len(found)

    @hookimpl
    def delete(self, keys: list[str]) -> list[bool]:
        live = self._here.now()
        requests = [Request("DELETE", self._path(live, key)) for key in keys]
        results = self._run(live, requests, "delete")
        return [self._succeeded(live, result, "delete") for result in results]

    @hookimpl
    def scan(self, prefix: str) -> Iterator[StoredPage]:
        for listed in self._here.now().control.listing(self._names.root):
            key = self._names.stored_key(listed.name)
            if key is not None and key.startswith(prefix):
                yield StoredPage(key, listed.stored_bytes, listed.written_s)

    @hookimpl
    def usage(self) -> Usage:
        pages = stored_bytes = 0
        for page in self.scan(""):
            pages += 1
            stored_bytes += page.stored_bytes
        return Usage(pages, stored_bytes)

    @hookimpl
    def flush(self) -> None:
        """Nothing to do: S3 acknowledges a write once it is durable."""

    @hookimpl
    def clear(self) -> None:
        live = self._here.now()
        batch: list[str] = []
        for page in self.scan(""):
            batch.append(page.key)
            if len(batch) == _BULK:
                self._delete_all(live, batch)
                batch = []
        if batch:
            self._delete_all(live, batch)
        live.doubts.clear_all()

    @hookimpl
    def close(self) -> None:
        self._here.close()  # breaks off what the threads are at
        self._lending.close()

    def _connect(self) -> Live:
        try:
            from .control import Control
            from .session import open_session
        except ModuleNotFoundError as error:
            if error.name not in ("boto3", "botocore"):
                raise  # boto3 is there, and broken inside
            raise ConfigError(
                "backend 's3' needs boto3: pip install 'hicache-storage[s3]'"
            ) from error
        session = open_session(self.config)
        plane = Plane(self.config, session, self.counts, self.failures)
        control = Control(
            session.client,
            self.config.bucket,
            self.failures,
            lambda verb: plane.count({}, {verb: 1}),
        )
        return Live(plane, control)

    def _settle(self, batch: Batch) -> None:
        """What became of parts that had no answer while none had: misses if another part had one
        since, else the batch's failure."""
        if batch.failure is not None and not batch.answered:
            raise batch.failure
        live = self._here.now()
        for keys, results in batch.unread:
            for key, result in zip(keys, results, strict=True):
                self._arrived(live, key, result)

    def _path(self, live: Live, key: str) -> str:
        return live.plane.endpoint.path + self._names.quoted(key)

    def _until_s(self) -> float:
        return time.monotonic() + self.config.deadline_s

    def _run(
        self, live: Live, requests: Sequence[Request], operation: str, *, leading: bool = False
    ) -> list[Result]:
        batch = self._part_of.batch or Batch(self._until_s())
        return Call(live.plane, requests, operation, batch, leading=leading).run()

    def _arrived(self, live: Live, key: str, result: Result) -> bool:
        """Whether a read filled its spans; remembers a key that can't be read."""
        if self._succeeded(live, result, "read"):
            live.doubts.clear(key)
            return True
        if isinstance(result, BackendError) or result.meaning in (Meaning.WRONG, Meaning.AGAIN):
            live.doubts.add(key)
        return False

    def _succeeded(self, live: Live, result: Result, operation: str) -> bool:
        """Whether the result is a success; notes why not, unless it is a plain miss."""
        if isinstance(result, BackendError):
            self.failures.note(f"{operation} failed", result)
            return False
        meaning = result.meaning
        if meaning in (Meaning.DONE, Meaning.STORED):
            return True
        if meaning is Meaning.MISSING:
            return operation == "delete"
        if meaning is Meaning.FORBIDDEN:
            live.plane.forbidden_until_s = time.monotonic() + FORBIDDEN_S
            self.failures.note(
                "403 taken for a miss",
                f"{result.reason}; allow s3:ListBucket, so that the store says 404 of what is "
                "missing, and s3:GetObject, without which everything is a miss",
            )
        else:
            self.failures.note(f"{operation} {meaning.value}", result.reason)
        return False

    def _delete_all(self, live: Live, keys: list[str]) -> None:
        """Deletes at most 1000 pages; raises BackendError if one is left."""
        names = {self._names.object_name(key): key for key in keys}
        left = [names[name] for name in live.control.delete(list(names))]
        if left and not all(self.delete(left)):
            raise BackendError(
                f"could not delete all pages, such as {left[0]!r}", backend="s3", operation="clear"
            )

    def _probe(self, live: Live) -> None:
        """Asks for an object that isn't there: what the store says of it shows whether bucket,
        region, credentials and rights are as they should be."""
        path = live.plane.endpoint.path + self._names.quoted_root + _PROBE
        for result in self._run(live, [Request("GET", path)], "open"):
            if isinstance(result, BackendError):
                raise result
            if result.meaning is Meaning.SLOWER:
                raise BackendUnavailable(result.reason, backend="s3", operation="open")
            if result.meaning is Meaning.FORBIDDEN:
                self._succeeded(live, result, "open")
