"""One rank of `gpu_ranks.py`: its device, its pools, its ceiling, and what it measures of them."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from gpu_pools import draw, every_tensor, in_order, no_collection
from rank_meeting import Meeting
from rank_rates import WAYS, Case, Copy, Found, Row, cases

from hicache_storage.pools import numa
from hicache_storage.pools.device import DevicePool, MHADevicePool, MLADevicePool
from hicache_storage.pools.geometry import PageGeometry
from hicache_storage.pools.layouts import Layout
from hicache_storage.pools.memory import HostMemory
from hicache_storage.pools.paired import PairedPools

PAGE_SIZE = 64
HEADS = 4
"""Of a rank: one of two has half of 8."""
DRAFT = PageGeometry("mha", 1, HEADS, 128, 128, PAGE_SIZE, torch.bfloat16)
MODELS = {
    "MHA 32 layers": PageGeometry("mha", 32, HEADS, 128, 128, PAGE_SIZE, torch.bfloat16),
    "MLA 61 layers": PageGeometry("mla", 61, 1, 576, 0, PAGE_SIZE, torch.bfloat16),
}
LAYOUTS: tuple[Layout, ...] = ("layer_first", "page_first")
REPEATS = 3
"""Copies each way where both ways move: one direction starts when the call for the other returns,
and weighs less among three."""
POISON = 0xAB


class Moving(Protocol):
    """A copy under way."""

    def done(self) -> bool:
        """Whether every byte has arrived. Never waits."""
        ...


Ask = tuple[str, Callable[[], Moving]]
"""Which way a copy goes, and what starts it."""


@dataclass(frozen=True)
class Options:
    device: str
    ranks: int
    tokens: int
    rounds: int
    quick: bool

    @property
    def pages(self) -> int:
        """Pages that one copy moves."""
        return self.tokens // PAGE_SIZE

    def models(self) -> dict[str, PageGeometry]:
        if not self.quick:
            return MODELS
        return {name: replace(each, layers=each.layers // 4) for name, each in MODELS.items()}

    def size_bytes(self, model: str) -> int:
        """Of one copy: target and draft."""
        return self.pages * (self.models()[model].page_bytes + DRAFT.page_bytes)


class Arrived:
    """A copy without CUDA: done when the call returns."""

    def done(self) -> bool:
        return True


class Seen:
    """A copy on a CUDA stream, done when its event is."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def done(self) -> bool:
        return bool(self._event.query())


class Plain:
    """The ceiling: plain copies, each way between a buffer of its own on the device and one in
    host memory that is pinned as a host pool is, each on a stream of its own."""

    def __init__(self, size_bytes: int, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.memory = HostMemory(2 * size_bytes, pin=self.cuda)  # pinned as long as this lives
        self.device = torch.empty(2 * size_bytes, dtype=torch.uint8, device=device)
        draw([self.device])
        self.memory.tensor.copy_(self.device)
        self.streams = {
            verb: torch.cuda.Stream(device) if self.cuda else None for verb in ("backup", "load")
        }

    def ask(self, verb: str, size_bytes: int) -> Ask:
        some = slice(0, size_bytes) if verb == "backup" else slice(-size_bytes, None)
        host, device = self.memory.tensor[some], self.device[some]
        to, source = (host, device) if verb == "backup" else (device, host)

        def copy() -> Moving:
            if not self.cuda:
                to.copy_(source)
                return Arrived()
            with torch.cuda.stream(self.streams[verb]):
                to.copy_(source, non_blocking=True)
                event = torch.cuda.Event()
                event.record()
            return Seen(event)

        return verb, copy


class Pair:
    """A target and its draft on the device and in host memory, both with twice as many pages as a
    copy moves. Pages go out from one random half to one of the host's, and come back from the
    other half to the other: copies both ways share no slot."""

    def __init__(
        self, geometry: PageGeometry, layout: Layout, count: int, device: torch.device
    ) -> None:
        self.target = _device_pool(geometry, 2 * count, device)
        self.draft = _device_pool(DRAFT, 2 * count, device)
        self.pools = PairedPools(self.target, host_pages=2 * count, layout=layout)
        if not self.pools.register_draft(self.draft):
            raise RuntimeError(f"no pairs of pages: {layout} refuses the draft")
        on_device, in_host = (in_order("random", 2 * count, 2 * count) for _ in range(2))
        self.out = on_device[:count].clone(), in_host[:count].clone()
        self.back = on_device[count:].clone(), in_host[count:].clone()
        self.tensors = [*every_tensor(self.target), *every_tensor(self.draft)]

    def ask(self, verb: str) -> Ask:
        if verb == "backup":
            return verb, lambda: self.pools.backup(*self.out)
        pages, host = self.back
        return verb, lambda: self.pools.load_back(host, pages)

    def comes_back(self, verbs: Sequence[str], move: Callable[[], object]) -> bool:
        """Whether all bytes are as they were after `move`, which copies these ways.

        They are drawn anew, so that a page kept from before would show. Pages that are to come
        back are poisoned before it, those that went out after it, and both come back.
        """
        draw(self.tensors)
        kept = [tensor.clone() for tensor in self.tensors]
        pages, host = self.back
        self.pools.backup(pages, host).wait()
        self._poison(pages)
        move()
        if "load" not in verbs:
            self.pools.load_back(host, pages).synchronize()
        if "backup" in verbs:
            pages, host = self.out
            self._poison(pages)
            self.pools.load_back(host, pages).synchronize()
        return all(map(torch.equal, kept, self.tensors))

    def _poison(self, pages: torch.Tensor) -> None:
        on_device = pages.to(self.target.device)
        for pool in (self.target, self.draft):
            for layer in range(pool.geometry.layers):
                for rows in pool.page_rows(layer):
                    rows[on_device] = POISON
        settle(self.target.device)


def _device_pool(geometry: PageGeometry, pages: int, device: torch.device) -> DevicePool:
    cls = MHADevicePool if geometry.kind == "mha" else MLADevicePool
    pool = cls(geometry, pages, device)
    draw(every_tensor(pool))
    return pool


def settle(device: torch.device) -> None:
    """Returns when the device has nothing left to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def move(asks: Sequence[Ask], size_bytes: int) -> list[Copy]:
    """Asks for these copies one after the other, and watches until all have arrived."""
    begun: list[tuple[str, float, float, Moving]] = []
    arrived: dict[int, float] = {}

    def look() -> None:
        for place, (*_, moving) in enumerate(begun):
            if place not in arrived and moving.done():
                arrived[place] = time.perf_counter()

    for verb, ask in asks:
        asked = time.perf_counter()
        moving = ask()
        begun.append((verb, asked, time.perf_counter(), moving))
        look()
    while len(arrived) < len(begun):
        look()
    return [
        Copy(verb, asked, called, arrived[place], size_bytes)
        for place, (verb, asked, called, _) in enumerate(begun)
    ]


def work(rank: int, meeting: Meeting, send: Callable[[Any], None], options: Options) -> None:
    """What one process does: sends where it is, then what it found of each model and layout."""
    device = torch.device("cpu")
    if options.device == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    torch.manual_seed(1 + rank)
    ceiling = Plain(max(map(options.size_bytes, options.models())), device)
    settle(device)
    send(_place(device, ceiling))
    for model, geometry in options.models().items():
        for layout in LAYOUTS:
            pair = Pair(geometry, layout, options.pages, device)
            size = options.size_bytes(model)
            found = _measure(rank, meeting, options, ceiling, pair, size)
            equal = _compare(rank, meeting, options, pair, size)
            lies_on = memory_nodes(pair.pools.host.parts[0].data_ptr())
            send({"found": found, "equal": equal, "host_pool_MiB_by_node": lies_on})
            del pair
            gc.collect()  # its memory, before there is more


def _asks(case: Case, way: str, ceiling: Plain, pair: Pair, size_bytes: int) -> list[Ask]:
    repeats = REPEATS if len(case.verbs) > 1 else 1
    return [
        ceiling.ask(verb, size_bytes) if way == "ceiling" else pair.ask(verb) for verb in case.verbs
    ] * repeats


def _measure(
    rank: int, meeting: Meeting, options: Options, ceiling: Plain, pair: Pair, size_bytes: int
) -> Found:
    """This rank's copies. Every way once a round, in an order that moves on by one each round;
    the first round is to warm up. Nothing is collected meanwhile."""
    ways = [(case, way) for case in cases(options.ranks) for way in WAYS]
    found: Found = {(case, way): [] for case, way in ways if rank in case.ranks}
    with no_collection():
        for turn in range(options.rounds + 1):
            first = turn % len(ways)
            for case, way in ways[first:] + ways[:first]:
                asks = _asks(case, way, ceiling, pair, size_bytes)
                settle(pair.target.device)
                meeting.start()
                if rank not in case.ranks:
                    continue
                copies = move(asks, size_bytes)
                if turn:
                    found[case, way].append(copies)
    return found


def _compare(
    rank: int, meeting: Meeting, options: Options, pair: Pair, size_bytes: int
) -> dict[Case, bool]:
    """Whether the bytes of each case come back, moved as they were measured."""
    equal = {}
    for case in cases(options.ranks):
        if rank not in case.ranks:
            meeting.start()
            continue
        asks = [pair.ask(verb) for verb in case.verbs]
        if len(case.verbs) > 1:
            asks *= REPEATS

        def copies(asks: list[Ask] = asks) -> None:
            meeting.start()
            move(asks, size_bytes)

        equal[case] = pair.comes_back(case.verbs, copies)
    return equal


def _place(device: torch.device, ceiling: Plain) -> Row:
    """Where this rank's device and pinned memory are."""
    place: Row = {"device": "cpu", "cpus": len(os.sched_getaffinity(0))}
    if device.type == "cuda":
        properties: Any = torch.cuda.get_device_properties(device)
        place["device"] = properties.name
        if hasattr(properties, "pci_bus_id"):  # not in every release of torch
            place["pci"] = (
                f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}"
                f":{properties.pci_device_id:02x}"
            )
        place["device_node"] = numa.node_of(device.index)
    place["memory_placed_on_node"] = ceiling.memory.node
    place["ceiling_MiB_by_node"] = memory_nodes(ceiling.memory.tensor.data_ptr())
    return place


def memory_nodes(address: int, maps: Path = Path("/proc/self/numa_maps")) -> dict[str, int] | None:
    """MiB on each NUMA node, by number, of the mapping that this address is in; None if the
    kernel doesn't say. Memory that lies next to it with the same policy counts too."""
    found = None
    try:
        for line in maps.read_text().splitlines():
            start, *fields = line.split()
            if int(start, 16) > address:
                break
            found = dict(field.split("=", 1) for field in fields if "=" in field)
    except (OSError, ValueError):
        return None
    if found is None:
        return None
    page_kib = int(found.get("kernelpagesize_kB", 4))
    return {
        name[1:]: int(pages) * page_kib >> 10
        for name, pages in found.items()
        if name[:1] == "N" and name[1:].isdigit()
    }
