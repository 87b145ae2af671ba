"""Pages that copy engines move between the pools, call by call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from pools.lane_cases import load_back, pair_of, ways
from pools.pool_cases import MLA, device_pool, host_page, page_bytes
from pools.simulated_lane import SimulatedLane, as_slots

from hicache_storage.pools import copy_engine, cuda_load_back, direct, strategy
from hicache_storage.pools.cuda_backup import backup
from hicache_storage.pools.cuda_load_back import Loading
from hicache_storage.pools.host import HostPool

FIRST = 4
"""Pages that go first; they have one part."""


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Small pages go direct, and each layer by itself."""
    monkeypatch.setattr(strategy, "_STEP_BYTES", 1)
    monkeypatch.setattr(strategy, "DIRECT_STRETCH", 1)
    monkeypatch.setattr(direct, "_FIRST_COPIES", FIRST)
    strategy._load_steps.cache_clear()
    yield
    strategy._load_steps.cache_clear()


@pytest.mark.parametrize("move", [backup, load_back])
@pytest.mark.parametrize("count", [1, FIRST, FIRST + 1, 40])
def test_each_byte_is_asked_for_once_and_those_of_the_first_pages_first(
    move: Any, count: int
) -> None:
    geometry = replace(MLA, layers=3)
    halves = [(device_pool(geometry, 80), HostPool(geometry, 80, "layer_first")) for _ in range(2)]
    lane = SimulatedLane(1 << 20, kernels=True, seed=3)
    asked: list[tuple[int, int]] = []
    written: Counter[int] = Counter()

    def watched(copies: Any, *, pinned: bool, batch: int) -> None:
        asked.append((copies.shape[1], batch))
        for _, target, size in copies.T.tolist():
            written.update(range(target, target + size))

    lane.copy_stretches = watched  # type: ignore[method-assign]
    slots = as_slots(range(0, 2 * count, 2))
    move(ways(halves), slots, slots, lane, "copy_engine")
    assert set(written.values()) == {1}
    assert len(written) == 2 * count * geometry.page_bytes
    first = [(min(count, FIRST), copy_engine.FIRST_BATCH)]
    rest = [(count - FIRST, copy_engine.NEXT_BATCH)] if count > FIRST else []
    assert asked == [*first, *rest, *[(count, copy_engine.BATCH)] * 5]


@pytest.mark.parametrize("count", [1, 2])
def test_pages_come_behind_those_that_are_still_scattered(
    monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """By an earlier call, which was staged, into the same slots."""
    for seed in range(30):
        device, host, pair = pair_of(MLA, "layer_first")
        lane = SimulatedLane(1 << 20, kernels=False, seed=seed)
        for limit, first in ((1 << 30, 0), (1, 2)):
            monkeypatch.setattr(strategy, "DIRECT_STRETCH", limit)
            strategy._load_steps.cache_clear()
            pages, slots = as_slots(range(first, first + count)), as_slots(range(count))
            load_back([pair], pages, slots, lane, "copy_engine")
        lane.run()
        for slot in range(count):
            assert page_bytes(device, slot, host.order) == host_page(host, 2 + slot)


@pytest.mark.parametrize("layers", [2, 3])
def test_lists_may_change_before_all_layers_are_asked_for(
    monkeypatch: pytest.MonkeyPatch, layers: int
) -> None:
    monkeypatch.setattr(cuda_load_back, "AHEAD_BYTES", 1)
    device, host, pair = pair_of(replace(MLA, layers=layers), "layer_first")
    lane = SimulatedLane(1 << 20, kernels=True, seed=1)
    slots, pages = as_slots([0, 2]), as_slots([1, 3])
    loading = Loading([pair], pages, slots, lane, "copy_engine")
    assert loading.asked == 1
    slots[:] = pages[:] = 0, 1
    loading.ask(layers)
    lane.run()
    for slot, page in ((0, 1), (2, 3)):
        assert page_bytes(device, slot, host.order) == host_page(host, page)
