"""Other ways of moving pages, tried out against those that the package has: `--parts variants`.

Each is a small change to the package, made from outside while its turn lasts. What wins here goes
into the package; see `results/gpu_link.md` for the readings that led to them.
"""

from __future__ import annotations

import cProfile
import io
import pstats
from collections.abc import Callable, Sequence
from typing import Any

import torch
from gpu_beside import Products
from gpu_pools import (
    SHAPES,
    Ceiling,
    Results,
    Slots,
    Way,
    add_rates,
    comes_back,
    device_pool,
    every_tensor,
    in_order,
    in_turns,
    ours,
    pools_for,
)

from hicache_storage.pools import copy_engine, cuda_copies, strategy
from hicache_storage.pools.indices import Slots as HostSlots
from hicache_storage.pools.lanes import Lane
from hicache_storage.pools.layouts import Layout
from hicache_storage.pools.paired import PairedPools
from hicache_storage.pools.routes import Routes
from hicache_storage.pools.row_copies import RowCopies, runs, view_copies
from hicache_storage.pools.strategy import Strategy

Copy = Callable[..., Any]
Ends = tuple[HostSlots, HostSlots]
"""Device and host slots, in the order of the host's."""
_PLACES: dict[str, Any] = {
    "cuda_copies": cuda_copies,
    "copy_engine": copy_engine,
    "strategy": strategy,
}
_USUAL = {
    name: getattr(_PLACES[name.partition(".")[0]], name.partition(".")[2])
    for name in (
        "cuda_copies.backup",
        "cuda_copies.load_back",
        "cuda_copies._Loading",
        "cuda_copies.WRITING_PROGRAMS",
        "cuda_copies.READING_PROGRAMS",
        "copy_engine.copy",
        "copy_engine._BATCH",
        "strategy.KERNEL_SHARE",
    )
}
_streams: list[Any] = []
"""Made by `variants`: as many as the widest way takes beside the lane's own."""


def changed(pools: PairedPools, chosen: Strategy = "auto", staged_mib: int = 64, **to: Any) -> Any:
    """What sets the package up for one way: everything as usual but for `to`, by the names in
    `_USUAL` with "__" for the dot."""

    def before() -> None:
        for name, value in _USUAL.items():
            place, _, attribute = name.partition(".")
            setattr(_PLACES[place], attribute, to.get(name.replace(".", "__"), value))
        pools.strategy = chosen
        for lane in (pools._out_lane, pools._back_lane):
            assert lane is not None
            lane.staged_bytes = (staged_mib << 20) + (1 << 20)

    return before


def extra_streams(lane: Lane, count: int) -> list[Any]:
    """Streams beside the lane's own, behind what it waits for."""
    for stream in _streams[:count]:
        lane.wait(stream, lane.record(lane.link))
    return _streams[:count]


def all_rows(pair: Routes, layers: slice, to_device: bool, slots: Ends, found: Any) -> list[Any]:
    """A page's layers as rows of one copy."""
    device_slots, host_slots = slots
    copies = []
    for here, there in zip(pair.spaced or (), pair.host.parts, strict=True):
        ends = here[:, layers], there[:, layers]
        if to_device:
            copies += view_copies(ends[1], ends[0], host_slots, device_slots, found)
        else:
            copies += view_copies(ends[0], ends[1], device_slots, host_slots, found)
    return copies


def split_backup(share: float, programs: int = 2) -> Copy:
    """The kernel takes a share of the layers while the copy engine takes the rest."""

    def backup(
        pairs: Sequence[Routes],
        device_slots: HostSlots,
        host_slots: HostSlots,
        lane: Lane,
        chosen: Strategy,
        after: Sequence[Any] = (),
    ) -> list[Any]:
        lane.begin(after)
        slots = cuda_copies._by_host(device_slots, host_slots)
        found = runs(slots[1], slots[0])
        on_device, in_host = (lane.upload(each, lane.side) for each in slots)
        for pair in pairs:
            cut = round(len(pair.host.layers) * share)
            with lane.on(lane.side):
                lane.mover.move(
                    pair.host,
                    on_device,
                    in_host,
                    pair.host.layers[:cut],
                    to_pool=False,
                    programs=programs,
                )
            copies = all_rows(pair, slice(cut, None), False, slots, found)
            lane.copy(copies, to_device=False, pinned=pair.pinned)
        return [lane.record(lane.link), lane.record(lane.side)]

    return backup


def spread_copy(streams: int, batch: int) -> Copy:
    """Pieces on several streams in turns, so many a call, or an eighth of that if they have rows.
    The lane's stream is behind all of them where it backs up."""

    def copy(copies: Sequence[RowCopies], stream: int, *, to_device: bool, batched: bool) -> None:
        link = torch.cuda.ExternalStream(stream)
        others = _streams[: streams - 1]
        handles = [stream, *(each.cuda_stream for each in others)]
        if not to_device:
            for each in others:
                each.wait_stream(link)
        turn = 0
        for piece in copies:
            step = batch if piece.height == 1 else max(1, batch // 8)
            for start in range(0, len(piece.source), step):
                part = piece._replace(
                    source=piece.source[start : start + step],
                    target=piece.target[start : start + step],
                )
                _USUAL["copy_engine.copy"](
                    [part], handles[turn % streams], to_device=to_device, batched=batched
                )
                turn += 1
        if not to_device:
            for each in others:
                link.wait_stream(each)

    return copy


def spread_load(streams: int) -> type:
    """A load-back whose copies go to several streams."""

    class Spread(cuda_copies._Loading):
        def __init__(self, lane: Lane, *slots: HostSlots) -> None:
            super().__init__(lane, *slots)
            self.extra = extra_streams(lane, streams - 1)

        def arrived(self) -> tuple[Any, ...]:
            return *super().arrived(), *(self.lane.record(each) for each in self.extra)

    return Spread


def grouped_load(sizes: Sequence[int], streams: int = 1) -> Copy:
    """Layers in groups, a page's layers of a group as rows of one copy: the sizes of the first
    groups, the last of them for all others."""

    def load_back(
        pairs: Sequence[Routes],
        host_slots: HostSlots,
        device_slots: HostSlots,
        lane: Lane,
        chosen: Strategy,
        after: Sequence[Any] = (),
    ) -> list[tuple[Any, ...]]:
        lane.begin(after)
        slots = cuda_copies._by_host(device_slots, host_slots)
        found = runs(slots[1], slots[0])
        used = [lane.link, *extra_streams(lane, streams - 1)]
        events: list[tuple[Any, ...]] = []
        layers = max(pair.geometry.layers for pair in pairs)
        while len(events) < layers:
            start = len(events)
            size = min(_group(sizes, start), layers - start)
            for pair in pairs:
                if start < pair.geometry.layers:
                    copies = all_rows(pair, slice(start, start + size), True, slots, found)
                    lane.copy(copies, to_device=True, pinned=pair.pinned)
            events += [tuple(lane.record(each) for each in used)] * size
        return events

    return load_back


def _group(sizes: Sequence[int], start: int) -> int:
    at = 0
    for size in sizes:
        if at == start:
            return size
        at += size
    return sizes[-1]


class KernelBeside(cuda_copies._Loading):
    """The kernel's layers on a stream of their own, while the copy engine takes the rest."""

    def __init__(self, lane: Lane, *slots: HostSlots) -> None:
        super().__init__(lane, *slots)
        self.kernels = extra_streams(lane, 1)[0]
        self._lists: Any = None

    def _by_kernel(self, pair: Routes, layers: range) -> None:
        lane = self.lane
        if self._lists is None:
            self._lists = [
                lane.upload(each, self.kernels) for each in (self.device_slots, self.host_slots)
            ]
        with lane.on(self.kernels):
            lane.mover.move(
                pair.host,
                *self._lists,
                layers,
                to_pool=True,
                programs=cuda_copies.READING_PROGRAMS,
            )

    def arrived(self) -> tuple[Any, ...]:
        return *super().arrived(), self.lane.record(self.kernels)


def one_call(copies: Sequence[RowCopies], stream: int, *, to_device: bool, batched: bool) -> None:
    """K and V of a staging half in one batch, where all are of one shape."""
    if len({piece[2:] for piece in copies}) == 1:
        source, target = (
            torch.cat([torch.from_numpy(piece[end].view("int64")) for piece in copies])
            .numpy()
            .view("uint64")
            for end in (0, 1)
        )
        copies = [copies[0]._replace(source=source, target=target)]
    _USUAL["copy_engine.copy"](copies, stream, to_device=to_device, batched=batched)


def layer_first(pools: PairedPools) -> dict[str, Any]:
    spread, wider = (
        {
            "cuda_copies___Loading": spread_load(streams),
            "copy_engine__copy": spread_copy(streams, 256),
            "copy_engine___BATCH": 256,
        }
        for streams in (2, 4)
    )
    steps = (1, 1, 2, 4, 8)

    def with_load(load: Copy, **more: Any) -> Any:
        return changed(pools, cuda_copies__load_back=load, **more)

    def with_backup(backup: Copy) -> Any:
        return changed(pools, cuda_copies__backup=backup)

    return {
        "as it is": changed(pools),
        "kernel": changed(pools, "kernel"),
        "kernel, 4 and 16 programs": changed(
            pools, "kernel", cuda_copies__WRITING_PROGRAMS=4, cuda_copies__READING_PROGRAMS=16
        ),
        "copy engine": changed(pools, "copy_engine"),
        "copy engine, 32 a call": changed(pools, "copy_engine", copy_engine___BATCH=32),
        "copy engine, 2 streams": changed(pools, "copy_engine", **spread),
        "copy engine, 4 streams": changed(pools, "copy_engine", **wider),
        "split 1/4; load by 1 1 2 4 8": changed(
            pools,
            cuda_copies__backup=split_backup(1 / 4),
            cuda_copies__load_back=grouped_load(steps),
        ),
        "split 1/2; load by 4": changed(
            pools,
            cuda_copies__backup=split_backup(1 / 2),
            cuda_copies__load_back=grouped_load((4,)),
        ),
        "split 3/4; load by 1": changed(
            pools,
            cuda_copies__backup=split_backup(3 / 4),
            cuda_copies__load_back=grouped_load((1,)),
        ),
        "split 1/2, 1 program; load by 16": changed(
            pools,
            cuda_copies__backup=split_backup(1 / 2, 1),
            cuda_copies__load_back=grouped_load((1, 1, 2, 4, 8, 16)),
        ),
        "load by 1 1 2 4 8, 2 streams": with_load(
            grouped_load(steps, 2), copy_engine__copy=spread_copy(2, 256)
        ),
        "split 1/3": with_backup(split_backup(1 / 3)),
    }


def page_first(pools: PairedPools) -> dict[str, Any]:
    return {
        "as it is": changed(pools),
        "copy engine": changed(pools, "copy_engine"),
        "staging 32 MiB": changed(pools, staged_mib=32),
        "staging 128 MiB": changed(pools, staged_mib=128),
        "staging 256 MiB": changed(pools, staged_mib=256),
        "one call a half": changed(pools, copy_engine__copy=one_call),
        "1 layer in 16 by kernel": changed(pools, strategy__KERNEL_SHARE=16),
        "kernel beside the copies": changed(pools, cuda_copies___Loading=KernelBeside),
        "kernel beside, 1 layer in 4": changed(
            pools, cuda_copies___Loading=KernelBeside, strategy__KERNEL_SHARE=4
        ),
    }


CHOICES: dict[Layout, Callable[[PairedPools], dict[str, Any]]] = {
    "layer_first": layer_first,
    "page_first": page_first,
}


def variants(results: Results, quick: bool) -> None:
    """All of them in turns, for MHA and MLA."""
    _streams.extend(torch.cuda.Stream(priority=-1) for _ in range(3))
    ceiling = Ceiling(2 << 30)
    for name in ("MHA 32 layers", "MLA 61 layers"):
        pool = device_pool(SHAPES[name])
        count = pool.num_pages
        size = count * pool.geometry.page_bytes
        for layout, choices in CHOICES.items():
            pools = pools_for(pool, layout)
            slots = in_order("random", count, count), in_order("random", 2 * count, count)
            ways = {"ceiling": ceiling.way(size)}
            for choice, before in choices(pools).items():
                way = ours(pools, slots, "auto")
                ways[choice] = Way(way.backup, way.load, before)
                before()
                if not comes_back(every_tensor(pool), way.backup, way.load):
                    raise SystemExit(f"{name}, {layout}, {choice}: bytes differ")
            found = in_turns(ways, 2 if quick else 5)
            add_rates(results, "variants", found, size, shape=name, layout=layout)
            if name == "MHA 32 layers" and layout == "layer_first":
                _beside_a_model(results, pools, slots, layout, quick)
            changed(pools)()
    overhead(results)


def _beside_a_model(
    results: Results, pools: PairedPools, slots: Slots, layout: Layout, quick: bool
) -> None:
    """What each backup costs a loop of products."""
    products = Products()
    pages, host = slots
    copies = {}
    for choice, before in CHOICES[layout](pools).items():
        if choice not in ("as it is", "copy engine") and not choice.startswith("split"):
            continue  # what these two lose bounds the others

        def work(before: Any = before) -> list[Any]:
            before()
            return [pools.backup(pages, host), pools.backup(pages, host)]

        copies[choice] = work
    size = 2 * len(pages) * pools.device.geometry.page_bytes
    products.measure(results, copies, size, 1 if quick else 4, layout=layout)


def overhead(results: Results) -> None:
    """Where a call's own time goes, by a draft's calls, which are mostly that."""
    pool = device_pool(SHAPES["draft 1 layer"])
    count = pool.num_pages
    for layout in CHOICES:
        pools = pools_for(pool, layout)
        slots = in_order("random", count, count), in_order("random", 2 * count, count)
        for chosen in ("kernel", "copy_engine"):
            way = ours(pools, slots, chosen)
            way.before()
            for verb, run in (("backup", way.backup), ("load", way.load)):
                for _ in range(20):
                    run()
                profile = cProfile.Profile()
                profile.enable()
                for _ in range(100):
                    run()
                profile.disable()
                text = io.StringIO()
                pstats.Stats(profile, stream=text).sort_stats("tottime").print_stats(22)
                print(f"\n{layout}, {chosen}, {verb}, 100 calls\n{text.getvalue()}", flush=True)
        results.add("overhead", layout=layout, see="the log")
