"""Storages: the attached storage, and those that have been detached but not let go of yet."""

from __future__ import annotations

import logging
from queue import Empty, SimpleQueue

from ..errors import ConfigError, StoreClosed
from ..pairing import PairedStore
from ..pools.paired import PairedPools
from ..pools.ranks import Ranks
from .policies import PrefetchRule
from .storage_link import StorageLink, check_pages
from .storage_threads import Operation

logger = logging.getLogger("hicache_storage")


class Storages:
    """At most one storage is `current`. A detached one stays here while its threads are in a
    call, since that call may still touch host pages. Scheduler thread only."""

    def __init__(self, pools: PairedPools) -> None:
        self.current: StorageLink | None = None
        self.closed = False
        self._pools = pools
        self._links: list[StorageLink] = []
        self._confirmed: SimpleQueue[Operation] = SimpleQueue()
        self._past_errors = 0

    @property
    def live(self) -> list[Operation]:
        """Operations that storage threads have."""
        return [operation for link in self._links for operation in link.live]

    @property
    def threads(self) -> int:
        """Storage threads that have not ended."""
        return sum(link.threads for link in self._links)

    @property
    def errors(self) -> int:
        """Calls that failed as a whole, over all storages."""
        return self._past_errors + sum(link.edge.counts.errors for link in self._links)

    def attach(
        self,
        pairs: PairedStore,
        rule: PrefetchRule,
        *,
        prefetch_threads: int,
        backup_threads: int,
        backup_limit_pages: int,
        ranks: Ranks,
    ) -> None:
        """Makes a storage the current one and starts its threads."""
        if self.closed:
            raise StoreClosed("this HiCache is closed; make a new one")
        if self.current is not None:
            raise ConfigError("a storage is attached already; call detach_storage first")
        check_pages(self._pools, pairs)
        self.current = StorageLink(
            pairs,
            self._confirmed,
            rule,
            prefetch_threads=prefetch_threads,
            backup_threads=backup_threads,
            backup_limit_pages=backup_limit_pages,
            writes=self._pools.writes_target(ranks) or self._pools.writes_draft(ranks),
        )
        self._links.append(self.current)
        logger.info(
            "hicache: storage %r, prefetch %s (%d pages or more, %d at once), drafts %s",
            pairs.store.name,
            rule.text,
            rule.threshold_pages,
            rule.limit_pages,
            pairs.pairing if pairs.draft is not None else "off",
        )

    def detach(self, timeout_s: float) -> StorageLink | None:
        """Ends the current storage's work; see `StorageLink.close`."""
        link, self.current = self.current, None
        if link is not None:
            link.close(timeout_s)
        return link

    def collect(self, timeout_s: float = 0.0) -> list[Operation]:
        """The operations that threads have handed back; waits up to `timeout_s` for one."""
        found: list[Operation] = []
        try:
            if timeout_s > 0:
                found.append(self._confirmed.get(timeout=timeout_s))
            while True:
                found.append(self._confirmed.get_nowait())
        except Empty:
            pass
        for operation in found:
            for link in self._links:
                link.live.pop(operation, None)
        return found

    def let_go(self) -> None:
        """Forgets detached storages whose calls have all returned."""
        for link in [link for link in self._links if link is not self.current and not link.live]:
            self._past_errors += link.edge.counts.errors
            self._links.remove(link)
