"""The models whose pages `gpu_transfer.py` moves, ways of moving them in turns, and the results."""

from __future__ import annotations

import functools
import gc
import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from hicache_storage.pools.device import DevicePool, MHADevicePool, MLADevicePool
from hicache_storage.pools.geometry import PageGeometry
from hicache_storage.pools.layouts import Layout
from hicache_storage.pools.memory import HostMemory
from hicache_storage.pools.paired import PairedPools
from hicache_storage.pools.strategy import Strategy

TOKENS = 16384
SHAPES = {
    "MHA 32 layers": PageGeometry("mha", 32, 8, 128, 128, 64, torch.bfloat16),
    "MLA 61 layers": PageGeometry("mla", 61, 1, 576, 0, 64, torch.bfloat16),
    "draft 1 layer": PageGeometry("mha", 1, 8, 128, 128, 64, torch.bfloat16),
}
VERBS = ("backup", "load")
Row = dict[str, Any]
Slots = tuple[torch.Tensor, torch.Tensor]
"""Device and host pages."""


class Results:
    """Rows by part, printed as they come."""

    def __init__(self) -> None:
        self.rows: dict[str, list[Row]] = {}

    def add(self, part: str, **row: Any) -> None:
        self.rows.setdefault(part, []).append(row)
        print(part, *(f"{name}={value}" for name, value in row.items()), flush=True)


def device_pool(geometry: PageGeometry) -> DevicePool:
    """Room for TOKENS tokens, random bytes."""
    cls = MHADevicePool if geometry.kind == "mha" else MLADevicePool
    pool = cls(geometry, TOKENS // geometry.page_size, "cuda")
    draw(every_tensor(pool))
    return pool


def layers_apart(geometry: PageGeometry) -> DevicePool:
    """An MHA pool over tensors that lie anywhere, as engines have them."""
    shape = TOKENS, geometry.heads, geometry.head_dim
    k, v = (
        [torch.empty(shape, dtype=geometry.dtype, device="cuda") for _ in range(geometry.layers)]
        for _ in range(2)
    )
    pool = MHADevicePool.from_tensors(k, v, geometry.page_size)
    draw(every_tensor(pool))
    return pool


def every_tensor(pool: DevicePool) -> list[torch.Tensor]:
    return [
        tensor.view(torch.uint8)
        for layer in range(pool.geometry.layers)
        for tensor in pool.layer_tensors(layer)
    ]


def draw(tensors: Sequence[torch.Tensor]) -> None:
    for tensor in tensors:
        tensor.random_(0, 256)


def comes_back(tensors: Sequence[torch.Tensor], backup: Any, load: Any) -> bool:
    """Whether the bytes of these device tensors are the same after backup, poison and load."""
    torch.cuda.synchronize()
    backup()
    kept = [tensor.clone() for tensor in tensors]
    for tensor in tensors:
        tensor.fill_(0xAB)
    torch.cuda.synchronize()  # a way's streams need not wait for this one
    load()
    return all(map(torch.equal, kept, tensors))


def in_order(order: str, pages: int, count: int) -> torch.Tensor:
    """`count` of `pages` slots: anywhere, in runs of four with other runs between them, or in a
    row."""
    if order == "random":
        return torch.randperm(pages)[:count]
    if order == "in a row":
        return torch.arange(count)
    runs = torch.arange(pages).split(4)
    return torch.cat([runs[i] for i in torch.randperm(len(runs)).tolist()])[:count]


@dataclass
class Way:
    """One way of moving the same number of bytes there and back.

    `backup` and `load` return when the bytes have arrived; what they return is the seconds that
    the call alone took, or None. `before` is what to set up first, not timed.
    """

    backup: Callable[[], float | None]
    load: Callable[[], float | None]
    before: Callable[[], object] = lambda: None


def ours(pools: PairedPools, slots: Slots, strategy: Strategy, times: int = 1) -> Way:
    """The same pages so many times, one call behind the other."""
    pages, host = slots

    def backup() -> float:
        start = time.perf_counter()
        moved = [pools.backup(pages, host) for _ in range(times)]
        asked = time.perf_counter() - start
        moved[-1].wait()
        return asked / times

    def load() -> float:
        start = time.perf_counter()
        loading = [pools.load_back(host, pages) for _ in range(times)]
        asked = time.perf_counter() - start
        loading[-1].synchronize()
        return asked / times

    return Way(backup, load, lambda: setattr(pools, "strategy", strategy))


class Ceiling:
    """Plain copies between one pinned buffer, pinned as a host pool is, and one device buffer."""

    def __init__(self, size_bytes: int) -> None:
        self.memory = HostMemory(size_bytes, pin=True)  # pinned as long as this lives
        self.device = torch.empty(size_bytes, dtype=torch.uint8, device="cuda").random_(0, 256)
        self.memory.tensor.copy_(self.device)

    def way(self, size_bytes: int, times: int = 1) -> Way:
        host, device = self.memory.tensor[:size_bytes], self.device[:size_bytes]

        def copy(to: torch.Tensor, source: torch.Tensor) -> None:
            for _ in range(times):
                to.copy_(source, non_blocking=True)
            torch.cuda.synchronize()

        return Way(lambda: copy(host, device), lambda: copy(device, host))


@dataclass
class Times:
    """Seconds until the bytes had arrived, and of the calls alone."""

    whole: dict[str, list[float]] = field(default_factory=lambda: {verb: [] for verb in VERBS})
    call: dict[str, list[float]] = field(default_factory=lambda: {verb: [] for verb in VERBS})

    def middle(self, verb: str) -> float:
        return statistics.median(self.whole[verb])

    def call_ms(self, verb: str) -> float | None:
        found = self.call[verb]
        return round(statistics.median(found) * 1e3, 2) if found else None

    def spread_percent(self, verb: str) -> float:
        """The range of the middle half, of the median."""
        ordered = sorted(self.whole[verb])
        quarter = len(ordered) // 4
        return round(100 * (ordered[-1 - quarter] / ordered[quarter] - 1), 1)


def turns(names: Iterable[str], rounds: int) -> Iterator[tuple[str, bool]]:
    """Every name once a round, each round in another order, since what came before leaves caches
    and the device's tables and clock as it needed them; and whether it counts: the first round is
    to warm up. Nothing is collected meanwhile."""
    names, shuffled = list(names), random.Random(1)
    with no_collection():
        for turn in range(rounds + 1):
            for name in shuffled.sample(names, len(names)):
                yield name, turn > 0


def in_turns(ways: dict[str, Way], rounds: int, times: int = 1, warm: int = 0) -> dict[str, Times]:
    """Seconds of every way, in `turns`; so many times in its turn, the first `warm` of which don't
    count."""
    found = {name: Times() for name in ways}
    for name, counts in turns(ways, rounds):
        way = ways[name]
        way.before()
        for verb, call in itertools.product(VERBS, range(times)):
            run = way.backup if verb == "backup" else way.load
            torch.cuda.synchronize()
            began = time.perf_counter()
            asked = run()
            took = time.perf_counter() - began
            if not counts or call < warm:
                continue
            found[name].whole[verb].append(took)
            if asked is not None:
                found[name].call[verb].append(asked)
    return found


@contextmanager
def timed_events() -> Iterator[None]:
    """Events made meanwhile know their time."""
    untimed = torch.cuda.Event
    torch.cuda.Event = functools.partial(untimed, enable_timing=True)  # type: ignore[assignment,misc]
    try:
        yield
    finally:
        torch.cuda.Event = untimed  # type: ignore[misc]


@contextmanager
def no_collection() -> Iterator[None]:
    """A collection in the middle of a call would count as the call's time."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def add_rates(
    results: Results, part: str, found: dict[str, Times], size_bytes: int, **about: Any
) -> None:
    """A row for each way, as rates and as parts of the ceiling's in the same rounds."""
    ceiling = found["ceiling"]
    for name, times in found.items():
        row: Row = {"way": name}
        for verb in VERBS:
            row[f"{verb}_GBps"] = round(size_bytes / times.middle(verb) / 1e9, 2)
            row[f"{verb}_percent"] = round(100 * ceiling.middle(verb) / times.middle(verb), 1)
            row[f"{verb}_spread"] = times.spread_percent(verb)
            row[f"{verb}_call_ms"] = times.call_ms(verb)
        results.add(part, **about, MiB=size_bytes >> 20, **row)


def pools_for(pool: DevicePool, layout: Layout) -> PairedPools:
    """With twice as many host pages: so that random ones don't lie in a row once they are in the
    order of slots, which copies go by."""
    return PairedPools(pool, host_pages=2 * pool.num_pages, layout=layout)
