"""Backup and load-back on CUDA, by the ways that `strategy` chooses.

A copy by engine through staging memory is a pipeline of two halves: one is gathered or scattered on
the device while the other crosses the link. The host waits for nothing here; what it costs the
calling thread is 0.5 to 1 us a copy and 20 us a launch.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from .indices import Slots
from .lanes import Lane
from .movers import KernelMover
from .routes import Route, Routes
from .row_copies import RowCopies, Runs, runs, view_copies
from .strategy import Step, Strategy, Way, backup_way, load_steps, pages_first
from .stretches import Pages, Stretches

WRITING_PROGRAMS = 2
"""Multiprocessors of a kernel that writes to the host: 2 fill the link, and more of them hold up
everything else on the device."""
READING_PROGRAMS = 4
_FEW = 8
"""One part in so many of a staging half's pages makes a few."""
Few = Literal["first", "last", "none"]
"""Where a piece of a few pages goes."""


def backup(
    pairs: Sequence[Routes],
    device_slots: Slots,
    host_slots: Slots,
    lane: Lane,
    strategy: Strategy,
    after: Sequence[Any] = (),
) -> list[Any]:
    """Moves pages of every pair to the host, behind the current stream and the events `after`;
    the events that are done when the bytes have arrived. The lane's device is the current one."""
    lane.begin(after)
    if len(host_slots) == 0:
        return [lane.record(lane.link)]
    device_slots, host_slots = _by_host(device_slots, host_slots)
    run_pages = len(host_slots) / (1 + np.count_nonzero(host_slots[1:] - host_slots[:-1] != 1))
    by_way: dict[Way, list[Routes]] = {}
    for pair in pairs:
        by_way.setdefault(_backup_way(lane, pair, run_pages, strategy), []).append(pair)
    staged = by_way.get("staged", [])
    kernels = all(_kernels(lane, pair) for pair in staged)
    first = pages_first(len(host_slots), strategy, kernels=kernels)
    by_kernel = dict.fromkeys(staged, first) if first else {}
    by_kernel |= dict.fromkeys(by_way.get("kernel", ()), len(host_slots))
    if by_kernel:
        _backup_by_kernel(by_kernel, device_slots, host_slots, lane)
    if staged and first < len(host_slots):
        _backup_staged(staged, device_slots[first:], host_slots[first:], lane)
    for pair in by_way.get("rows", ()):
        found = runs(host_slots, device_slots)
        for ours, theirs in zip(pair.spaced or (), pair.host.parts, strict=True):
            rows = view_copies(ours, theirs, device_slots, host_slots, found)
            lane.copy(rows, to_device=False, pinned=pair.pinned)
    idle = not by_kernel and not by_way.keys() & {"staged", "rows"}
    for pair in by_way.get("direct", ()):
        pages = _stretches(pair).of(device_slots, host_slots, runs(host_slots, device_slots))
        for layer in pair.host.layers:
            copies = pages.copies(layer, to_device=False)
            lane.copy_stretches(copies, pinned=pair.pinned, idle=idle)
            idle = False
    return [lane.record(lane.link)]


def _backup_way(lane: Lane, pair: Routes, run_pages: float, strategy: Strategy) -> Way:
    return backup_way(
        pair.geometry,
        pair.layout,
        run_pages,
        strategy,
        kernels=_kernels(lane, pair),
        dense=pair.stretches is not None,
        spaced=pair.spaced is not None,
    )


def _backup_by_kernel(
    pairs: Mapping[Routes, int], device_slots: Slots, host_slots: Slots, lane: Lane
) -> None:
    """So many of the first pages of each pair."""
    on_device, in_host = lane.upload(lane.link, device_slots, host_slots)
    with lane.on(lane.link):
        for pair, count in pairs.items():
            lane.mover.move(
                pair.host,
                on_device[:count],
                in_host[:count],
                pair.host.layers,
                to_pool=False,
                programs=WRITING_PROGRAMS,
            )


def _backup_staged(
    pairs: Sequence[Routes], device_slots: Slots, host_slots: Slots, lane: Lane
) -> None:
    """All layers of some pages at a time, of target and draft together."""
    page_bytes = [pair.staged_bytes(pair.host.layers) for pair in pairs]
    at_a_time = _pages_at_a_time(lane, sum(page_bytes))
    (on_device,) = lane.upload(lane.side, device_slots)
    for some in _pieces(len(host_slots), at_a_time, "first"):
        slots = host_slots[some]
        half, memory = lane.half(at_a_time * sum(page_bytes))
        lane.wait(lane.side, half.free)
        copies: list[RowCopies] = []
        with lane.on(lane.side):
            for pair, size in zip(pairs, page_bytes, strict=True):
                area = pair.staged(memory, pair.host.layers, at_a_time)
                memory = memory[at_a_time * size :]
                lane.mover.move(
                    area,
                    on_device[some],
                    lane.positions(len(slots)),
                    area.layers,
                    to_pool=False,
                    programs=lane.processors,
                )
                copies += _part_copies(area, pair.host, np.arange(len(slots)), slots)
        lane.wait(lane.link, lane.record(lane.side))
        lane.copy(copies, to_device=False, pinned=all(pair.pinned for pair in pairs))
        half.free = lane.record(lane.link)


def load_back(
    pairs: Sequence[Routes],
    host_slots: Slots,
    device_slots: Slots,
    lane: Lane,
    strategy: Strategy,
    after: Sequence[Any] = (),
) -> list[tuple[Any, ...]]:
    """Moves pages of every pair to the device, layer by layer; for each layer the events that are
    done when it has arrived. The last layer's are done when all have. The lane's device is the
    current one."""
    lane.begin(after)
    loading = _Loading(lane, device_slots, host_slots)
    plans = [loading.plan(pair, strategy) for pair in pairs]
    events: list[tuple[Any, ...]] = []
    for layer in range(max(pair.geometry.layers for pair in pairs)):
        due = False
        for pair, plan in zip(pairs, plans, strict=True):
            if layer in plan:
                loading.take(pair, plan[layer])
                due = True
        if due or not events:
            events.append(loading.arrived())
        else:
            events.append(events[-1])
    return events


class _Loading:
    """One load-back: its slots, and what it needs again and again."""

    def __init__(self, lane: Lane, device_slots: Slots, host_slots: Slots) -> None:
        self.lane = lane
        self._given = device_slots, host_slots
        self._starts_early = False
        """Whether a kernel brings the first layers only: then the device waits for it, and not for
        what is needed later."""
        self._on_link: Any = None
        self._on_side: Any = None
        self._pages: dict[Routes, Pages] = {}
        self._idle = True

    @functools.cached_property
    def _in_order(self) -> tuple[Slots, Slots]:
        """Device and host slots, in the order of the host's."""
        return _by_host(*self._given)

    @functools.cached_property
    def _runs(self) -> Runs:
        device_slots, host_slots = self._in_order
        return runs(host_slots, device_slots)

    def plan(self, pair: Routes, strategy: Strategy) -> Mapping[int, Step]:
        count = len(self._given[0])
        if count == 0:
            return {}
        steps = load_steps(
            pair.geometry,
            pair.layout,
            count,
            count / len(self._runs.start) if pair.layout == "layer_first" else 1.0,
            strategy,
            kernels=_kernels(self.lane, pair),
            dense=pair.stretches is not None,
        )
        hows = {step.how for step in steps.values()}
        self._starts_early |= "kernel" in hows and len(hows) > 1
        return steps

    def take(self, pair: Routes, step: Step) -> None:
        if step.how == "kernel":
            self._by_kernel(pair, step.layers)
        elif step.how == "direct":
            self._direct(pair, step.layers)
        else:
            self._staged(pair, step.layers)
        self._idle = False

    def arrived(self) -> tuple[Any, ...]:
        """The events behind all that has been taken so far."""
        lane = self.lane
        if self._on_side is None:
            return (lane.record(lane.link),)
        return lane.record(lane.link), lane.record(lane.side)

    def _by_kernel(self, pair: Routes, layers: range) -> None:
        lane = self.lane
        if self._on_link is None:
            slots = self._given if self._starts_early else self._in_order
            self._on_link = lane.upload(lane.link, *slots)
        on_device, in_host = self._on_link
        with lane.on(lane.link):
            lane.mover.move(
                pair.host, on_device, in_host, layers, to_pool=True, programs=READING_PROGRAMS
            )

    def _direct(self, pair: Routes, layers: range) -> None:
        if pair not in self._pages:
            self._pages[pair] = _stretches(pair).of(*self._in_order, self._runs)
        for layer in layers:
            copies = self._pages[pair].copies(layer, to_device=True)
            self.lane.copy_stretches(
                copies, pinned=pair.pinned, idle=self._idle and layer == layers[0]
            )

    def _staged(self, pair: Routes, layers: range) -> None:
        lane = self.lane
        device_slots, host_slots = self._in_order
        if self._on_side is None:
            (self._on_side,) = lane.upload(lane.side, device_slots)
        page_bytes = pair.staged_bytes(layers)
        at_a_time = _pages_at_a_time(lane, page_bytes)
        few: Few = "last" if layers.stop == pair.geometry.layers else "none"
        for some in _pieces(len(host_slots), at_a_time, few):
            slots = host_slots[some]
            half, memory = lane.half(at_a_time * page_bytes)
            area = pair.staged(memory, layers, at_a_time)
            lane.wait(lane.link, half.free)
            lane.copy(
                _part_copies(pair.host, area, slots, np.arange(len(slots))),
                to_device=True,
                pinned=pair.pinned,
            )
            lane.wait(lane.side, lane.record(lane.link))
            with lane.on(lane.side):
                lane.mover.move(
                    area,
                    self._on_side[some],
                    lane.positions(len(slots)),
                    layers,
                    to_pool=True,
                    programs=lane.processors,
                )
            half.free = lane.record(lane.side)


def _stretches(pair: Routes) -> Stretches:
    """Of a pair whose pages go direct."""
    if pair.stretches is None:
        raise AssertionError("only stretches go direct")
    return pair.stretches


def _part_copies(
    source: Route, target: Route, source_slots: Slots, target_slots: Slots
) -> list[RowCopies]:
    """Copies between the other ends of two routes, of the layers that both have."""
    layers = source.layers if len(source.layers) <= len(target.layers) else target.layers
    found: Runs = runs(source_slots, target_slots)
    copies: list[RowCopies] = []
    for ends in zip(source.over(layers), target.over(layers), strict=True):
        copies += view_copies(*ends, source_slots, target_slots, found)
    return copies


def _by_host(device_slots: Slots, host_slots: Slots) -> tuple[Slots, Slots]:
    """Both lists in the order of host slots, in which pages that follow each other are found."""
    order = np.argsort(host_slots, kind="stable")
    return device_slots[order], host_slots[order]


def _kernels(lane: Lane, pair: Routes) -> bool:
    return lane.mover.reaches_host and pair.pinned


def _pieces(count: int, at_a_time: int, few: Few) -> list[slice]:
    """`count` pages, so many at a time at most: evenly but for a few that go first, for which the
    link waits, or last, for which the device does."""
    apart = 0 if few == "none" else max(1, at_a_time // _FEW)
    rest = max(0, count - apart)
    pieces = -(-rest // at_a_time)
    bounds = [count - rest + rest * i // pieces for i in range(pieces)] if pieces else []
    bounds = sorted({0, *bounds, count})
    if few == "last":
        bounds = [count - bound for bound in reversed(bounds)]
    return [slice(start, stop) for start, stop in itertools.pairwise(bounds)]


def _pages_at_a_time(lane: Lane, page_bytes: int) -> int:
    return max(1, lane.staged_bytes // page_bytes)


def prepare(pair: Routes, lane: Lane, *, to_pool: bool, strategy: Strategy) -> None:
    """Compiles the kernels that the pair's copies in one direction may need, and has the lane
    make its memory: so that the first copy holds up the caller no longer than others."""
    layers = pair.host.layers
    kernels = _kernels(lane, pair)
    plans = [
        load_steps(
            pair.geometry,
            pair.layout,
            pages,
            1.0,
            strategy,
            kernels=kernels,
            dense=pair.stretches is not None,
        )
        for pages in (1, 1 << 20)
    ]
    groups = {step.layers for plan in plans for step in plan.values() if step.how == "staged"}
    if not to_pool:
        found = {_backup_way(lane, pair, run, strategy) for run in (1.0, 1e6)}
        groups = {layers} if "staged" in found else set()
    for stream in lane.streams:
        lane.upload(stream, np.zeros(1, dtype=np.int64))
    for group in groups:
        page_bytes = pair.staged_bytes(group)
        for _ in range(2):
            lane.half(page_bytes * _pages_at_a_time(lane, page_bytes))
        lane.positions(_pages_at_a_time(lane, page_bytes))
    if not isinstance(lane.mover, KernelMover):
        return
    with lane.on(lane.side):
        for group in groups:
            area = pair.area(lane.allocate(pair.staged_bytes(group)), group, pages=1)
            lane.mover.prepare(area, to_pool=to_pool)
        if kernels:
            lane.mover.prepare(pair.host, to_pool=to_pool)
