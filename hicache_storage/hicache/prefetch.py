"""Prefetch: pages from storage into host pages, for a request that waits for its turn."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import PageSizeMismatch
from ..pools.paired import PairedPools
from .levels import as_indices
from .radix_tree import PageNode
from .storage_link import StorageLink
from .storage_threads import BATCH_PAGES


class PrefetchOperation:
    """Two phases of batches: a lookup, and, once the scheduler gave it host pages, the reads.

    `found` and `loaded` are kept apart: what a lookup found says nothing about what can be
    used. `hashes` follow `anchor`, the last page that was in memory at the start.
    """

    def __init__(
        self,
        link: StorageLink,
        pools: PairedPools,
        *,
        hashes: Sequence[str],
        anchor: PageNode,
        prefix: Sequence[str],
        started_s: float,
    ) -> None:
        self.link = link
        self.hashes = list(hashes)
        self.anchor = anchor
        self.prefix = list(prefix)
        """Hashes of the request's pages before `hashes[0]`."""
        self.started_s = started_s
        self.stopped = False
        self.fetching = False
        self.finished = False
        """No thread has it any more."""
        self.discarded = False
        """No request wants it any more."""
        self.found = 0
        """Leading run of pages that the lookup reported."""
        self.loaded = 0
        """Leading run of pages that have arrived and are usable."""
        self.drafts: list[bool] = []
        """Whether each loaded page has its draft."""
        self.slots: list[int] = []
        self.held: dict[int, int] = {}
        """Host pages that the operation holds, by position in `hashes`."""
        self._pools = pools

    def give(self, slots: Sequence[int]) -> None:
        """Starts the second phase: page i of the run is read into `slots[i]`.

        Raises PageSizeMismatch, before any byte moves, if there are more slots than pages, or
        one is given twice.
        """
        if len(slots) > len(self.hashes) or len(set(slots)) != len(slots):
            raise PageSizeMismatch(
                f"{len(self.hashes)} pages can't be read into the host pages {list(slots)[:8]}..."
            )
        self.slots = list(slots)
        self.held = dict(enumerate(slots))
        self.fetching = True

    def step(self) -> bool:
        """One batch of the phase; whether another one is worth it."""
        return self._fetch() if self.fetching else self._look_up()

    def _look_up(self) -> bool:
        batch = self.hashes[self.found : self.found + BATCH_PAGES]
        count = self.link.edge.exists(batch, self._before(self.found)).usable
        self.found += count
        return count == len(batch) and self.found < len(self.hashes)

    def _fetch(self) -> bool:
        start = self.loaded
        slots = as_indices(self.slots[start : start + BATCH_PAGES])
        batch = self.hashes[start : start + len(slots)]
        result = self.link.edge.batch_get(
            batch,
            self._pools.target_spans(slots),
            self._pools.draft_spans(slots) if self.link.paired else None,
            self._before(start),
        )
        run = result.usable_pages
        drafts = [False] * run if result.draft is None else result.draft[:run]
        lost = [int(slots[i]) for i, draft in enumerate(drafts) if not draft]
        if lost:
            self._pools.zero_draft(as_indices(lost))
        self.drafts += drafts
        self.loaded = start + run
        return run == len(batch) and self.loaded < len(self.slots)

    def _before(self, position: int) -> list[str]:
        return self.prefix + self.hashes[:position]
