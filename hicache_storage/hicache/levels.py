"""Levels: the page slots of device and host, filled, copied and given up as the tree says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..pools.paired import PairedPools
from ..pools.transfer import LayerEvents, Transfer
from .radix_tree import PageNode, RadixTree
from .stats import HiCacheStats


class _Evicted(NamedTuple):
    node: PageNode
    page: int
    draft: bool
    slot: int | None
    """The host page that the device page is copied to; None if it isn't copied."""


class Levels:
    """Moves pages between device and host and makes room on both. Scheduler thread only.

    `write_back` has the device back up every page that it gives up. Otherwise it does so only
    for pages that have others behind them, which would lose their prefix.
    """

    def __init__(
        self, pools: PairedPools, tree: RadixTree, stats: HiCacheStats, *, write_back: bool
    ) -> None:
        self.pools = pools
        self._tree = tree
        self._stats = stats
        self._write_back = write_back
        self._transfers: list[Transfer] = []
        self._fresh: list[PageNode] = []

    def take_device(self, count: int) -> list[int]:
        """Up to `count` device pages, evicting the least recently used ones for them."""
        allocator = self.pools.device_allocator
        if count > allocator.available:
            self._evict_device(count - allocator.available)
        taken = allocator.alloc(min(count, allocator.available))
        return [] if taken is None else _ints(taken)

    def take_host(self, count: int) -> list[int]:
        """Up to `count` host pages, evicting the least recently used ones for them."""
        allocator = self.pools.host_allocator
        free = allocator.alloc(min(count, allocator.available))
        pages = [] if free is None else _ints(free)
        return pages + self._evict_host(count - len(pages))

    def free_device(self, pages: Sequence[int]) -> None:
        """Frees device pages that no node has."""
        if pages:
            self.finish_copies()
            self.pools.device_allocator.free(as_indices(pages))

    def free_host(self, pages: Sequence[int]) -> None:
        """Frees host pages that no node has."""
        if pages:
            self.finish_copies()
            self.pools.host_allocator.free(as_indices(pages))

    def back_up(self, nodes: Sequence[PageNode]) -> None:
        """Copies the device pages of a path to the host where the host has none, or only one
        with a lost draft. Stops where no host page can be had."""
        lacking = [node for node in nodes if node.device is not None and node.host is None]
        better = [node for node in nodes if _better_draft(node) and not node.host_locks]
        if not lacking and not better:
            return
        for node in nodes:
            self._tree.lock_host(node)
        slots = self.take_host(len(lacking))
        self._stats.no_host_room += len(lacking) - len(slots)
        copies = list(zip(lacking, slots, strict=False))
        copies += [(node, node.host) for node in better if node.host is not None]
        try:
            self._copy_to_host(copies)
        except BaseException:
            self.free_host(slots)
            raise
        finally:
            for node in nodes:
                self._tree.unlock_host(node)

    def load_back(self, nodes: Sequence[PageNode], pages: Sequence[int]) -> LayerEvents:
        """Copies each node's host page to the device page given for it."""
        slots = [node.host for node in nodes if node.host is not None]
        events = self.pools.load_back(as_indices(slots), as_indices(pages))
        for node, page in zip(nodes, pages, strict=True):
            self._tree.set_device(node, page, node.draft_on_host)
        return events

    def take_fresh(self) -> list[PageNode]:
        """The nodes that got a host page, or a better one, since the last call."""
        fresh, self._fresh = self._fresh, []
        return [node for node in fresh if self._tree.holds(node) and node.host is not None]

    def clear(self) -> None:
        """Gives up every page that isn't locked, on both levels, without a backup."""
        self.free_host(self._evict_host(self.pools.host.num_pages))
        freed: list[int] = []
        kept: list[PageNode] = []
        while (node := self._tree.pop_device_leaf()) is not None:
            if node.device is None or (node.host is None and node.children):
                kept.append(node)
                continue
            freed.append(node.device)
            self._drop_device(node)
        self._tree.offer(kept)
        self.free_device(freed)

    def finish_copies(self) -> None:
        """Returns once every backup is complete: only then may either end be reused."""
        for transfer in self._transfers:
            transfer.wait()
        self._transfers.clear()

    def copies(self) -> list[Transfer]:
        """Backups that may not be complete yet."""
        self._transfers = [transfer for transfer in self._transfers if not transfer.done()]
        return list(self._transfers)

    def _evict_device(self, count: int) -> None:
        gone: list[_Evicted] = []
        kept: list[PageNode] = []
        while len(gone) < count and (node := self._tree.pop_device_leaf()) is not None:
            slot = self._slot_for_evicted(node)
            if node.device is None or (slot is None and node.host is None and node.children):
                kept.append(node)
                continue
            gone.append(_Evicted(node, node.device, node.draft_on_device, slot))
            if slot is not None:
                self._tree.set_host(node, slot, node.draft_on_device)
                self._tree.lock_host(node)
            self._drop_device(node)
        copied = [one for one in gone if one.slot is not None]
        try:
            self._copy([(one.page, one.slot, one.draft) for one in copied if one.slot is not None])
        except BaseException:
            self._restore(gone)
            raise
        else:
            self._fresh += [one.node for one in copied]
            self.free_device([one.page for one in gone])
        finally:
            for one in copied:
                self._tree.unlock_host(one.node)
            self._tree.offer(kept)

    def _slot_for_evicted(self, node: PageNode) -> int | None:
        """The host page that the node's device page is copied to before it goes, if any."""
        if node.host is not None:
            return node.host if _better_draft(node) and not node.host_locks else None
        if not self._write_back and not node.children:
            return None
        slots = self.take_host(1)
        self._stats.no_host_room += not slots
        return slots[0] if slots else None

    def _restore(self, gone: Sequence[_Evicted]) -> None:
        """Undoes evictions whose copies failed; parents went last, so they come back first."""
        lost: list[int] = []
        for one in reversed(gone):
            if self._tree.holds(one.node):
                self._tree.set_device(one.node, one.page, one.draft)
            else:
                lost.append(one.page)
        slots = [one.slot for one in gone if one.slot is not None]
        for one in gone:
            if one.slot is not None:
                self._tree.drop_host(one.node)
        self.free_host(slots)
        self.free_device(lost)

    def _evict_host(self, count: int) -> list[int]:
        """Host pages taken from the least recently used nodes, up to `count`; the caller's."""
        pages: list[int] = []
        while len(pages) < count and (node := self._tree.pop_host_leaf()) is not None:
            if node.host is None:
                continue
            pages.append(node.host)
            self._stats.host_evictions += 1
            self._stats.dropped_pages += node.device is None
            self._tree.drop_host(node)
        if pages:
            self.finish_copies()
        return pages

    def _drop_device(self, node: PageNode) -> None:
        self._stats.device_evictions += 1
        self._stats.dropped_pages += node.host is None
        self._tree.drop_device(node)

    def _copy_to_host(self, copies: Sequence[tuple[PageNode, int]]) -> None:
        self._copy(
            [
                (node.device, slot, node.draft_on_device)
                for node, slot in copies
                if node.device is not None
            ]
        )
        for node, slot in copies:
            self._tree.set_host(node, slot, node.draft_on_device)
        self._fresh += [node for node, _ in copies]

    def _copy(self, copies: Sequence[tuple[int, int, bool]]) -> None:
        """Copies (device page, host page, has its draft); a draft that isn't real is zeroed."""
        if not copies:
            return
        pages, slots = [page for page, _, _ in copies], [slot for _, slot, _ in copies]
        transfer = self.pools.backup(as_indices(pages), as_indices(slots))
        self._transfers = [*self.copies(), transfer]
        self._stats.backed_up_pages += len(copies)
        lost = [slot for _, slot, draft in copies if not draft]
        if lost and self.pools.draft_host is not None:
            transfer.wait()
            self.pools.zero_draft(as_indices(lost))


def as_indices(pages: Sequence[int]) -> Tensor:
    """Page indices as the pools take them."""
    return torch.tensor(pages, dtype=torch.int64)


def _ints(indices: Tensor) -> list[int]:
    return [int(index) for index in indices.tolist()]


def _better_draft(node: PageNode) -> bool:
    """The device has the draft that the host copy lacks."""
    return node.host is not None and node.draft_on_device and not node.draft_on_host
