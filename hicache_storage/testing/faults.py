"""FaultyBackend: a backend around a backend that fails on purpose, as it is told to.

    faulty = FaultyBackend(MemoryBackend(MemoryConfig()))
    faulty.inject("batch_get", Raise(BackendTimeout("slow", backend="x", operation="get")), times=2)
    faulty.inject("batch_set", Refuse(), keys={stored_key})
    store = Store(faulty)

For tests of what stands above a backend: retries, tiers, caches, engines.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

from ..calling import Caller
from ..errors import ConfigError
from ..hookspecs import OPTIONAL_HOOKS, REQUIRED_HOOKS, StoredPage, Usage, hookimpl
from ..middleware.around import Around
from ..page import PageSpans, spans_bytes


@dataclass(frozen=True)
class Latency:
    """The call takes `seconds` longer. Any hook."""

    seconds: float


@dataclass(frozen=True)
class Raise:
    """The call raises, before anything is done. Any hook."""

    error: BaseException | Callable[[], BaseException]
    """An error, or what makes one: a fresh one for each call."""


@dataclass(frozen=True)
class Refuse:
    """The key is answered False and nothing is done for it. batch_set, batch_get, delete."""


@dataclass(frozen=True)
class Pretend:
    """The key is answered True and nothing is done for it. batch_set, batch_get, delete."""


@dataclass(frozen=True)
class LoseAnswer:
    """The work is done and the key is answered False, as after a lost reply. The same hooks."""


@dataclass(frozen=True)
class Truncate:
    """Only the first `keep_bytes` of the stored page, header included, are written. batch_set."""

    keep_bytes: int


@dataclass(frozen=True)
class FlipBit:
    """One bit at `offset_bytes` of the page, header included, is turned. batch_set: what is
    stored; batch_get: what is delivered."""

    offset_bytes: int
    bit: int = 0


@dataclass(frozen=True)
class HalfFill:
    """Only the first half of the buffers is filled. batch_get.

    The answer is False, as an honest backend gives it after a read that broke off, or True.
    """

    answer: bool = False


@dataclass(frozen=True)
class ShortResult:
    """The answer lacks its last entry. batch_set, batch_get, delete."""


@dataclass(frozen=True)
class NoneResult:
    """The answer is None. Any hook that answers."""


OF_A_CALL = (Latency, Raise, ShortResult, NoneResult)
OF_A_KEY = (Refuse, Pretend, LoseAnswer, Truncate, FlipBit, HalfFill)
Fault = (
    Latency
    | Raise
    | Refuse
    | Pretend
    | LoseAnswer
    | Truncate
    | FlipBit
    | HalfFill
    | ShortResult
    | NoneResult
)
_HOOKS_OF_KEYS = {
    Refuse: ("batch_set", "batch_get", "delete"),
    Pretend: ("batch_set", "batch_get", "delete"),
    LoseAnswer: ("batch_set", "batch_get", "delete"),
    Truncate: ("batch_set",),
    FlipBit: ("batch_set", "batch_get"),
    HalfFill: ("batch_get",),
    ShortResult: ("batch_set", "batch_get", "delete"),
}


@dataclass(eq=False)
class Injection:
    """One fault in force; `remove` ends it."""

    hook: str
    fault: Fault
    skip: int
    times: int | None
    keys: frozenset[str] | None
    every: int
    hits: int = 0
    """Calls, or keys for faults of a key, that it has struck."""
    _seen: int = field(default=0, repr=False)
    removed: bool = False

    def remove(self) -> None:
        self.removed = True

    def strikes(self, key: str | None) -> bool:
        """Whether it strikes this call, or this key of one; counts."""
        if self.removed or (self.keys is not None and key is not None and key not in self.keys):
            return False
        self._seen += 1
        turn = self._seen - self.skip - 1
        if turn < 0 or turn % self.every or (self.times is not None and self.hits >= self.times):
            return False
        self.hits += 1
        return True


class FaultyBackend(Around):
    """Passes calls on to `backend`, and strikes them with the faults that were injected.

    Thread-safe. Without faults it behaves as the backend inside it, with its capabilities.
    """

    def __init__(self, backend: object, *, name: str = "faulty") -> None:
        super().__init__(backend if isinstance(backend, Caller) else Caller(backend, name=name))
        self._injections: list[Injection] = []
        self._lock = threading.Lock()

    spread = Around.whole
    """So that what is struck doesn't depend on the order of threads."""

    def inject(
        self,
        hook: str,
        fault: Fault,
        *,
        skip: int = 0,
        times: int | None = None,
        keys: Collection[str] | None = None,
        every: int = 1,
    ) -> Injection:
        """Puts a fault in force for `hook`.

        It leaves out the first `skip` calls (or keys, for a fault of a key), then strikes every
        `every`-th one, `times` times at most. `keys` limits it to these stored keys; for a fault
        of a whole call, to calls with one of them. Raises ConfigError for a hook that it can't
        strike.
        """
        if hook not in REQUIRED_HOOKS + OPTIONAL_HOOKS:
            raise ConfigError(f"there is no hook {hook!r}")
        allowed = _HOOKS_OF_KEYS.get(type(fault))
        if allowed is not None and hook not in allowed:
            raise ConfigError(f"{type(fault).__name__} strikes {', '.join(allowed)}, not {hook!r}")
        wanted = frozenset(keys) if keys is not None else None
        injection = Injection(hook, fault, skip, times, wanted, every)
        with self._lock:
            self._injections.append(injection)
        return injection

    def heal(self) -> None:
        """Ends all faults."""
        with self._lock:
            self._injections.clear()

    # -- hooks -------------------------------------------------------------------------------

    @hookimpl
    def open(self) -> None:
        self._call("open")
        self.inner.open()

    @hookimpl
    def batch_set(
        self, keys: list[str], pages: list[PageSpans], prefix_keys: list[str] | None
    ) -> list[bool]:
        def work(doing: list[int], faults: list[Fault | None]) -> list[bool]:
            damaged = [_damaged(pages[i], faults[i]) for i in doing]
            return self.inner.batch_set([keys[i] for i in doing], damaged, prefix_keys)

        return self._keyed("batch_set", keys, work)

    @hookimpl
    def batch_get(
        self, keys: list[str], buffers: list[PageSpans], prefix_keys: list[str] | None
    ) -> list[bool]:
        def work(doing: list[int], faults: list[Fault | None]) -> list[bool]:
            # What is to be filled in half is read aside.
            spans = [
                tuple(memoryview(bytearray(len(span))) for span in buffers[i])
                if isinstance(faults[i], HalfFill)
                else buffers[i]
                for i in doing
            ]
            done = self.inner.batch_get([keys[i] for i in doing], spans, prefix_keys)
            for place, i in enumerate(doing):
                fault = faults[i]
                if done[place] and isinstance(fault, FlipBit):
                    _flip(buffers[i], fault)
                elif done[place] and isinstance(fault, HalfFill):
                    _fill_half(buffers[i], spans[place])
                    done[place] = fault.answer
            return done

        return self._keyed("batch_get", keys, work)

    @hookimpl
    def exists(self, keys: list[str], prefix_keys: list[str] | None) -> int:
        ends = self._call("exists", keys)
        count: int = _ended(self.inner.exists(keys, prefix_keys), ends)
        return count

    @hookimpl
    def delete(self, keys: list[str]) -> list[bool]:
        def work(doing: list[int], faults: list[Fault | None]) -> list[bool]:
            return self.inner.delete([keys[i] for i in doing])

        return self._keyed("delete", keys, work)

    @hookimpl
    def scan(self, prefix: str) -> Iterator[StoredPage]:
        self._call("scan")
        return self.inner.scan(prefix)

    @hookimpl
    def usage(self) -> Usage:
        ends = self._call("usage")
        usage: Usage = _ended(self.inner.usage(), ends)
        return usage

    @hookimpl
    def flush(self) -> None:
        self._call("flush")
        self.inner.flush()

    @hookimpl
    def clear(self) -> None:
        self._call("clear")
        self.inner.clear()

    @hookimpl
    def close(self) -> None:
        self._call("close")
        self.inner.close()

    # -- striking ----------------------------------------------------------------------------

    def _call(self, hook: str, keys: list[str] | None = None) -> list[Fault]:
        """Waits and raises as told; gives the faults that change the answer."""
        with self._lock:
            struck: list[Fault] = [
                one.fault
                for one in self._injections
                if one.hook == hook
                and isinstance(one.fault, OF_A_CALL)
                and (one.keys is None or not one.keys.isdisjoint(keys or ()))
                and one.strikes(None)
            ]
        for fault in struck:
            if isinstance(fault, Latency):
                time.sleep(fault.seconds)
        for fault in struck:
            if isinstance(fault, Raise):
                raise fault.error if isinstance(fault.error, BaseException) else fault.error()
        return struck

    def _key(self, hook: str, key: str) -> Fault | None:
        """The first fault in force that strikes this key."""
        for one in self._injections:
            if one.hook == hook and isinstance(one.fault, OF_A_KEY) and one.strikes(key):
                return one.fault
        return None

    def _keyed(
        self,
        hook: str,
        keys: list[str],
        work: Callable[[list[int], list[Fault | None]], list[bool]],
    ) -> list[bool]:
        """A call that answers by key: `work` is done for the places that it is given."""
        ends = self._call(hook, keys)
        with self._lock:
            faults = [self._key(hook, key) for key in keys]
        doing = [i for i, fault in enumerate(faults) if not isinstance(fault, (Refuse, Pretend))]
        answers = [isinstance(fault, Pretend) for fault in faults]
        if doing:
            for i, answer in zip(doing, work(doing, faults), strict=True):
                answers[i] = answer and not isinstance(faults[i], LoseAnswer)
        changed: list[bool] = _ended(answers, ends)
        return changed


def _ended(answer: Any, ends: list[Fault]) -> Any:
    for fault in ends:
        if isinstance(fault, NoneResult):
            return None
        if isinstance(fault, ShortResult):
            answer = answer[:-1]
    return answer


def _damaged(page: PageSpans, fault: Fault | None) -> PageSpans:
    if isinstance(fault, Truncate):
        return (memoryview(b"".join(page)[: fault.keep_bytes]),)
    if isinstance(fault, FlipBit):
        changed = (memoryview(bytearray(b"".join(page))),)
        _flip(changed, fault)
        return changed
    return page


def _flip(spans: PageSpans, fault: FlipBit) -> None:
    offset = fault.offset_bytes % spans_bytes(spans)
    for span in spans:
        if offset < len(span):
            span[offset] ^= 1 << fault.bit
            return
        offset -= len(span)


def _fill_half(buffers: PageSpans, page: PageSpans) -> None:
    left = spans_bytes(buffers) // 2
    for span, source in zip(buffers, page, strict=True):
        part = min(left, len(span))
        span[:part] = source[:part]
        left -= part
