"""TransferStats: what SGLang's own metrics show of storage, from --enable-metrics on."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Literal

Way = Literal["prefetch", "backup"]
_KEPT = 1000
"""Transfers between two collections; older ones are dropped."""
_COLLECTOR = "sglang.srt.observability.metrics_collector"


class TransferStats:
    """Pages and GiB/s of each transfer since the last collection. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._transfers: dict[Way, deque[tuple[int, float]]] = {
            "prefetch": deque(maxlen=_KEPT),
            "backup": deque(maxlen=_KEPT),
        }

    def measured(self, way: Way, page_bytes: int, call: Callable[[], list[bool]]) -> list[bool]:
        """Makes the call, and counts the pages that it moved."""
        started = time.perf_counter()
        done = call()
        seconds = time.perf_counter() - started
        if (pages := sum(done)) and seconds > 0:
            with self._lock:
                self._transfers[way].append((pages, pages * page_bytes / 2**30 / seconds))
        return done

    def collect(self) -> Any:
        """SGLang's object of these figures, emptied; None where SGLang has no such class."""
        cls = getattr(sys.modules.get(_COLLECTOR), "StorageMetrics", None)
        if cls is None:
            return None
        with self._lock:
            found = {way: list(transfers) for way, transfers in self._transfers.items()}
            for kept in self._transfers.values():
                kept.clear()
        metrics = cls()
        for way, transfers in found.items():
            getattr(metrics, f"{way}_pgs").extend(pages for pages, _ in transfers)
            getattr(metrics, f"{way}_bandwidth").extend(speed for _, speed in transfers)
        return metrics
