"""Keys that the store lists and doesn't deliver, for a short and bounded time."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Sequence

KEEP_S = 30.0
MOST_KEYS = 4096


class Doubts:
    """Keys whose read failed although they may be stored. Thread-safe.

    A lookup takes them for missing for KEEP_S seconds, so that an engine isn't sent to the same
    unreadable page again and again. A page that is written or read in the meantime is trusted
    at once. At most MOST_KEYS are kept, the newest.
    """

    def __init__(self) -> None:
        self._until: OrderedDict[str, float] = OrderedDict()
        self._lock = threading.Lock()

    def add(self, key: str) -> None:
        with self._lock:
            self._until[key] = time.monotonic() + KEEP_S
            self._until.move_to_end(key)
            if len(self._until) > MOST_KEYS:
                self._until.popitem(last=False)

    def clear(self, key: str) -> None:
        if self._until:
            with self._lock:
                self._until.pop(key, None)

    def clear_all(self) -> None:
        with self._lock:
            self._until.clear()

    def run_before(self, keys: Sequence[str]) -> int:
        """How many of `keys` stand before the first doubtful one."""
        if not self._until:
            return len(keys)
        now = time.monotonic()
        with self._lock:
            return next(
                (i for i, key in enumerate(keys) if self._until.get(key, 0.0) > now), len(keys)
            )
