"""What `gpu_transfer.py` measures beside plain rates: other work on the device, and storage."""

from __future__ import annotations

import hashlib
import itertools
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from gpu_pools import SHAPES, Results, device_pool

from hicache_storage.pools.layouts import LAYOUTS
from hicache_storage.pools.paired import PairedPools
from hicache_storage.pools.strategy import STRATEGIES


def interference(results: Results) -> None:
    """A loop of bfloat16 products alone and beside copies, in turns. The loss counts for the time
    that the copies took."""
    left, right = torch.randn(2, 8192, 8192, device="cuda", dtype=torch.bfloat16).unbind()
    product = torch.empty_like(left)
    model = torch.cuda.Stream()

    def products() -> tuple[torch.cuda.Event, torch.cuda.Event]:
        with torch.cuda.stream(model):
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            for _ in range(60):
                torch.mm(left, right, out=product)
            last.record()
        return first, last

    def beside(copies: Callable[[], list[Any]]) -> tuple[float, float, float]:
        torch.cuda.synchronize()
        first, last = products()
        torch.cuda.synchronize()
        alone = first.elapsed_time(last)
        first, last = products()
        start = time.perf_counter()
        moving = copies()  # behind this stream, which is idle, not behind the products
        for one in moving:
            one.synchronize()
        took = (time.perf_counter() - start) * 1e3
        torch.cuda.synchronize()
        return alone, first.elapsed_time(last), took

    pool = device_pool(SHAPES["MHA 32 layers"])
    count = pool.num_pages
    pages, slots = torch.randperm(count), torch.randperm(2 * count)[:count]
    size = pool.num_pages * pool.geometry.page_bytes
    for _ in range(2):
        products()
    for layout in LAYOUTS:
        pools = PairedPools(pool, host_pages=2 * count, layout=layout)
        for strategy, verb in itertools.product(STRATEGIES, ("backup", "load")):
            pools.strategy = strategy
            copy: Callable[[], Any] = (
                (lambda: pools.backup(pages, slots))  # noqa: B023
                if verb == "backup"
                else (lambda: pools.load_back(slots, pages))  # noqa: B023
            )
            copy().synchronize()
            measured = [beside(lambda: [copy(), copy()]) for _ in range(7)]  # noqa: B023
            alone, with_copies, took = map(statistics.median, zip(*measured, strict=True))
            results.add(
                "interference",
                layout=layout,
                strategy=strategy,
                verb=verb,
                alone_ms=round(alone, 1),
                beside_ms=round(with_copies, 1),
                copies_ms=round(took, 1),
                copies_GBps=round(2 * size / took / 1e6, 1),
                loss_percent=round(100 * (with_copies - alone) / min(took, with_copies), 1),
            )


def restore(results: Results) -> None:
    """Pages from a file store to the host, and to the device: storage fills some while others
    cross the link."""
    from hicache_storage import PairedStore, Store
    from hicache_storage.backends.file import FileBackend, FileConfig

    geometry = SHAPES["MHA 32 layers"]
    pool = device_pool(geometry)
    count, at_a_time = pool.num_pages, 16
    hashes = [hashlib.sha256(str(i).encode()).hexdigest() for i in range(count)]
    directory = tempfile.mkdtemp(prefix="gpu-transfer-")
    try:
        for layout in ("layer_first", "page_first"):
            pools = PairedPools(pool, host_pages=2 * count, layout=layout)
            slots = torch.randperm(2 * count)[:count]
            pools.backup(torch.arange(count), slots).wait()
            store = Store(FileBackend(FileConfig(f"{directory}/{layout}")), name="file")
            store.open()
            with store:
                pairs = PairedStore(store, *pools.namespaces(model="org/model"))
                pairs.batch_set(hashes, pools.target_spans(slots), None)
                read = _restored(pairs, pools, hashes, slots, at_a_time, to_device=False)
                whole = _restored(pairs, pools, hashes, slots, at_a_time, to_device=True)
            size = count * geometry.page_bytes
            results.add(
                "restore",
                layout=layout,
                MiB=size >> 20,
                file_to_host_GBps=round(size / read / 1e9, 2),
                file_to_device_GBps=round(size / whole / 1e9, 2),
                fraction=round(read / whole, 3),
            )
    finally:
        shutil.rmtree(directory)


def _restored(
    pairs: Any,
    pools: PairedPools,
    hashes: list[str],
    slots: torch.Tensor,
    at_a_time: int,
    *,
    to_device: bool,
) -> float:
    times = []
    for _ in range(4):
        start, loading = time.perf_counter(), []
        for first in range(0, len(hashes), at_a_time):
            some = slots[first : first + at_a_time]
            found = pairs.batch_get(
                hashes[first : first + at_a_time], pools.target_spans(some), None
            )
            assert found.usable_pages == len(some)
            if to_device:
                pages = torch.arange(first, first + len(some))
                loading.append(pools.load_back(some, pages))
        for one in loading:
            one.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])
