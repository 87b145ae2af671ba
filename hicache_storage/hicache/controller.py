"""HiCache: device, host and storage as one prefix cache, target and draft in pairs."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch import Tensor

from ..errors import PageSizeMismatch
from ..pairing import PairedStore
from ..pools.paired import PairedPools
from ..pools.ranks import Ranks
from .agreement import Agreement, Least
from .backup import BackupOperation, BackupQueue
from .lease import Lease
from .leasing import Leasing
from .levels import Levels, as_indices
from .policies import PrefetchPolicy, PrefetchRule, WritePolicy, WriteRule
from .prefetch import PrefetchOperation
from .prefetch_table import PrefetchTable
from .radix_tree import PageNode, RadixTree
from .stats import HiCacheStats, Warnings
from .storages import Storages

logger = logging.getLogger("hicache_storage")


class HiCache:
    """The cache hierarchy over a `PairedPools`.

    One thread, the engine's scheduler, makes all calls; none of them waits for storage except
    `wait_idle`, `detach_storage` and `close`, which are bounded. Storage never makes a call fail:
    what it can't deliver is a miss, seen in `stats`.

    With `group` (one rank each: a gloo group, or an `agreement.Least`) every rank must make the
    same `prefetch`, `prefetch_ready`, `acquire`, `allocate` and `cancel_prefetch` calls in the same
    order. Then all of them give the same answers: those of the rank that has least.
    """

    def __init__(
        self,
        pools: PairedPools,
        *,
        write_policy: WritePolicy = "write_through",
        write_threshold: int = 2,
        prefetch_policy: PrefetchPolicy = "wait_complete",
        group: dist.ProcessGroup | Least | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.pools = pools
        self._rule = WriteRule(write_policy, write_threshold)
        self._prefetch_policy = PrefetchRule(prefetch_policy).policy
        self._stats = HiCacheStats()
        self._warnings = Warnings()
        self._ranks = Agreement(group)
        self._tree = RadixTree()
        self._levels = Levels(
            pools, self._tree, self._stats, write_back=write_policy == "write_back"
        )
        self._storages = Storages(pools)
        self._backups = BackupQueue(self._levels, self._tree, self._stats)
        self._prefetches = PrefetchTable(self._levels, self._tree, self._stats, self._ranks, clock)
        self._leasing = Leasing(self._levels, self._tree, self._stats, self._ranks)
        logger.info(
            "hicache: %d device pages, %d host pages of %d tokens (%s), draft %s, %s",
            pools.device.num_pages,
            pools.host.num_pages,
            pools.page_size,
            pools.host.layout,
            "off" if pools.draft_host is None else "paired",
            write_policy,
        )

    def attach_storage(
        self,
        pairs: PairedStore,
        *,
        prefetch_policy: PrefetchPolicy | None = None,
        prefetch_timeout_base_s: float = 1.0,
        prefetch_timeout_per_page_s: float = 0.004,
        prefetch_threshold_pages: int = 1,
        prefetch_limit_pages: int | None = None,
        backup_limit_pages: int | None = None,
        prefetch_threads: int = 2,
        backup_threads: int = 1,
        ranks: Ranks | None = None,
    ) -> None:
        """Adds storage below the host, at any time; `policies.PrefetchRule` has the options.

        `prefetch_limit_pages` and `backup_limit_pages` are the most host pages that prefetches
        and unwritten backups may hold, each half of the host pool unless given. `ranks` is this
        process's place: pages that another rank has too are written by one of them. The store
        stays the caller's to close, after `detach_storage`. Pages that are in memory already are
        written when they are next hit. Raises ConfigError if a storage is attached, or if its
        pages aren't those of the pools; StoreClosed after `close`.
        """
        half = max(1, self.pools.host.num_pages // 2)
        rule = PrefetchRule(
            prefetch_policy or self._prefetch_policy,
            prefetch_timeout_base_s,
            prefetch_timeout_per_page_s,
            prefetch_threshold_pages,
            half if prefetch_limit_pages is None else prefetch_limit_pages,
        )
        self._storages.attach(
            pairs,
            rule,
            prefetch_threads=prefetch_threads,
            backup_threads=backup_threads,
            backup_limit_pages=half if backup_limit_pages is None else backup_limit_pages,
            ranks=ranks or Ranks(),
        )
        for node in self._tree:
            node.stored = node.draft_stored = False

    def detach_storage(self, timeout_s: float = 10.0) -> int:
        """Takes storage away, also with operations under way: ends prefetches, waits up to
        `timeout_s` seconds for writes. Returns how many pages were not written.

        Host pages in a call that has not returned come back when it does. Does nothing if no
        storage is attached.
        """
        before = self._stats.abandoned_pages
        link = self._storages.detach(timeout_s)
        self._poll()
        if link is None:
            return 0
        abandoned = self._stats.abandoned_pages - before
        abandoned += sum(len(op.nodes) for op in link.live if isinstance(op, BackupOperation))
        if abandoned or link.live:
            logger.warning(
                "hicache: storage %r detached with %d pages not written and %d operations in calls "
                "that have not returned",
                link.edge.pairs.store.name,
                abandoned,
                len(link.live),
            )
        return abandoned

    def close(self, timeout_s: float = 10.0) -> int:
        """Gives up all prefetches and detaches storage for good; see `detach_storage`. The
        memory levels go on. A second call only collects what has come back since."""
        self._storages.closed = True
        self._prefetches.cancel_all()
        return self.detach_storage(timeout_s)

    def prefetch(self, request_id: str, hashes: Sequence[str]) -> bool:
        """Starts to fetch the pages of `hashes` that are not in memory. Whether it was started
        (on any rank); follow it with `acquire` or `cancel_prefetch`.

        False if there is nothing to fetch, if it is below the threshold or the limit is reached,
        and for a request that has a prefetch already.
        """
        self._poll()
        resident = self._leasing.usable(hashes, self._required)
        return self._prefetches.start(request_id, hashes, resident, self._storages.current)

    def prefetch_ready(self, request_id: str) -> bool:
        """Whether the policy lets the request start now; True if nothing is fetched for it."""
        self._poll()
        return self._prefetches.ready(request_id)

    def cancel_prefetch(self, request_id: str) -> None:
        """Gives up the request's prefetch, if any; for a request that will not `acquire`."""
        self._poll()
        self._prefetches.cancel(request_id)

    def acquire(self, request_id: str, hashes: Sequence[str]) -> Lease:
        """The longest prefix of `hashes` that can be had, on the device and locked there.

        Ends the request's prefetch and uses what has arrived. Pages on the host are copied to
        newly allocated device pages; where too few can be had, the lease is shorter. Its last
        page is there to be used or not: an engine that needs to compute the last token itself
        asks for fewer pages.
        """
        self._poll()
        resident = len(self._leasing.usable(hashes, self._required))
        fetched = self._prefetches.publish(request_id, resident, self._storages.current)
        lease = self._leasing.acquire(request_id, hashes, fetched, self._required)
        for node in lease.nodes:
            node.hits += 1
        self._write(lease.nodes)
        return lease

    def allocate(self, num_pages: int) -> Tensor | None:
        """`num_pages` free device pages, int64 (n,) on the CPU, or None if so many can't be had.

        Evicts the least recently used pages that nobody holds. The caller owns them until it
        gives them to `insert` or `free`.
        """
        self._poll()
        pages: list[int] = []
        try:
            pages = self._levels.take_device(num_pages)
            self._submit([])
        finally:
            # Also after an error, as the other ranks wait in it.
            agreed = self._ranks.least(int(len(pages) == num_pages)) == 1
        if agreed:
            return as_indices(pages)
        self._levels.free_device(pages)
        return None

    def free(self, device_indices: Tensor) -> None:
        """Takes back allocated pages that were never inserted. Raises PageSizeMismatch, and
        takes none, for a page that the tree owns or that is free."""
        pages = [int(page) for page in device_indices.tolist()]
        for page in pages:
            if self._tree.owns_device(page):
                raise PageSizeMismatch(
                    f"device page {page} belongs to the cache since it was inserted; release the "
                    "lease instead of freeing it"
                )
        self._levels.free_device(pages)

    def insert(self, lease: Lease, hashes: Sequence[str], device_indices: Tensor) -> None:
        """Hands the request's whole pages over to the cache, all of them from the first on.

        `device_indices` are the lease's own pages and then allocated ones, one for each hash;
        every page's KV, draft included, must have been computed. Afterwards the lease holds the
        tree's pages for all of `hashes`: a page that the tree had already is freed, so use
        `lease.device_indices` from here on. A computed page replaces one whose draft was lost
        unless another request reads that one. Backups start as the write policy says.

        Raises InvalidKey or PageSizeMismatch, and changes nothing, if hashes are not chained or
        don't begin as the lease does, or pages and hashes don't fit together.
        """
        self._poll()
        self._leasing.insert(lease, hashes, device_indices)
        self._write(lease.nodes)

    def release(self, lease: Lease) -> None:
        """Lets the lease's pages be evicted. A second call does nothing."""
        self._poll()
        self._leasing.release(lease)

    def clear(self) -> None:
        """Forgets every page in memory that no lease and no operation holds."""
        self._poll()
        self._levels.clear()

    def wait_idle(self, timeout_s: float) -> bool:
        """Waits until storage threads have nothing to do; False if that takes longer."""
        deadline_s = time.monotonic() + timeout_s
        self._poll()
        while self._storages.live:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                return False
            self._poll(left_s)
        return True

    def stats(self) -> HiCacheStats:
        """A copy of all counts."""
        self._poll()
        live, current = self._storages.live, self._storages.current
        return dataclasses.replace(
            self._stats,
            device_pages=sum(node.device is not None for node in self._tree),
            host_pages=sum(node.host is not None for node in self._tree),
            free_device_pages=self.pools.device_allocator.available,
            free_host_pages=self.pools.host_allocator.available,
            prefetch_queue=sum(isinstance(each, PrefetchOperation) for each in live),
            prefetch_held_pages=self._prefetches.held_pages,
            backup_queue=sum(isinstance(each, BackupOperation) for each in live),
            backup_held_pages=self._backups.held_pages,
            storage_errors=self._storages.errors,
            storage_healthy=current is None or current.edge.healthy,
        )

    @property
    def _required(self) -> bool:
        current = self._storages.current
        return current is not None and current.required

    def _poll(self, timeout_s: float = 0.0) -> None:
        """Takes up what storage threads have handed back."""
        for operation in self._storages.collect(timeout_s):
            if isinstance(operation, BackupOperation):
                self._backups.settle(operation, self._storages.current)
            elif isinstance(operation, PrefetchOperation):
                self._prefetches.confirmed(operation)
        self._storages.let_go()
        self._warnings.look(self._stats)

    def _write(self, nodes: Sequence[PageNode]) -> None:
        """Backs up a path that was inserted or hit, as far as the policy wants it. Whatever has
        reached the host goes on to storage."""
        self._levels.back_up([node for node in nodes if self._rule.writes(node.hits)])
        self._submit(nodes)

    def _submit(self, nodes: Sequence[PageNode]) -> None:
        fresh = self._levels.take_fresh()
        current = self._storages.current
        if current is not None:
            self._backups.submit(current, list(dict.fromkeys([*nodes, *fresh])))
