"""StorageLink: one attached storage with its threads."""

from __future__ import annotations

import logging
import time
from queue import SimpleQueue

from ..edge import StorageEdge
from ..errors import ConfigError
from ..pairing import PairedStore
from ..pools.paired import PairedPools
from .policies import PrefetchRule, check_least
from .storage_threads import Operation, StorageThreads

logger = logging.getLogger("hicache_storage")


class StorageLink:
    """Prefetch and backup threads over a PairedStore. Scheduler thread only.

    Neither opens nor closes the store. `live` are the operations that the threads still have:
    nobody else may touch their host pages until they are confirmed.
    """

    def __init__(
        self,
        pairs: PairedStore,
        confirmed: SimpleQueue[Operation],
        rule: PrefetchRule,
        *,
        prefetch_threads: int,
        backup_threads: int,
        backup_limit_pages: int,
        writes: bool,
    ) -> None:
        check_least("prefetch_threads", prefetch_threads, 1)
        check_least("backup_threads", backup_threads, 1)
        check_least("backup_limit_pages", backup_limit_pages, 1)
        self.edge = StorageEdge(pairs)
        self.rule = rule
        self.backup_limit_pages = backup_limit_pages
        self.writes = writes
        """False where another rank writes the very same pages."""
        self.paired = pairs.draft is not None
        self.required = self.paired and pairs.pairing == "required"
        self.live: dict[Operation, StorageThreads] = {}
        failures = self.edge.failures
        self._prefetch = StorageThreads("prefetch", prefetch_threads, confirmed, failures)
        self._backup = StorageThreads("backup", backup_threads, confirmed, failures)

    @property
    def threads(self) -> int:
        """Threads that have not ended."""
        return self._prefetch.alive + self._backup.alive

    def prefetch(self, operation: Operation) -> None:
        """Starts a prefetch, or its next phase."""
        self.live[operation] = self._prefetch
        self._prefetch.submit(operation)

    def back_up(self, operation: Operation) -> None:
        """Starts a backup."""
        self.live[operation] = self._backup
        self._backup.submit(operation)

    def stop(self, operation: Operation) -> None:
        """Ends an operation after the call under way; it is confirmed as usual."""
        operation.stopped = True
        threads = self.live.get(operation)
        if threads is not None:
            threads.stop(operation)

    def close(self, timeout_s: float) -> bool:
        """Stops prefetches, lets backups finish for up to `timeout_s` seconds, stops the rest;
        whether all threads ended. A thread that storage holds up ends when its call returns."""
        deadline_s = time.monotonic() + timeout_s
        for operation, threads in list(self.live.items()):
            if threads is self._prefetch:
                threads.stop(operation)
        self._prefetch.close()
        self._backup.close()
        self._backup.join(deadline_s)
        for operation, threads in list(self.live.items()):
            threads.stop(operation)
        return self._prefetch.join(deadline_s) and self._backup.join(deadline_s)


def check_pages(pools: PairedPools, pairs: PairedStore) -> None:
    """Raises ConfigError unless the pairs are pages of these pools."""
    draft_pool = pools.draft_device
    if pairs.draft is not None and draft_pool is None:
        raise ConfigError(
            "the PairedStore has a draft namespace, but no draft pool is registered: call "
            "PairedPools.register_draft first, or make the PairedStore without a draft"
        )
    halves = [("target", pairs.target, pools.device)]
    if pairs.draft is not None and draft_pool is not None:
        halves.append(("draft", pairs.draft, draft_pool))
    for half, namespace, pool in halves:
        for name in ("page_bytes", "page_size"):
            ours, theirs = getattr(pool.geometry, name), getattr(namespace, name)
            if ours != theirs:
                raise ConfigError(
                    f"the {half} namespace has {name} {theirs}, the pool {ours}; take it from "
                    "PairedPools.namespaces"
                )
    if pairs.draft is None and draft_pool is not None:
        logger.warning(
            "hicache: a draft pool is registered, but storage %r keeps no drafts: pages that "
            "come from it will have none",
            pairs.store.name,
        )
