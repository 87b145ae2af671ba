"""Leasing: pages of the tree handed to requests and taken from them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..errors import HiCacheStorageError, InvalidKey, PageSizeMismatch
from ..pools.transfer import LayerEvents
from .agreement import Agreement
from .lease import Lease
from .levels import Levels, as_indices
from .radix_tree import PageNode, RadixTree
from .stats import HiCacheStats


class Leasing:
    """Matches, locks and loads pages for requests, and takes over what they computed.

    Scheduler thread only. `required` asks for pages with their drafts only.
    """

    def __init__(
        self, levels: Levels, tree: RadixTree, stats: HiCacheStats, ranks: Agreement
    ) -> None:
        self._levels = levels
        self._tree = tree
        self._stats = stats
        self._ranks = ranks
        self._loads: dict[PageNode, LayerEvents] = {}
        """Load-backs that may be under way, by the nodes whose device pages they write."""

    @property
    def _paired(self) -> bool:
        return self._levels.pools.draft_host is not None

    def usable(self, hashes: Sequence[str], required: bool) -> list[PageNode]:
        """The leading run of pages in memory that a request may use."""
        nodes = self._tree.match(hashes)
        if required:
            for i, node in enumerate(nodes):
                if not (node.draft_on_device or (node.draft_on_host and _may_load(node))):
                    return nodes[:i]
        return nodes

    def acquire(
        self, request_id: str, hashes: Sequence[str], fetched: Sequence[PageNode], required: bool
    ) -> Lease:
        """A lease of the usable run, as far as device pages can be had on every rank."""
        nodes = self.usable(hashes, required)
        self._tree.touch(nodes)
        loading = [node for node in nodes if _loads(node)]
        for node in nodes:
            self._tree.lock_device(node)
        for node in loading:
            self._tree.lock_host(node)
        pages: list[int] = []
        length = 0
        try:
            pages = self._levels.take_device(sum(node.device is None for node in loading))
            length = _length(nodes, len(pages))
        finally:
            # Also after an error, as the other ranks wait in it.
            length = self._ranks.least(length)
            for node in nodes[length:]:
                self._tree.unlock_device(node)
            dropped = set(nodes[length:])
            for node in loading:
                if node in dropped:
                    self._tree.unlock_host(node)
        nodes = nodes[:length]
        loading = [node for node in loading if node not in dropped]
        return self._load(request_id, nodes, loading, pages, set(fetched))

    def _load(
        self,
        request_id: str,
        nodes: list[PageNode],
        loading: list[PageNode],
        pages: list[int],
        fetched: set[PageNode],
    ) -> Lease:
        """Copies what is not on the device into `pages`, and frees those left over."""
        free = iter(pages)
        places = [next(free) if node.device is None else node.device for node in loading]
        taken = pages
        try:
            self._levels.free_device(list(free))
            taken = [
                page for page, node in zip(places, loading, strict=True) if node.device is None
            ]
            events = self._levels.load_back(loading, places)
        except BaseException:
            for node in nodes:
                self._tree.unlock_device(node)
            for node in loading:
                self._tree.unlock_host(node)
            self._levels.free_device(taken)
            raise
        from_storage = sum(node in fetched for node in loading)
        lease = Lease(
            request_id=request_id,
            hashes=[node.hash for node in nodes],
            device_indices=as_indices([]),
            drafts=None,
            loading=events,
            from_device=len(nodes) - len(loading),
            from_host=len(loading) - from_storage,
            from_storage=from_storage,
            reading=loading,
        )
        self._loads |= dict.fromkeys(loading, events)
        self._hold(lease, nodes)
        self._stats.device_hits += lease.from_device
        self._stats.host_hits += lease.from_host
        self._stats.storage_hits += lease.from_storage
        self._stats.lost_drafts += 0 if lease.drafts is None else lease.drafts.count(False)
        return lease

    def insert(self, lease: Lease, hashes: Sequence[str], device_indices: Tensor) -> None:
        """See `HiCache.insert`."""
        pages = [int(page) for page in device_indices.tolist()]
        present = self._check(lease, hashes, pages)
        self._finish_loading(lease)
        for node in present[len(lease.nodes) :]:
            if node in self._loads:  # for another request, which this one doesn't wait for
                self._loads[node].synchronize()
        nodes: list[PageNode] = []
        spare: list[int] = []
        parent = self._tree.root
        for i, (page_hash, page) in enumerate(zip(hashes, pages, strict=True)):
            if i < len(present):
                node = present[i]
                spare += self._merge(node, page, held=i < len(lease.nodes))
            else:
                node = self._tree.add(parent, page_hash, device=page, draft=self._paired)
            if i >= len(lease.nodes):
                self._tree.lock_device(node)
            nodes.append(node)
            parent = node
        self._hold(lease, nodes + lease.nodes[len(nodes) :])
        self._levels.free_device(spare)
        self._tree.touch(nodes)

    def release(self, lease: Lease) -> None:
        """See `HiCache.release`."""
        if lease.released:
            return
        self._finish_loading(lease)
        lease.released = True
        for node in lease.nodes:
            self._tree.unlock_device(node)

    def _merge(self, node: PageNode, page: int, *, held: bool) -> list[int]:
        """Brings a computed page together with the node of its hash; gives the page that is
        left over."""
        if node.device == page:
            return []
        if node.device is None:
            self._tree.set_device(node, page, self._paired)
            return []
        if self._paired and not node.draft_on_device and node.device_locks == int(held):
            spare = node.device
            self._tree.set_device(node, page, True)
            self._stats.replaced_drafts += 1
            return [spare]
        return [page]

    def _check(self, lease: Lease, hashes: Sequence[str], pages: list[int]) -> list[PageNode]:
        """The nodes that exist already; raises before anything changes."""
        if lease.released:
            raise HiCacheStorageError(
                f"the lease of request {lease.request_id!r} was released already"
            )
        if len(hashes) != len(pages):
            raise PageSizeMismatch(f"{len(hashes)} page hashes but {len(pages)} device pages")
        common = min(len(hashes), len(lease.hashes))
        if list(hashes[:common]) != lease.hashes[:common]:
            raise InvalidKey(
                f"the pages inserted for request {lease.request_id!r} don't begin as its lease "
                "does; give all of the request's page hashes from the first on"
            )
        present = self._tree.path(hashes)
        if len(set(pages)) != len(pages):
            raise PageSizeMismatch("a device page stands for two page hashes")
        num_pages = self._levels.pools.device.num_pages
        for i, page in enumerate(pages):
            if not 0 <= page < num_pages:
                raise PageSizeMismatch(f"device page {page} is not one of the pool's {num_pages}")
            own = i < len(present) and present[i].device == page
            if self._tree.owns_device(page) and not own:
                raise PageSizeMismatch(
                    f"device page {page} is given for page hash {hashes[i]:.12}..., but it "
                    "belongs to another page of the cache; allocate pages for what is computed"
                )
        return present

    def _hold(self, lease: Lease, nodes: list[PageNode]) -> None:
        lease.nodes = nodes
        lease.hashes = [node.hash for node in nodes]
        lease.device_indices = as_indices(
            [node.device for node in nodes if node.device is not None]
        )
        lease.drafts = [node.draft_on_device for node in nodes] if self._paired else None

    def _finish_loading(self, lease: Lease) -> None:
        if lease.reading:
            lease.loading.synchronize()
            for node in lease.reading:
                self._tree.unlock_host(node)
                if self._loads.get(node) is lease.loading:
                    del self._loads[node]
            lease.reading = []


def _may_load(node: PageNode) -> bool:
    """Nobody reads the node's device page, so that it may be written or filled."""
    return node.device is None or not node.device_locks


def _loads(node: PageNode) -> bool:
    """The host has the page, or the draft, that the device lacks."""
    if node.device is None:
        return True
    return node.draft_on_host and not node.draft_on_device and _may_load(node)


def _length(nodes: Sequence[PageNode], free_pages: int) -> int:
    """How many of the nodes have a device page once `free_pages` more are given out."""
    for i, node in enumerate(nodes):
        if node.device is None:
            if free_pages == 0:
                return i
            free_pages -= 1
    return len(nodes)
