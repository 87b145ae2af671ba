"""FailureLog: counts every failure by kind and logs each kind at most once in a while."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter

from .forking import renew_lock_in_child

logger = logging.getLogger("hicache_storage")


class FailureLog:
    """Counts failures of one component; thread-safe.

    The first failure of a kind is logged at once as a warning, further ones at most every
    `interval_s` seconds together with how many there were, so that a dead store costs a line a
    minute and not one a page.
    """

    def __init__(self, component: str, *, interval_s: float = 60.0) -> None:
        self.component = component
        self.interval_s = interval_s
        self.counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        renew_lock_in_child(self)
        self._logged: dict[str, tuple[float, int]] = {}

    def note(self, kind: str, error: BaseException | str) -> None:
        """Counts a failure of `kind`; `error` is its cause."""
        with self._lock:
            self.counts[kind] += 1
            count = self.counts[kind]
            now = time.monotonic()
            logged_s, logged_count = self._logged.get(kind, (-self.interval_s, 0))
            if now - logged_s < self.interval_s:
                return
            self._logged[kind] = (now, count)
        cause = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
        more = f" ({count - logged_count} since the last such line)" if logged_count else ""
        logger.warning("%s: %s: %s%s", self.component, kind, cause, more)
