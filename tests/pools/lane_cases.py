"""Copies on simulated lanes, asked for as a CUDA device's are."""

from __future__ import annotations

from typing import Any

from pools.pool_cases import POISON, device_pool, fill, fill_random
from pools.simulated_lane import SimulatedLane, as_slots

from hicache_storage.pools.cuda_backup import backup
from hicache_storage.pools.cuda_load_back import Loading
from hicache_storage.pools.device import DevicePool
from hicache_storage.pools.host import HostPool
from hicache_storage.pools.indices import Slots
from hicache_storage.pools.layouts import Layout
from hicache_storage.pools.routes import Routes, routes
from hicache_storage.pools.strategy import Strategy

Halves = list[tuple[DevicePool, HostPool]]


def ways(halves: Halves) -> list[Routes]:
    """As if the host pools were pinned, so that every way can be taken."""
    found = [routes(device, host) for device, host in halves]
    for way in found:
        way.pinned = True
    return found


def pair_of(geometry: Any, layout: Layout = "page_first", seed: int = 1) -> tuple[Any, Any, Routes]:
    """A poisoned device pool, a host pool with bytes, and their routes."""
    device, host = device_pool(geometry, 4), HostPool(geometry, 4, layout)
    fill_random(device, seed)
    source = ways([(device, host)])
    out = SimulatedLane(1 << 20, kernels=True, seed=1)
    backup(source, as_slots(range(4)), as_slots(range(4)), out, "kernel")
    out.run()
    fill(device, POISON)
    return device, host, source[0]


def load_back(
    pairs: list[Routes],
    host: Slots,
    device: Slots,
    lane: SimulatedLane,
    chosen: Strategy,
    after: Any = (),
) -> list[tuple[Any, ...]]:
    """Asks for all of it; the events of each layer."""
    loading = Loading(pairs, host, device, lane, chosen, after)
    lane.ask_for_the_rest()
    return [loading.events(layer) for layer in range(loading.layers)]
