"""Backup on CUDA, by the ways that `strategy` chooses.

The host waits for nothing here; what it costs the calling thread is 0.5 to 1 us a copy and 60 to 100
us a launch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from .indices import Slots
from .lanes import Lane
from .routes import Routes
from .row_copies import Ordered, RowCopies, view_copies
from .staging import pages_at_a_time, part_copies, pieces_of
from .strategy import Strategy, Way, backup_way, pages_first

WRITING_PROGRAMS = 2
"""Multiprocessors of a kernel that writes to the host: 2 fill the link, and more of them hold up
everything else on the device."""


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
    slots = Ordered(device_slots, host_slots)
    by_way: dict[Way, list[Routes]] = {}
    for pair in pairs:
        by_way.setdefault(way_of(lane, pair, slots.run_pages, strategy), []).append(pair)
    staged = by_way.get("staged", [])
    kernels = all(lane.reaches(pair) for pair in staged)
    first = pages_first(len(host_slots), strategy, kernels=kernels)
    by_kernel = dict.fromkeys(staged, first) if first else {}
    by_kernel |= dict.fromkeys(by_way.get("kernel", ()), len(host_slots))
    if by_kernel:
        _backup_by_kernel(by_kernel, slots, lane)
    if staged and first < len(host_slots):
        _backup_staged(staged, slots.device[first:], slots.host[first:], lane)
    for pair in by_way.get("rows", ()):
        for ours, theirs in zip(pair.spaced or (), pair.host.parts, strict=True):
            rows = view_copies(ours, theirs, slots.device, slots.host, slots.runs)
            lane.copy(rows, to_device=False, pinned=pair.pinned)
    idle = not by_kernel and not by_way.keys() & {"staged", "rows"}
    for pair in by_way.get("direct", ()):
        pages = pair.needed_stretches().of(slots.device, slots.host, slots.runs)
        for layer in pair.host.layers:
            copies = pages.copies(layer, to_device=False)
            lane.copy_stretches(copies, pinned=pair.pinned, idle=idle)
            idle = False
    return [lane.record(lane.link)]


def way_of(lane: Lane, pair: Routes, run_pages: Callable[[], float], strategy: Strategy) -> Way:
    return backup_way(
        pair.geometry,
        pair.layout,
        run_pages,
        strategy,
        kernels=lane.reaches(pair),
        dense=pair.stretches is not None,
        spaced=pair.spaced is not None,
    )


def _backup_by_kernel(pairs: Mapping[Routes, int], slots: Ordered, lane: Lane) -> None:
    """So many of the first pages of each pair."""
    on_device, in_host = lane.upload(lane.link, slots.device, slots.host)
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
    at_a_time = pages_at_a_time(lane, sum(page_bytes))
    (on_device,) = lane.upload(lane.side, device_slots)
    for some in pieces_of(len(host_slots), at_a_time, "first"):
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
                copies += part_copies(area, pair.host, np.arange(len(slots)), slots)
        lane.wait(lane.link, lane.record(lane.side))
        lane.copy(copies, to_device=False, pinned=all(pair.pinned for pair in pairs))
        half.free = lane.record(lane.link)
