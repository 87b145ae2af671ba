"""CallMetrics: a pluggy wrapper that counts and times every call of a backend.

`open_store(url, wrappers=[metrics := CallMetrics()])`, then `metrics.snapshot()`, or
`prometheus_client.REGISTRY.register(StoreCollector(store, metrics))` for a scrape endpoint.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..forking import renew_lock_in_child
from ..hookspecs import hookimpl
from ..page import PageSpans, spans_bytes
from ..store import Store

if TYPE_CHECKING:
    from prometheus_client.core import CounterMetricFamily

Wrapper = Generator[None, Any, Any]


@dataclass
class CallCounts:
    """One hook's calls since the wrapper was made."""

    calls: int = 0
    errors: int = 0
    """Calls that raised."""
    keys: int = 0
    pages: int = 0
    """Keys answered with True; for `exists`, the leading run."""
    transferred_bytes: int = 0
    """Bytes of the pages answered with True, headers included."""
    seconds: float = 0.0
    slowest_s: float = 0.0


class CallMetrics:
    """Counts and times the hooks that move or look up pages. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        renew_lock_in_child(self)
        self._counts: dict[str, CallCounts] = {}

    def snapshot(self) -> dict[str, CallCounts]:
        """A copy of the counts, by hook; hooks that were never called are absent."""
        with self._lock:
            return {hook: dataclasses.replace(counts) for hook, counts in self._counts.items()}

    @hookimpl(wrapper=True)
    def batch_set(self, keys: list[str], pages: list[PageSpans]) -> Wrapper:
        return (yield from self._measured("batch_set", keys, pages))

    @hookimpl(wrapper=True)
    def batch_get(self, keys: list[str], buffers: list[PageSpans]) -> Wrapper:
        return (yield from self._measured("batch_get", keys, buffers))

    @hookimpl(wrapper=True)
    def exists(self, keys: list[str]) -> Wrapper:
        return (yield from self._measured("exists", keys, None))

    @hookimpl(wrapper=True)
    def delete(self, keys: list[str]) -> Wrapper:
        return (yield from self._measured("delete", keys, None))

    def _measured(self, hook: str, keys: list[str], pages: list[PageSpans] | None) -> Wrapper:
        started = time.perf_counter()
        try:
            result = yield
        except BaseException:
            self._add(hook, CallCounts(1, 1, len(keys)), started)
            raise
        counts = CallCounts(1, 0, len(keys))
        if isinstance(result, int):
            counts.pages = result
        elif isinstance(result, list):
            counts.pages = sum(answer is True for answer in result)
            if pages is not None:
                answered = zip(result, pages, strict=False)
                counts.transferred_bytes = sum(spans_bytes(p) for ok, p in answered if ok is True)
        self._add(hook, counts, started)
        return result

    def _add(self, hook: str, new: CallCounts, started: float) -> None:
        seconds = time.perf_counter() - started
        with self._lock:
            total = self._counts.setdefault(hook, CallCounts())
            total.calls += new.calls
            total.errors += new.errors
            total.keys += new.keys
            total.pages += new.pages
            total.transferred_bytes += new.transferred_bytes
            total.seconds += seconds
            total.slowest_s = max(total.slowest_s, seconds)


class StoreCollector:
    """A prometheus_client collector of one store: its calls, its pages, its failures.

    Needs the extra `metrics`. Counter names start with `hicache_storage_`.
    """

    def __init__(self, store: Store, metrics: CallMetrics) -> None:
        self.store = store
        self.metrics = metrics

    def collect(self) -> Iterator[CounterMetricFamily]:
        """The counters as they are now."""
        from prometheus_client.core import CounterMetricFamily

        calls = self.metrics.snapshot()
        for field in dataclasses.fields(CallCounts):
            if field.name == "slowest_s":
                continue
            family = CounterMetricFamily(
                f"hicache_storage_call_{field.name}",
                f"{field.name} by hook",
                labels=["store", "hook"],
            )
            for hook, counts in calls.items():
                family.add_metric([self.store.name, hook], getattr(counts, field.name))
            yield family
        pages = CounterMetricFamily(
            "hicache_storage_pages", "pages by what became of them", labels=["store", "outcome"]
        )
        for name, value in dataclasses.asdict(self.store.counts).items():
            pages.add_metric([self.store.name, name.removesuffix("_pages")], value)
        yield pages
        failures = CounterMetricFamily(
            "hicache_storage_failures", "failures by kind", labels=["store", "kind"]
        )
        for kind, value in dict(self.store.failures.counts).items():
            failures.add_metric([self.store.name, kind], value)
        yield failures
