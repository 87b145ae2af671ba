"""Backup: host pages into storage."""

from __future__ import annotations

from collections.abc import Sequence

from ..pairing import PairResult
from .levels import Levels, as_indices
from .radix_tree import PageNode, RadixTree
from .stats import HiCacheStats
from .storage_link import StorageLink
from .storage_threads import BATCH_PAGES


class BackupOperation:
    """Writes pages in batches, each page's result apart; one that fails stops no other.

    A page whose draft is lost is written without one: the zeroed stand-in never is. The nodes
    are for the scheduler thread; a worker looks at the copies made here, which the host locks
    keep true.
    """

    def __init__(self, link: StorageLink, levels: Levels, nodes: Sequence[PageNode]) -> None:
        self.link = link
        self.nodes = list(nodes)
        self.stopped = False
        self.stored: list[bool] = []
        """Results so far, in the order of `nodes`."""
        self.draft_stored: list[bool] = []
        self._pools = levels.pools
        self._copies = levels.copies()
        self._hashes = [node.hash for node in nodes]
        self._slots = [node.host for node in nodes if node.host is not None]
        self._paired = [link.paired and node.draft_on_host for node in nodes]
        self._prefixes = {
            chosen[0]: self.nodes[chosen[0]].prefix()
            for start in range(0, len(self.nodes), BATCH_PAGES)
            for paired in (True, False)
            if (chosen := self._chosen(start, paired))
        }
        """Of the first page of each write, by its place."""

    def step(self) -> bool:
        """Writes one batch; whether another one is left."""
        for copy in self._copies:
            copy.wait()
        self._copies = []
        start = len(self.stored)
        stop = min(start + BATCH_PAGES, len(self.nodes))
        stored = dict.fromkeys(range(start, stop), False)
        drafts = dict(stored)
        try:
            for paired in (True, False):
                chosen = self._chosen(start, paired)
                if chosen:
                    result = self._write(chosen, paired)
                    stored.update(zip(chosen, result.target, strict=True))
                    drafts.update(zip(chosen, result.draft or [], strict=False))
        finally:
            self.draft_stored += drafts.values()
            self.stored += stored.values()
        return stop < len(self.nodes)

    def _chosen(self, start: int, paired: bool) -> list[int]:
        """The places of a batch's pages that are written with a draft, or without."""
        stop = min(start + BATCH_PAGES, len(self.nodes))
        return [i for i in range(start, stop) if self._paired[i] is paired]

    def _write(self, chosen: list[int], paired: bool) -> PairResult:
        slots = as_indices([self._slots[i] for i in chosen])
        return self.link.edge.batch_set(
            [self._hashes[i] for i in chosen],
            self._pools.target_spans(slots),
            self._pools.draft_spans(slots) if paired else None,
            self._prefixes[chosen[0]],
        )


class BackupQueue:
    """Backups to storage as the scheduler thread sees them.

    A page counts as stored only once storage said so, so whatever failed, was deferred or was
    abandoned is offered again when its node is next inserted or hit.
    """

    def __init__(self, levels: Levels, tree: RadixTree, stats: HiCacheStats) -> None:
        self.held_pages = 0
        """Host pages that backups hold."""
        self._levels = levels
        self._tree = tree
        self._stats = stats

    def submit(self, link: StorageLink, nodes: Sequence[PageNode]) -> None:
        """Starts writing those of the nodes' host pages that storage lacks."""
        lacking = [node for node in nodes if link.writes and _lacks(link, node)]
        room = max(0, link.backup_limit_pages - self.held_pages)
        self._stats.deferred_pages += max(0, len(lacking) - room)
        chosen = lacking[:room]
        if not chosen:
            return
        for node in chosen:
            self._tree.lock_host(node)
            node.storing = True
        self.held_pages += len(chosen)
        link.back_up(BackupOperation(link, self._levels, chosen))

    def settle(self, operation: BackupOperation, current: StorageLink | None) -> None:
        """Takes a confirmed operation's pages and results back; results of a storage that is
        not attached any more say nothing about the one that is."""
        for i, node in enumerate(operation.nodes):
            node.storing = False
            self._tree.unlock_host(node)
            if operation.link is current and i < len(operation.stored):
                node.stored = node.stored or operation.stored[i]
                node.draft_stored = node.draft_stored or operation.draft_stored[i]
        self.held_pages -= len(operation.nodes)
        tried, written = len(operation.stored), sum(operation.stored)
        self._stats.written_pages += written
        self._stats.written_drafts += sum(operation.draft_stored)
        self._stats.refused_pages += tried - written
        self._stats.abandoned_pages += len(operation.nodes) - tried


def _lacks(link: StorageLink, node: PageNode) -> bool:
    if node.host is None or node.storing or (link.required and not node.draft_on_host):
        return False
    return not node.stored or (link.paired and node.draft_on_host and not node.draft_stored)
