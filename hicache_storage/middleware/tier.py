"""tier://: a fast, small store over a slow, large one, for example LMDB over S3.

Reads ask the upper tier first and the lower one for what it lacks; pages found below are promoted.
Each tier may fail without taking the other down. A page that is bad in the upper tier is read from
the lower one, so what the upper tier serves is verified here as well as in Store.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from ..backends.lending import THREADS, Lending, cut
from ..calling import Caller
from ..config import option
from ..errors import BackendError, CorruptPage
from ..failures import FailureLog
from ..hookspecs import OPTIONAL_HOOKS, Scope, StoredPage, Usage, hookimpl
from ..keys import split_stored_key
from ..opening import build_from
from ..page import PageSpans, check_page
from ..parts import PartOf
from .copying import CopyQueue

T = TypeVar("T")


@dataclass(frozen=True)
class TierConfig:
    """Options of tier://."""

    upper: Any = option(doc="The fast store: a URL (percent-encoded inside a URL) or a mapping.")
    lower: Any = option(doc="The large store: likewise.")
    write: Literal["through", "back"] = option(
        "through",
        doc="through: a page is acknowledged once the lower tier has it. back: once the upper "
        "tier has it; the lower one gets it soon after, and `flush` waits for that.",
    )
    queue: int = option(
        256 << 20,
        unit="bytes",
        doc="Most bytes waiting to be copied between the tiers. Writes beyond it go through, "
        "promotions beyond it are left out.",
    )
    drain_s: float = option(30.0, unit="s", doc="How long closing waits for the queue.")


class _Batch:
    """What parts of a batch have in common. Only ever changes one way, so that it needs no lock."""

    __slots__ = ("failure", "found")

    def __init__(self) -> None:
        self.found = False
        """Whether either tier had one of its pages."""
        self.failure: BackendError | None = None
        """Why the lower tier wasn't read in one of its parts."""


BY_THREADS_BYTES = 1 << 20
"""Page size from which on a batch is read by THREADS."""


class TierBackend:
    """Two backends as one. Its capabilities are those that both tiers have."""

    Config = TierConfig

    def __init__(self, config: TierConfig) -> None:
        self.config = config
        self.upper, self.lower = (
            Caller(backend, name=f"{tier} tier {name}")
            for tier, (backend, name) in (
                ("upper", build_from(config.upper)),
                ("lower", build_from(config.lower)),
            )
        )
        self.scope: Scope = "process" if self.lower.scope == "process" else "exclusive"
        if self.upper.scope == self.lower.scope == "shared":
            self.scope = "shared"
        both = self.upper.capabilities & self.lower.capabilities
        for hook in set(OPTIONAL_HOOKS) - both - {"open", "flush", "close"}:
            setattr(self, hook, None)  # hides the hook from pluggy
        self.failures = FailureLog("tier")
        self.promotions = CopyQueue("promotion", config.queue, self._promote)
        self.write_back = CopyQueue("write-back", config.queue, self._write_lower)
        self._lending = Lending("hicache-tier", THREADS, self.failures)
        self._part_of = PartOf[_Batch]()

    @hookimpl
    def open(self) -> None:
        """Opens both. One tier that can't open is an error: a store that lacks one from the
        start is misconfigured."""
        self.upper.open()
        try:
            self.lower.open()
        except BaseException:
            self.upper.close()
            raise

    @hookimpl
    def batch_set(
        self, keys: list[str], pages: list[PageSpans], prefix_keys: list[str] | None
    ) -> list[bool]:
        self.promotions.drop(keys)  # else an older page would come up over the new one
        above = self._tolerant(
            "upper write",
            lambda: self.upper.batch_set(keys, pages, prefix_keys),
            [False] * len(keys),
        )
        if self.config.write == "through":
            return self.lower.batch_set(keys, pages, prefix_keys)
        stored = [
            done and self.write_back.put(key, page)
            for key, page, done in zip(keys, pages, above, strict=True)
        ]
        rest = [i for i, done in enumerate(stored) if not done]
        if rest:
            below = self.lower.batch_set(
                [keys[i] for i in rest], [pages[i] for i in rest], prefix_keys
            )
            for i, done in zip(rest, below, strict=True):
                stored[i] = done
        return stored

    @hookimpl
    def batch_get(
        self, keys: list[str], buffers: list[PageSpans], prefix_keys: list[str] | None
    ) -> list[bool]:
        if self._part_of.batch is not None:
            return self._read(self._part_of.batch, keys, buffers, prefix_keys)
        batch = _Batch()
        hits = self._read(batch, keys, buffers, prefix_keys)
        self._settle(batch)
        return hits

    def spread(self, hook: str, page_bytes: int, count: int, work: Callable[[slice], None]) -> None:
        """For Store: large pages are read, copied and checked by several threads. Each part is a
        call to the tiers, so that what is round them sees whether it failed."""
        if hook == "batch_set" or page_bytes < BY_THREADS_BYTES:
            work(slice(0, count))
            return
        batch = _Batch()
        part = self._part_of.of(batch, work)
        step = max(-(-count // THREADS), 1)
        self._lending.serve(cut(count, step), count, part, min(THREADS, count))
        self._settle(batch)

    def _read(
        self,
        batch: _Batch,
        keys: list[str],
        buffers: list[PageSpans],
        prefix_keys: list[str] | None,
    ) -> list[bool]:
        hits = self._tolerant(
            "upper read",
            lambda: self.upper.batch_get(keys, buffers, prefix_keys),
            [False] * len(keys),
        )
        hits = [
            (hit and self._intact(key, spans)) or self.write_back.read(key, spans)
            for key, spans, hit in zip(keys, buffers, hits, strict=True)
        ]
        rest = [i for i, hit in enumerate(hits) if not hit]
        if rest:
            try:
                below = self.lower.batch_get(
                    [keys[i] for i in rest], [buffers[i] for i in rest], prefix_keys
                )
            except BackendError as error:
                batch.failure = error.with_traceback(None)  # it leads to the buffers
                below = [False] * len(rest)
            for i, hit in zip(rest, below, strict=True):
                if hit:
                    hits[i] = True
                    self.promotions.put(keys[i], buffers[i])
        if any(hits):
            batch.found = True
        return hits

    def _settle(self, batch: _Batch) -> None:
        """The lower tier's failure is the batch's only if neither tier had a page of it."""
        if batch.failure is None:
            return
        if not batch.found:
            raise batch.failure
        self.failures.note("lower read", batch.failure)

    @hookimpl
    def exists(self, keys: list[str], prefix_keys: list[str] | None) -> int:
        run, errors = 0, 0
        idle = 0  # lookups in a row that found nothing more
        for caller in itertools.cycle((self.upper, self.lower)):
            if run == len(keys) or idle == 2:
                return run
            prefix = None if prefix_keys is None else [*prefix_keys, *keys[:run]]
            try:
                found = caller.exists(keys[run:], prefix)
            except BackendError as error:
                errors += 1
                if errors == 2 and run == 0:
                    raise
                self.failures.note(f"{caller.name} lookup", error)
                found = 0
            run += found
            idle = 0 if found else idle + 1
        raise AssertionError("unreachable")

    @hookimpl
    def delete(self, keys: list[str]) -> list[bool]:
        self.write_back.drop(keys)
        self.promotions.drop(keys)
        above = self.upper.delete(keys)
        below = self.lower.delete(keys)
        return [a and b for a, b in zip(above, below, strict=True)]

    @hookimpl
    def scan(self, prefix: str) -> Iterator[StoredPage]:
        seen = set()
        for page in self.upper.scan(prefix):
            seen.add(page.key)
            yield page
        yield from (page for page in self.lower.scan(prefix) if page.key not in seen)

    @hookimpl
    def usage(self) -> Usage:
        """The lower tier's: it holds everything that was acknowledged and copied down."""
        return self.lower.usage()

    @hookimpl
    def clear(self) -> None:
        self.write_back.drop()
        self.promotions.drop()
        self.upper.clear()
        self.lower.clear()

    @hookimpl
    def flush(self) -> None:
        """Returns once the lower tier has, durably, every page acknowledged before."""
        lost = self.write_back.drain(None)
        if lost:
            raise BackendError(
                f"{lost} pages could not be copied to the lower tier; they are in the upper one",
                backend="tier",
                operation="flush",
            )
        self.lower.flush()

    @hookimpl
    def close(self) -> None:
        lost = self.write_back.drain(self.config.drain_s)
        if lost:
            self.failures.note("close", f"{lost} pages were not copied to the lower tier")
        self.write_back.stop()
        self.promotions.stop()
        self._lending.close()
        self.upper.close()
        self.lower.close()

    def _promote(self, keys: list[str], pages: list[PageSpans]) -> list[bool]:
        return self.upper.batch_set(keys, pages, None)

    def _write_lower(self, keys: list[str], pages: list[PageSpans]) -> list[bool]:
        return self.lower.batch_set(keys, pages, None)

    def _intact(self, key: str, spans: PageSpans) -> bool:
        digest, page_key = split_stored_key(key)
        try:
            check_page(spans[0], spans[1:], bytes.fromhex(digest), page_key)
        except CorruptPage as error:
            self.failures.note("upper tier corrupt", error)
            if "delete" in self.upper.capabilities:
                self._tolerant("upper delete", lambda: self.upper.delete([key]), [False])
            return False
        return True

    def _tolerant(self, what: str, call: Callable[[], T], otherwise: T) -> T:
        try:
            return call()
        except BackendError as error:
            self.failures.note(what, error)
            return otherwise
