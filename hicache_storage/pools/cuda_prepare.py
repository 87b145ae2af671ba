"""What is done before the first copies on CUDA, so that they take no longer than others."""

from __future__ import annotations

import numpy as np

from .cuda_backup import way_of
from .lanes import Lane
from .movers import KernelMover
from .routes import Routes
from .staging import pages_at_a_time
from .strategy import Strategy, load_steps, loads_directly


def prepare(pair: Routes, lane: Lane, *, to_pool: bool, strategy: Strategy) -> None:
    """Compiles the kernels that the pair's copies in one direction may need, and has the lane
    make its memory: so that the first copy holds up the caller no longer than others."""
    layers = pair.host.layers
    kernels = lane.reaches(pair)
    plans = []
    for pages in (1, 1 << 20):
        dense = pair.stretches is not None
        about = pair.geometry, pair.layout, pages
        direct = loads_directly(*about, lambda: 1.0, strategy, kernels=kernels, dense=dense)
        plans.append(load_steps(*about, strategy, kernels=kernels, direct=direct))
    groups = {step.layers for plan in plans for step in plan.values() if step.how == "staged"}
    if not to_pool:
        found = {way_of(lane, pair, run, strategy) for run in (lambda: 1.0, lambda: 1e6)}
        groups = {layers} if "staged" in found else set()
    lane.record(lane.link)  # by CUDA's runtime: gives a new thread the context that drivers need
    for stream in lane.streams:
        lane.upload(stream, np.zeros(1, dtype=np.int64))
    for group in groups:
        page_bytes = pair.staged_bytes(group)
        for _ in range(2):
            lane.half(page_bytes * pages_at_a_time(lane, page_bytes))
        lane.positions(pages_at_a_time(lane, page_bytes))
    if not isinstance(lane.mover, KernelMover):
        return
    with lane.on(lane.side):
        for group in groups:
            area = pair.area(lane.allocate(pair.staged_bytes(group)), group, pages=1)
            lane.mover.prepare(area, to_pool=to_pool)
        if kernels:
            lane.mover.prepare(pair.host, to_pool=to_pool)
