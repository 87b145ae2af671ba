"""Load-backs by a kernel that says of each layer that it is there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from pools.lane_cases import load_back, pair_of
from pools.pool_cases import MLA, host_page, page_bytes
from pools.simulated_lane import HeldMover, SimulatedLane, SimulatedSignals, as_slots

from hicache_storage.pools import strategy
from hicache_storage.pools.geometry import PageGeometry


def signalled(seed: int = 1) -> SimulatedLane:
    """A lane whose kernels say when a layer is there."""
    lane = SimulatedLane(1 << 20, kernels=True, seed=seed)
    lane.signals = SimulatedSignals()
    lane.mover = HeldMover(lane, reaches_host=True, by_layer=True)
    return lane


def moves_of(lane: SimulatedLane) -> list[tuple[range, bool]]:
    """The layers of each launch from now on, and whether it says when they are there."""
    found: list[tuple[range, bool]] = []
    move = lane.mover.move

    def watched(route: Any, own: Any, other: Any, layers: range, **given: Any) -> None:
        found.append((layers, given.get("arrived") is not None))
        move(route, own, other, layers, **given)

    lane.mover.move = watched  # type: ignore[method-assign]
    return found


@pytest.mark.parametrize(
    ("draft_layers", "launches"),
    [(0, [range(8)]), (1, [range(1), range(8)]), (2, [range(1)] * 2 + [range(1, 2), range(1, 8)])],
)
def test_a_kernel_brings_all_layers_in_one_launch(
    monkeypatch: pytest.MonkeyPatch, draft_layers: int, launches: list[range]
) -> None:
    """But for what the draft's layers must be there before."""
    monkeypatch.setattr(strategy, "_STEP_BYTES", 1)
    target = pair_of(replace(MLA, layers=8))[2]
    pairs = [target]
    if draft_layers:
        pairs.append(pair_of(replace(MLA, layers=draft_layers))[2])
    lane = signalled()
    made = moves_of(lane)
    by_layer = load_back(pairs, as_slots([0, 2]), as_slots([1, 3]), lane, "auto")
    assert made == [(layers, len(layers) > 1) for layers in launches]
    assert len({id(events) for events in by_layer}) == 8
    first_alone: list[bool] = []

    def watch() -> None:
        first, *_, last = [all(event.query() for event in events) for events in by_layer]
        first_alone.append(first and not last)

    lane.run(watch)
    assert any(first_alone)
    assert all(event.query() for events in by_layer for event in events)


def test_layers_of_a_kernel_that_starts_midway_arrive_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Behind a draft's second layer."""
    monkeypatch.setattr(strategy, "_STEP_BYTES", 1)
    target = PageGeometry("mla", 10, 1, 8, 0, 2, torch.uint8)
    strategy._load_steps.cache_clear()
    try:
        for seed in range(20):
            halves = [pair_of(g, "page_first_direct") for g in (target, replace(target, layers=2))]
            pairs = [half[2] for half in halves]
            lane = signalled(seed)
            made = moves_of(lane)
            with mock.patch.object(lane, "hold", wraps=lane.hold) as holds:
                by_layer = load_back(pairs, as_slots([0, 2]), as_slots([1, 3]), lane, "auto")
            assert (range(1, 10), True) in made
            assert [hold.args[2] for hold in holds.call_args_list] == list(range(9))
            device = halves[0][0]

            def watch(
                by_layer: Any = by_layer, device: Any = device, host: Any = halves[0][1]
            ) -> None:
                for layer, events in enumerate(by_layer):
                    if all(event.query() for event in events):
                        (found,) = device.page_rows(layer)
                        assert torch.equal(found[1], host.page_rows(0)[0, layer]), "too early"

            lane.run(watch)
    finally:
        strategy._load_steps.cache_clear()


def test_counters_that_may_be_wrong_are_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call broke off behind its launch, and its settling too."""
    monkeypatch.setattr(strategy, "_STEP_BYTES", 1)
    device, host, pair = pair_of(replace(MLA, layers=4))
    lane = signalled()
    assert lane.signals is not None
    with (
        mock.patch.object(lane.signals, "expect", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        load_back([pair], as_slots([0]), as_slots([1]), lane, "kernel")
    lane.run()
    made = moves_of(lane)
    by_layer = load_back([pair], as_slots([0]), as_slots([2]), lane, "kernel")
    assert made == [(range(layer, layer + 1), False) for layer in range(4)]
    lane.run()
    lane.signals.settle()
    load_back([pair], as_slots([0]), as_slots([3]), lane, "kernel")
    assert made[4:] == [(range(4), True)]
    lane.run()
    assert all(event.query() for events in by_layer for event in events)
    assert page_bytes(device, 3, host.order) == host_page(host, 0)
