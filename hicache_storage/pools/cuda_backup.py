"""Backup on CUDA, by the ways that `strategy` chooses.

Nothing here waits for the device. What a call costs the calling thread,
`benchmarks/results/gpu_transfer.md` says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .direct import Direct
from .indices import Slots
from .lanes import Lane
from .moves import Moves
from .routes import Routes
from .row_copies import RowCopies, view_copies
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
    moves = Moves(device_slots, host_slots)
    by_way: dict[Way, list[Routes]] = {}
    for pair in pairs:
        by_way.setdefault(way_of(lane, pair, moves.run_pages, strategy), []).append(pair)
    if "staged" in by_way:
        _backup_staged(by_way["staged"], moves, lane, strategy, after)
    for pair in by_way.get("rows", ()):
        ordered = moves.in_order
        for ours, theirs in zip(pair.spaced or (), pair.host.parts, strict=True):
            rows = view_copies(ours, theirs, ordered.device, ordered.host, ordered.runs)
            lane.copy(rows, to_device=False, pinned=pair.pinned)
    idle = not by_way.keys() & {"staged", "rows"}
    for pair in by_way.get("direct", ()):
        direct = Direct(lane, pair, moves, to_device=False)
        if idle:
            direct.begin()
            idle = False
        for layer in pair.host.layers:
            direct.copy(layer)
    if "kernel" in by_way:
        _backup_by_kernel(by_way["kernel"], moves, lane)
    return [lane.record(lane.link)]


def way_of(lane: Lane, pair: Routes, run_pages: Callable[[], float], strategy: Strategy) -> Way:
    """How the pair's pages go; see `backup_way`."""
    return backup_way(
        pair.geometry,
        pair.layout,
        run_pages,
        strategy,
        kernels=lane.reaches(pair),
        dense=pair.stretches is not None,
        spaced=pair.spaced is not None,
    )


def _backup_by_kernel(pairs: Sequence[Routes], moves: Moves, lane: Lane) -> None:
    on_device, in_host = lane.upload(lane.link, moves.device, moves.host)
    with lane.on(lane.link):
        for pair in pairs:
            lane.mover.move(
                pair.host,
                on_device,
                in_host,
                pair.host.layers,
                to_pool=False,
                programs=WRITING_PROGRAMS,
            )


def _backup_staged(
    pairs: Sequence[Routes],
    moves: Moves,
    lane: Lane,
    strategy: Strategy,
    after: Sequence[Any],
) -> None:
    """All layers of some pages at a time, of target and draft together; a kernel takes the first
    ones, so that the link is busy meanwhile."""
    if strategy == "auto" and all(lane.reaches(pair) for pair in pairs):
        first, moves = moves.split(pages_first(len(moves)))
        _backup_by_kernel(pairs, first, lane)
        if not len(moves):
            return
    lane.behind(lane.side, after)
    device_slots, host_slots = moves.in_order.device, moves.in_order.host
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
