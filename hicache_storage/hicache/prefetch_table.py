"""PrefetchTable: the prefetches of all requests, as the scheduler thread sees them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .agreement import Agreement
from .levels import Levels
from .prefetch import PrefetchOperation
from .radix_tree import PageNode, RadixTree
from .stats import HiCacheStats
from .storage_link import StorageLink


class PrefetchTable:
    """Starts prefetches, gives them host pages, publishes what came, frees the rest once.

    With several ranks the table has the same requests on all of them: a request for which only
    another rank has a prefetch stands here with None, and takes part in every agreement.
    """

    def __init__(
        self,
        levels: Levels,
        tree: RadixTree,
        stats: HiCacheStats,
        ranks: Agreement,
        clock: Callable[[], float],
    ) -> None:
        self._requests: dict[str, PrefetchOperation | None] = {}
        self._holding: set[PrefetchOperation] = set()
        self._levels = levels
        self._tree = tree
        self._stats = stats
        self._ranks = ranks
        self._clock = clock

    @property
    def held_pages(self) -> int:
        """Host pages that prefetches hold."""
        return sum(len(operation.held) for operation in self._holding)

    def start(
        self,
        request_id: str,
        hashes: Sequence[str],
        resident: Sequence[PageNode],
        link: StorageLink | None,
    ) -> bool:
        """Looks for the pages behind the resident ones; whether any rank started to.

        False for a request that is in the table already: it is not tried twice.
        """
        if request_id in self._requests:
            return False
        self._stats.prefetches += 1
        operation = self._operation(hashes, resident, link) if link is not None else None
        if not self._ranks.any(operation is not None):
            return False
        self._requests[request_id] = operation
        if operation is not None:
            self._tree.lock_host(operation.anchor)
            self._holding.add(operation)
            operation.link.prefetch(operation)
        return True

    def ready(self, request_id: str) -> bool:
        """Whether the request has waited long enough, on every rank."""
        if request_id not in self._requests:
            return True
        operation = self._requests[request_id]
        ready = operation is None or operation.link.rule.ready(
            pages=len(operation.hashes),
            waited_s=self._clock() - operation.started_s,
            finished=operation.finished or operation.stopped,
        )
        return self._ranks.least(int(ready)) == 1

    def publish(
        self, request_id: str, resident: int, current: StorageLink | None
    ) -> list[PageNode]:
        """Ends the request's prefetch and adds the pages to the tree that have arrived on every
        rank. `resident` is how many pages of the request are in memory without them."""
        if request_id not in self._requests:
            return []
        operation = self._requests.pop(request_id)
        loaded = 0 if operation is None else operation.loaded
        end = resident if operation is None else max(resident, len(operation.prefix) + loaded)
        end = self._ranks.least(end)
        if operation is None:
            return []
        nodes = self._add(
            operation, min(loaded, end - len(operation.prefix)), operation.link is current
        )
        self._discard(operation)
        self._stats.published_pages += len(nodes)
        return nodes

    def cancel(self, request_id: str) -> None:
        """Ends the request's prefetch; its pages go back once no thread has them."""
        operation = self._requests.pop(request_id, None)
        if operation is not None:
            self._discard(operation)

    def cancel_all(self) -> None:
        """Ends every prefetch; the requests stay in the table, as on the other ranks."""
        for request_id, operation in self._requests.items():
            if operation is not None:
                self._requests[request_id] = None
                self._discard(operation)

    def confirmed(self, operation: PrefetchOperation) -> None:
        """Goes on with an operation that its thread has handed back."""
        if operation.fetching:
            self._stats.loaded_pages += operation.loaded
            self._stats.loaded_drafts += sum(operation.drafts)
        elif self._give_pages(operation):
            operation.link.prefetch(operation)
            return
        operation.finished = True
        self._release(operation, 0 if operation.discarded else operation.loaded)

    def _operation(
        self, hashes: Sequence[str], resident: Sequence[PageNode], link: StorageLink
    ) -> PrefetchOperation | None:
        first = len(resident)
        if first == len(hashes):
            self._stats.resident += 1
            return None
        if len(hashes) - first < link.rule.threshold_pages:
            self._stats.below_threshold += 1
            return None
        if self.held_pages >= link.rule.limit_pages:
            self._stats.declined += 1
            return None
        return PrefetchOperation(
            link,
            self._levels.pools,
            hashes=hashes[first:],
            anchor=resident[-1] if resident else self._tree.root,
            prefix=hashes[:first],
            started_s=self._clock(),
        )

    def _give_pages(self, operation: PrefetchOperation) -> bool:
        """After a lookup: whether there are pages to read, and host pages to read them into."""
        self._stats.lookups += 1
        self._stats.found_pages += operation.found
        self._stats.first_page_missing += operation.found == 0 and not operation.stopped
        if operation.stopped or operation.found == 0:
            return False
        rule = operation.link.rule
        if operation.found < rule.threshold_pages:
            self._stats.below_threshold += 1
            return False
        room = max(0, rule.limit_pages - self.held_pages)
        slots = self._levels.take_host(min(operation.found, room))
        if len(slots) < rule.threshold_pages:
            self._levels.free_host(slots)
            self._stats.declined += 1
            return False
        operation.give(slots)
        return True

    def _add(self, operation: PrefetchOperation, count: int, stored: bool) -> list[PageNode]:
        """Puts the first `count` pages into the tree; those that it has already stay with the
        operation, unless they bring a draft that was lost."""
        added: list[PageNode] = []
        parent = operation.anchor
        if not self._tree.holds(parent):
            return added
        for i in range(count):
            page_hash, draft = operation.hashes[i], operation.drafts[i]
            node = self._tree.get(page_hash)
            if node is None:
                node = self._tree.add(parent, page_hash, host=operation.held.pop(i), draft=draft)
            elif node.parent is not parent:
                break
            elif node.host is None:
                self._tree.set_host(node, operation.held.pop(i), draft)
            elif draft and not node.draft_on_host and not node.host_locks:
                slot, operation.held[i] = operation.held[i], node.host
                self._tree.set_host(node, slot, draft)
                self._stats.replaced_drafts += 1
            node.stored = node.stored or stored
            node.draft_stored = node.draft_stored or (stored and draft)
            added.append(node)
            parent = node
        return added

    def _discard(self, operation: PrefetchOperation) -> None:
        operation.discarded = True
        self._tree.unlock_host(operation.anchor)
        operation.link.stop(operation)
        if operation.finished:
            self._release(operation, 0)

    def _release(self, operation: PrefetchOperation, start: int) -> None:
        """Frees the host pages from position `start` on; only when no thread has them."""
        positions = [i for i in operation.held if i >= start]
        self._levels.free_host([operation.held.pop(i) for i in positions])
        if not operation.held:
            self._holding.discard(operation)
