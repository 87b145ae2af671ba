"""What `gpu_transfer.py` measures beside plain rates: other work on the device, and storage."""

from __future__ import annotations

import hashlib
import importlib.util
import itertools
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from gpu_pools import (
    SHAPES,
    Results,
    Slots,
    device_pool,
    in_order,
    no_collection,
    pools_for,
    turns,
)

from hicache_storage.pools.layouts import LAYOUTS, Layout
from hicache_storage.pools.paired import PairedPools
from hicache_storage.pools.strategy import STRATEGIES

AT_A_TIME = 16
"""Pages that are read from storage in one call."""
Copies = Callable[[], list[Any]]


class Products:
    """A loop of bfloat16 products on a stream of its own, some 95 ms on an H200."""

    def __init__(self) -> None:
        self.left, self.right = torch.randn(
            2, 8192, 8192, device="cuda", dtype=torch.bfloat16
        ).unbind()
        self.product = torch.empty_like(self.left)
        self.stream = torch.cuda.Stream()
        for _ in range(2):
            self._start()

    def _start(self) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        with torch.cuda.stream(self.stream):
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            for _ in range(60):
                torch.mm(self.left, self.right, out=self.product)
            last.record()
        return first, last

    def beside(self, copies: Copies) -> tuple[float, float, float]:
        """Milliseconds of the loop alone, of the loop beside these copies, and of the copies."""
        torch.cuda.synchronize()
        first, last = self._start()
        torch.cuda.synchronize()
        alone = first.elapsed_time(last)
        first, last = self._start()
        start = time.perf_counter()
        moving = copies()  # behind the current stream, which is idle, not behind the products
        for one in moving:
            one.synchronize()
        took = (time.perf_counter() - start) * 1e3
        torch.cuda.synchronize()
        return alone, first.elapsed_time(last), took

    def measure(
        self,
        results: Results,
        copies: dict[str, Copies],
        size_bytes: int,
        rounds: int,
        **about: Any,
    ) -> None:
        """Rows for these copies. The loss counts for the time that the copies took."""
        found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in copies}
        for name, counts in turns(copies, rounds):
            measured = self.beside(copies[name])
            if counts:
                found[name].append(measured)
        for name, rows in found.items():
            losses = sorted(
                100 * (beside - alone) / min(took, beside) for alone, beside, took in rows
            )
            alone, beside, took = map(statistics.median, zip(*rows, strict=True))
            quarter = len(losses) // 4
            results.add(
                "interference",
                **about,
                copies=name,
                alone_ms=round(alone, 1),
                beside_ms=round(beside, 1),
                copies_ms=round(took, 1),
                copies_GBps=round(size_bytes / took / 1e6, 1) if size_bytes else None,
                loss_percent=round(statistics.median(losses), 1),
                middle_half=f"{losses[quarter]:.1f} to {losses[-1 - quarter]:.1f}",
            )


def interference(results: Results, quick: bool) -> None:
    """Two backups or two load-backs of 2 GiB beside the loop, by each strategy."""
    products = Products()
    pool = device_pool(SHAPES["MHA 32 layers"])
    count = pool.num_pages
    size = 2 * count * pool.geometry.page_bytes

    def nothing() -> list[Any]:
        time.sleep(0.08)
        return []

    products.measure(results, {"none": nothing}, 0, 9, layout="")
    for layout in LAYOUTS[:1] if quick else LAYOUTS:
        pools = pools_for(pool, layout)
        slots = in_order("random", count, count), in_order("random", 2 * count, count)
        copies = {
            f"{verb}, {strategy}": _twice(pools, slots, strategy, verb)
            for strategy, verb in itertools.product(STRATEGIES, ("backup", "load"))
        }
        products.measure(results, copies, size, 9, layout=layout)


def _twice(pools: PairedPools, slots: Slots, strategy: Any, verb: str) -> Copies:
    pages, host = slots

    def copies() -> list[Any]:
        pools.strategy = strategy
        if verb == "backup":
            return [pools.backup(pages, host), pools.backup(pages, host)]
        loading = [pools.load_back(host, pages), pools.load_back(host, pages)]
        loading[-1].done()  # which asks for all layers
        return loading

    return copies


def restore(results: Results, quick: bool) -> None:
    """Pages from a file store and an lmdb store to the host, and to the device: a thread reads some
    while others cross the link, as HiCache has it."""
    layouts: tuple[Layout, ...] = ("page_first",) if quick else ("layer_first", "page_first")
    pool = device_pool(SHAPES["MHA 32 layers"])
    for name, layout in itertools.product(("file", "lmdb"), layouts):
        if name == "lmdb" and importlib.util.find_spec("lmdb") is None:
            results.add("restore", store=name, layout=layout, error="lmdb is not installed")
            continue
        directory = tempfile.mkdtemp(prefix="gpu-transfer-")
        try:
            _restore(results, name, _backend(name, directory), pools_for(pool, layout))
        finally:
            shutil.rmtree(directory)


def _backend(name: str, directory: str) -> Any:
    if name == "file":
        from hicache_storage.backends.file import FileBackend, FileConfig

        return FileBackend(FileConfig(directory))
    from hicache_storage.backends.lmdb import LmdbBackend, LmdbConfig

    return LmdbBackend(LmdbConfig(directory, durability="async", map_size=8 << 30))


def _restore(results: Results, name: str, backend: Any, pools: PairedPools) -> None:
    from hicache_storage import PairedStore, Store

    count = pools.device.num_pages
    hashes = [hashlib.sha256(str(i).encode()).hexdigest() for i in range(count)]
    slots = in_order("random", 2 * count, count)
    pools.backup(torch.arange(count), slots).wait()
    store = Store(backend, name=name)
    store.open()
    with store, no_collection():
        pairs = PairedStore(store, *pools.namespaces(model="org/model"))
        for first in range(0, count, AT_A_TIME):
            some = slice(first, first + AT_A_TIME)
            stored = pairs.batch_set(hashes[some], pools.target_spans(slots[some]), None)
            assert all(stored.target), f"{name} stored {sum(stored.target)} pages"
        times: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(5):
            for to_device, taken in times.items():
                taken.append(_read(pairs, pools, hashes, slots, to_device))
    read, whole = (statistics.median(times[to_device][1:]) for to_device in (False, True))
    size = count * pools.device.geometry.page_bytes
    results.add(
        "restore",
        store=name,
        layout=pools.host.layout,
        MiB=size >> 20,
        to_host_GBps=round(size / read / 1e9, 2),
        to_device_GBps=round(size / whole / 1e9, 2),
        percent=round(100 * read / whole, 1),
    )


def _read(
    pairs: Any, pools: PairedPools, hashes: list[str], slots: torch.Tensor, to_device: bool
) -> float:
    """Seconds until all pages are in the host pool, or on the device."""

    def read(first: int) -> int:
        some = slice(first, first + AT_A_TIME)
        found = pairs.batch_get(hashes[some], pools.target_spans(slots[some]), None)
        assert found.usable_pages == len(hashes[some]), f"{found.usable_pages} pages were read"
        return first

    start, loading = time.perf_counter(), []
    with ThreadPoolExecutor(1) as reader:
        for first in reader.map(read, range(0, len(hashes), AT_A_TIME)):
            if to_device:
                some = slots[first : first + AT_A_TIME]
                loading.append(pools.load_back(some, torch.arange(first, first + len(some))))
    for one in loading:
        one.synchronize()
    return time.perf_counter() - start
