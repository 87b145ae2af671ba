"""A small HiCache over a backend that does as it is told, with bytes that name their page."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hicache_storage import PageSpans, PairedStore, Store, hookimpl
from hicache_storage.backends.memory import MemoryBackend, MemoryConfig
from hicache_storage.hicache import HiCache, Lease
from hicache_storage.pairing import Pairing
from hicache_storage.pools.device import DevicePool, MHADevicePool
from hicache_storage.pools.geometry import PageGeometry
from hicache_storage.pools.paired import PairedPools

SOON_S = 20.0
"""Longer than anything here takes; a bound, not an expectation."""

Hook = Callable[[str, list[str]], Any]


def chain(count: int, name: str = "p") -> list[str]:
    """The page hashes of a prompt of `count` pages; prompts of different names share none."""
    hashes: list[str] = []
    prior = ""
    for i in range(count):
        prior = hashlib.sha256(f"{prior}/{name}/{i}".encode()).hexdigest()
        hashes.append(prior)
    return hashes


def branch(prefix: Sequence[str], count: int, name: str) -> list[str]:
    """`prefix` with `count` more pages of its own."""
    hashes = list(prefix)
    for i in range(count):
        prior = hashes[-1] if hashes else ""
        hashes.append(hashlib.sha256(f"{prior}/{name}/{i}".encode()).hexdigest())
    return hashes


class ToldBackend(MemoryBackend):
    """memory:// that calls `on(hook, page keys)` first, which may wait, raise, or give the
    answer itself; and that refuses or loses single pages."""

    def __init__(self) -> None:
        super().__init__(MemoryConfig())
        self.on: Hook = lambda hook, keys: None
        self.calls: list[tuple[str, list[str]]] = []
        self.prefixes: list[list[str]] = []
        """The prefix keys of each of the calls."""
        self.refuse: set[str] = set()
        """Page keys that batch_set answers False for."""
        self.lose: set[str] = set()
        """Page keys that batch_get answers False for, with rubbish in the buffer."""

    def _told(self, hook: str, keys: list[str], prefix_keys: list[str] | None) -> Any:
        names = [key.partition("/")[2] for key in keys]
        if names[0].startswith("n:"):
            return None
        self.calls.append((hook, names))
        self.prefixes.append([key.partition("/")[2] for key in prefix_keys or ()])
        return self.on(hook, names)

    @hookimpl
    def batch_set(
        self, keys: list[str], pages: list[PageSpans], prefix_keys: list[str] | None
    ) -> list[bool]:
        told = self._told("batch_set", keys, prefix_keys)
        if told is not None:
            return told
        return [
            key.partition("/")[2] not in self.refuse and self._set(key, b"".join(page))
            for key, page in zip(keys, pages, strict=True)
        ]

    @hookimpl
    def batch_get(
        self, keys: list[str], buffers: list[PageSpans], prefix_keys: list[str] | None
    ) -> list[bool]:
        told = self._told("batch_get", keys, prefix_keys)
        if told is not None:
            return told
        hits = []
        for key, spans in zip(keys, buffers, strict=True):
            lost = key.partition("/")[2] in self.lose
            if lost:
                for span in spans:
                    span[:] = b"\xab" * len(span)
            hits.append(not lost and self._get(key, spans))
        return hits

    @hookimpl
    def exists(self, keys: list[str], prefix_keys: list[str] | None) -> int:
        told = self._told("exists", keys, prefix_keys)
        if told is not None:
            return told
        with self._lock:
            return next((i for i, key in enumerate(keys) if key not in self._pages), len(keys))

    def stored(self) -> set[str]:
        """Page keys of all stored pages."""
        with self._lock:
            names = {name.partition("/")[2] for name in self._pages}
        return {name for name in names if not name.startswith("n:")}

    def forget(self, *keys: str) -> None:
        """Loses pages, as an eviction by the store would."""
        with self._lock:
            for name in list(self._pages):
                if name.partition("/")[2] in keys:
                    self._drop(name)

    def asked(self, hook: str) -> list[str]:
        """Page keys of all calls of a hook, in order."""
        return [key for name, keys in self.calls if name == hook for key in keys]


class Gate:
    """Holds calls of one hook up until it is opened; `key` narrows it to calls for that page."""

    def __init__(self, hook: str, key: str = "") -> None:
        self.hook = hook
        self.key = key
        self.entered = threading.Event()
        self._open = threading.Event()

    def __call__(self, hook: str, keys: list[str]) -> None:
        if hook == self.hook and (not self.key or self.key in keys):
            self.entered.set()
            assert self._open.wait(SOON_S)

    def open(self) -> None:
        """Lets all calls pass from now on."""
        self._open.set()


def geometry(layers: int) -> PageGeometry:
    return PageGeometry("mha", layers, 2, 8, 8, 4, torch.bfloat16)


def page_bytes(page_hash: str, half: str, layer: int, part: int, count: int) -> bytes:
    """What the pools must hold for a page: bytes that follow from all of this."""
    seed = f"{page_hash}/{half}/{layer}/{part}".encode()
    return hashlib.shake_128(seed).digest(count)


class Rig:
    """Pools, a backend and a HiCache; `store=False` leaves the storage out."""

    def __init__(
        self,
        *,
        device_pages: int = 32,
        host_pages: int = 32,
        draft: bool = True,
        pairing: Pairing = "best_effort",
        store: bool = True,
        backend: ToldBackend | None = None,
        storage: dict[str, Any] | None = None,
        device: str = "cpu",
        **options: Any,
    ) -> None:
        self.pools = PairedPools(
            MHADevicePool(geometry(2), device_pages, device), host_pages=host_pages
        )
        if draft:
            assert self.pools.register_draft(MHADevicePool(geometry(1), device_pages, device))
        self.backend = backend or ToldBackend()
        self.cache = HiCache(self.pools, **options)
        self.pairing: Pairing = pairing
        self.storage = storage or {}
        if store:
            self.attach()

    def pairs(self, backend: ToldBackend | None = None) -> PairedStore:
        namespaces = self.pools.namespaces(model="m", draft_model="m-draft")
        return PairedStore(Store(backend or self.backend), *namespaces, pairing=self.pairing)

    def attach(self, backend: ToldBackend | None = None, **options: Any) -> None:
        self.cache.attach_storage(self.pairs(backend), **{**self.storage, **options})

    def halves(self) -> list[tuple[str, DevicePool]]:
        pools = self.pools
        drafts = [] if pools.draft_device is None else [("draft", pools.draft_device)]
        return [("target", pools.device), *drafts]

    def fill(self, pages: Sequence[int], hashes: Sequence[str]) -> None:
        """Computes the pages: what a forward pass of target and draft would leave."""
        for page, page_hash in zip(pages, hashes, strict=True):
            for half, pool in self.halves():
                for layer in range(pool.geometry.layers):
                    for part, rows in enumerate(pool.page_rows(layer)):
                        row = rows[page]
                        values = page_bytes(page_hash, half, layer, part, row.numel())
                        row.copy_(
                            torch.frombuffer(bytearray(values), dtype=torch.uint8).view_as(row)
                        )

    def holds(self, page: int, page_hash: str, half: str) -> bool:
        """Whether a device page has exactly the bytes of its hash."""
        pool = dict(self.halves())[half]
        return all(
            bytes(rows[page].flatten().tolist())
            == page_bytes(page_hash, half, layer, part, rows[page].numel())
            for layer in range(pool.geometry.layers)
            for part, rows in enumerate(pool.page_rows(layer))
        )

    def zero_draft(self, page: int) -> bool:
        pool = dict(self.halves())["draft"]
        return all(
            not rows[page].any()
            for layer in range(pool.geometry.layers)
            for rows in pool.page_rows(layer)
        )

    def dirty(self) -> None:
        """Fills every free device page with rubbish, so that a page that was not really loaded
        can't look right."""
        free = [i for i in range(self.pools.device.num_pages) if not self._taken(i)]
        for _, pool in self.halves():
            for layer in range(pool.geometry.layers):
                for rows in pool.page_rows(layer):
                    rows[free] = 0xAB

    def _taken(self, page: int) -> bool:
        return bool(self.pools.device_allocator._taken[page])

    def check(self, lease: Lease) -> None:
        """Every page of the lease is the page of its hash, target and draft."""
        lease.loading.synchronize()
        for i, (page, page_hash) in enumerate(
            zip(lease.device_indices.tolist(), lease.hashes, strict=True)
        ):
            assert self.holds(page, page_hash, "target"), f"page {i}: target"
            if lease.drafts is not None and lease.drafts[i]:
                assert self.holds(page, page_hash, "draft"), f"page {i}: draft"
            elif lease.drafts is not None:
                assert self.zero_draft(page), f"page {i}: lost draft"

    def serve(self, hashes: Sequence[str], name: str = "r") -> Lease:
        """Acquires, computes the rest and inserts it; the lease is the caller's to release."""
        lease = self.cache.acquire(name, hashes)
        self.check(lease)
        fresh = self.cache.allocate(len(hashes) - len(lease))
        assert fresh is not None
        self.fill(fresh.tolist(), hashes[len(lease) :])
        self.cache.insert(lease, hashes, torch.cat([lease.device_indices, fresh]))
        self.check(lease)
        return lease

    def keep(self, hashes: Sequence[str]) -> None:
        """Serves a prompt to its end, backups included."""
        self.cache.release(self.serve(hashes))
        self.idle()

    def fetch(self, hashes: Sequence[str], name: str = "r") -> Lease:
        """Prefetches, waits and acquires."""
        self.cache.prefetch(name, hashes)
        self.idle()
        assert self.cache.prefetch_ready(name)
        self.dirty()
        lease = self.cache.acquire(name, hashes)
        self.check(lease)
        return lease

    def idle(self) -> None:
        assert self.cache.wait_idle(SOON_S)

    def until(self, condition: Callable[[], bool]) -> None:
        """Goes on as a scheduler does until the condition holds."""
        end_s = time.monotonic() + SOON_S
        while not condition():
            assert time.monotonic() < end_s
            self.cache.wait_idle(0.01)

    def settle(self) -> None:
        """After all leases and prefetches ended: nothing holds a page but the tree, and
        clearing it gives every slot back."""
        self.idle()
        stats = self.cache.stats()
        assert stats.prefetch_held_pages == stats.backup_held_pages == 0
        assert stats.free_device_pages + stats.device_pages == self.pools.device.num_pages
        assert stats.free_host_pages + stats.host_pages == self.pools.host.num_pages
        self.cache.clear()
        assert self.pools.device_allocator.available == self.pools.device.num_pages
        assert self.pools.host_allocator.available == self.pools.host.num_pages

    def close(self) -> None:
        assert self.cache.close(SOON_S) == 0
        self.settle()
