"""The copies of a CUDA device, on CPU tensors: exact bytes whatever the streams' order, and no
event before its bytes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pools.lane_cases import Halves, load_back, pair_of, ways
from pools.pool_cases import (
    MHA,
    MLA,
    POISON,
    Case,
    cases,
    device_pool,
    fill,
    fill_random,
    host_page,
    page_bytes,
    poison,
    rows,
    strided_pool,
)
from pools.simulated_lane import SimulatedLane, as_slots

from hicache_storage.pools import cuda_load_back, direct, strategy
from hicache_storage.pools.cuda_backup import backup
from hicache_storage.pools.cuda_load_back import Loading
from hicache_storage.pools.host import HostPool
from hicache_storage.pools.layouts import LAYOUTS, Layout
from hicache_storage.pools.moves import Moves
from hicache_storage.pools.routes import routes
from hicache_storage.pools.staging import Few, pieces_of
from hicache_storage.pools.strategy import STRATEGIES, Strategy

LIMITS = {
    "DIRECT_STRETCH": strategy,
    "STAGED_STRETCH": strategy,
    "LOAD_ROW": strategy,
    "LOAD_STRETCH": strategy,
    "_STEP_BYTES": strategy,
    "AHEAD_BYTES": cuda_load_back,
}


def make_halves(case: Case) -> Halves:
    make = strided_pool if case.strided else device_pool
    halves: Halves = []
    for geometry in [case.target] + ([case.draft] if case.draft is not None else []):
        halves.append(
            (make(geometry, case.device_pages), HostPool(geometry, case.host_pages, case.layout))
        )
        fill_random(halves[-1][0], len(halves))
        poison(halves[-1][1])
    return halves


@contextmanager
def limited(limits: list[int]) -> Iterator[None]:
    """With these LIMITS instead of an H200's."""
    with pytest.MonkeyPatch.context() as patch:
        for (name, module), value in zip(LIMITS.items(), limits, strict=True):
            patch.setattr(module, name, value)
        patch.setattr(direct, "_FIRST_COPIES", 2 + sum(limits) % 8)  # pages are few here
        strategy._load_steps.cache_clear()
        yield
    strategy._load_steps.cache_clear()


@settings(max_examples=300)
@given(
    cases(),
    st.sampled_from(STRATEGIES),
    st.booleans(),
    st.integers(1, 2000),
    st.lists(st.integers(1, 300), min_size=len(LIMITS), max_size=len(LIMITS)),
    st.integers(0, 1000),
)
def test_pages_move_exactly_in_any_order_that_the_events_allow(
    case: Case, chosen: Strategy, kernels: bool, staged: int, limits: list[int], seed: int
) -> None:
    check_moves(case, chosen, kernels, staged, limits, seed)


@settings(max_examples=100)
@given(
    cases(),
    st.sampled_from(["page_first", "page_first_direct"]),
    st.integers(1, 2000),
    st.integers(0, 1000),
)
def test_layers_in_groups_move_exactly(case: Case, layout: Layout, staged: int, seed: int) -> None:
    geometry = replace(case.target, layers=max(3, case.target.layers))
    case = replace(case, target=geometry, layout=layout, strided=False)
    stretch = min(geometry.part_bytes) // geometry.layers
    two_layers = {
        "LOAD_ROW": 2 * stretch // geometry.page_size,
        "LOAD_STRETCH": 2 * stretch,
        "DIRECT_STRETCH": 1 << 30,
    }
    limits = [two_layers.get(name, 1) for name in LIMITS]
    check_moves(case, "copy_engine", True, staged, limits, seed)


def check_moves(
    case: Case, chosen: Strategy, kernels: bool, staged: int, limits: list[int], seed: int
) -> None:
    halves = make_halves(case)
    pairs = ways(halves)
    source, middle, destination = map(as_slots, (case.source, case.host, case.destination))
    expected = [
        [page_bytes(device, page, host.order) for page in case.source] for device, host in halves
    ]
    with limited(limits):
        out = SimulatedLane(staged, kernels=kernels, seed=seed)
        events = backup(pairs, source, middle, out, chosen)
        assert not any(event.query() for event in events)
        out.run()
        assert all(event.query() for event in events)
        for (_, host), pages in zip(halves, expected, strict=True):
            untouched = [bytes([POISON]) * host.geometry.page_bytes] * host.num_pages
            for slot, page in zip(case.host, pages, strict=True):
                untouched[slot] = page
            assert [host_page(host, slot) for slot in range(host.num_pages)] == untouched

        for device, _ in halves:
            fill(device, POISON)
        back = SimulatedLane(staged, kernels=kernels, seed=seed)
        loading = Loading(pairs, middle, destination, back, chosen)
        assert loading.layers == max(device.geometry.layers for device, _ in halves)
        seen: dict[int, Any] = {}
        chance = random.Random(seed)

        def watch() -> None:
            if loading.asked < loading.layers and chance.random() < 0.1:
                loading.ask(chance.randrange(loading.layers))
            for layer in range(loading.asked):
                if layer not in seen and all(event.query() for event in loading.events(layer)):
                    seen[layer] = [rows(device) for device, _ in halves]

        back.run(watch)
        while loading.asked < loading.layers:
            loading.ask(loading.asked)
            back.run(watch)
    for (device, host), pages in zip(halves, expected, strict=True):
        untouched = [bytes([POISON]) * device.geometry.page_bytes] * device.num_pages
        for slot, page in zip(case.destination, pages, strict=True):
            untouched[slot] = page
        found = [page_bytes(device, page, host.order) for page in range(device.num_pages)]
        assert found == untouched
    final = [rows(device) for device, _ in halves]
    assert len(seen) == loading.layers
    for layer, then in seen.items():
        for now, before in zip(final, then, strict=True):
            for part_now, part_before in zip(now, before, strict=True):
                assert part_before[: layer + 1] == part_now[: layer + 1], "too early"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kernels", [False, True], ids=["copies", "kernels"])
def test_copies_asked_for_at_once_share_the_staging_memory(layout: Layout, kernels: bool) -> None:
    """A half isn't filled again before it was emptied, also by the next copy."""
    device, host = device_pool(MHA, 12), HostPool(MHA, 12, layout)
    fill_random(device, 1)
    poison(host)
    pairs = ways([(device, host)])
    for seed in range(20):
        lane = SimulatedLane(3 * MHA.page_bytes, kernels=kernels, seed=seed)
        for first in (0, 4, 8):
            pages = as_slots(range(first, first + 4))
            backup(pairs, pages, 11 - pages, lane, "copy_engine")
        lane.run()
        for page in range(12):
            assert host_page(host, 11 - page) == page_bytes(device, page, host.order)
        restored = device_pool(MHA, 12)
        lane = SimulatedLane(3 * MHA.page_bytes, kernels=kernels, seed=seed)
        back = ways([(restored, host)])
        for first in (0, 4, 8):
            pages = as_slots(range(first, first + 4))
            load_back(back, 11 - pages, pages, lane, "copy_engine")
        lane.run()
        assert rows(restored) == rows(device)


@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_load_back_without_pages_comes_behind_those_on_their_way(
    layout: Layout, kernels: bool
) -> None:
    """Whoever asks for it has found its pages on the device, or almost."""
    for seed in range(30):
        device, host, pair = pair_of(MLA, layout)
        lane = SimulatedLane(1 << 20, kernels=kernels, seed=seed)
        load_back([pair], as_slots([0, 1]), as_slots([0, 1]), lane, "copy_engine")
        events = load_back([pair], as_slots([]), as_slots([]), lane, "copy_engine")[-1]

        def watch(events: Any = events, device: Any = device, host: Any = host) -> None:
            if all(event.query() for event in events):
                for page in (0, 1):
                    found = page_bytes(device, page, host.order)
                    assert found == host_page(host, page), "too early"

        lane.run(watch)
        assert all(event.query() for event in events)


@pytest.mark.parametrize("chosen", STRATEGIES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_copy_waits_for_the_events_that_it_was_told_of(layout: Layout, chosen: Strategy) -> None:
    device, host = device_pool(MLA, 4), HostPool(MLA, 4, layout)
    pairs = ways([(device, host)])
    fill_random(device, 1)
    poison(host)
    earlier = SimulatedLane(1 << 20, kernels=True, seed=1)
    out, back = (SimulatedLane(1 << 20, kernels=True, seed=1) for _ in range(2))
    earlier.link.work.append(lambda: fill_random(device, 2))
    event = earlier.record(earlier.link)
    events = backup(pairs, as_slots([0]), as_slots([0]), out, chosen, [event])
    load_back(pairs, as_slots([0]), as_slots([3]), back, chosen, events)
    before = host_page(host, 0), page_bytes(device, 3, host.order)
    for lane in (out, back):
        while ready := [stream for stream in lane.streams if stream.ready()]:
            ready[0].step()
    assert (host_page(host, 0), page_bytes(device, 3, host.order)) == before
    earlier.run()
    out.run()
    back.run()
    assert host_page(host, 0) == page_bytes(device, 0, host.order)
    assert page_bytes(device, 3, host.order) == host_page(host, 0)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("first", STRATEGIES)
@pytest.mark.parametrize("second", STRATEGIES)
@pytest.mark.parametrize("kernels", [False, True], ids=["copies", "kernels"])
def test_what_one_call_copies_the_next_may_copy_over(
    monkeypatch: pytest.MonkeyPatch,
    layout: Layout,
    first: Strategy,
    second: Strategy,
    kernels: bool,
) -> None:
    """In order, whatever streams the two calls use."""
    monkeypatch.setattr(strategy, "DIRECT_STRETCH", 1)
    monkeypatch.setattr(strategy, "_STEP_BYTES", 1)
    odd = replace(MLA, layers=3)
    device, restored = device_pool(odd, 2), device_pool(odd, 1)
    host = HostPool(odd, 2, layout)
    fill_random(device, 1)
    for seed in range(10):
        out, back = (SimulatedLane(1, kernels=kernels, seed=seed) for _ in range(2))
        for page, chosen in ((0, first), (1, second)):
            slots = as_slots([page]), as_slots([0])
            backup(ways([(device, host)]), *slots, out, chosen)
        out.run()
        assert host_page(host, 0) == page_bytes(device, 1, host.order)
        backup(ways([(device, host)]), as_slots([0]), as_slots([1]), out, "copy_engine")
        out.run()
        for slot, chosen in ((0, first), (1, second)):
            slots = as_slots([slot]), as_slots([0])
            load_back(ways([(restored, host)]), *slots, back, chosen)
        back.run()
        assert page_bytes(restored, 0, host.order) == page_bytes(device, 0, host.order)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layers_arrive_before_the_last_one(layout: Layout) -> None:
    """Layer by layer, or the first ones by themselves and the others in groups."""
    geometry = replace(MLA, layers=32, head_dim=1024, page_size=16)
    device, host = device_pool(geometry, 64), HostPool(geometry, 64, layout)
    pairs = ways([(device, host)])
    lane = SimulatedLane(1 << 22, kernels=True, seed=3)
    pages = as_slots(range(64))
    by_layer = load_back(pairs, pages, pages, lane, "auto")
    assert len({id(events[-1]) for events in by_layer}) >= 3
    arrived: list[int] = []

    def watch() -> None:
        arrived.append(sum(all(event.query() for event in events) for events in by_layer))

    lane.run(watch)
    assert any(0 < layers < 32 for layers in arrived)


@pytest.mark.parametrize("chosen", STRATEGIES)
def test_a_staged_backup_starts_before_the_pages_are_staged(chosen: Strategy) -> None:
    """A kernel takes the first ones meanwhile, unless only copies may be made."""
    geometry = replace(MLA, layers=8, head_dim=512, page_size=64)
    device, host = device_pool(geometry, 64), HostPool(geometry, 64, "page_first")
    fill_random(device, 1)
    poison(host)
    lane = SimulatedLane(1 << 22, kernels=True, seed=3)
    pages = as_slots(range(40))
    backup(ways([(device, host)]), pages, pages, lane, chosen)
    while lane.link.ready():
        lane.link.step()
    moved = [page_bytes(device, page, "token_layer") == host_page(host, page) for page in range(40)]
    assert moved.count(True) == {"auto": 3, "copy_engine": 0, "kernel": 40}[chosen]


@pytest.mark.parametrize(
    ("move", "layout"),
    [
        (backup, "layer_first"),
        (backup, "page_first"),
        (load_back, "layer_first"),
        (load_back, "page_first_direct"),
    ],
)
@pytest.mark.parametrize("strategy", ["auto", "kernel"])
def test_the_link_has_work_before_the_pages_are_put_in_order(
    monkeypatch: pytest.MonkeyPatch, move: Any, layout: Layout, strategy: Strategy
) -> None:
    """A kernel takes them as they are given."""
    lane = SimulatedLane(1 << 22, kernels=True, seed=3)
    asked: list[int] = []
    put_in_order = Moves.in_order.func

    def watched(moves: Moves) -> Moves:
        asked.append(len(lane.link.work))
        return put_in_order(moves)

    watching = cached_property(watched)
    watching.__set_name__(Moves, "in_order")
    monkeypatch.setattr(Moves, "in_order", watching)
    geometry = replace(MLA, layers=17, head_dim=(8 << 10) // MLA.dtype.itemsize, page_size=16)
    device, host = device_pool(geometry, 40), HostPool(geometry, 40, layout)
    pages = as_slots(range(40))
    move(ways([(device, host)]), pages, pages, lane, strategy)
    assert bool(asked) is (strategy == "auto")
    assert all(already > 0 for already in asked)


def test_no_page_at_all_still_gives_every_layer_its_event() -> None:
    pairs = ways([(device_pool(MHA, 2), HostPool(MHA, 2))])
    lane = SimulatedLane(1 << 20, kernels=True, seed=1)
    none = as_slots([])
    events = backup(pairs, none, none, lane, "auto")
    by_layer = load_back(pairs, none, none, lane, "auto")
    assert len(by_layer) == MHA.layers
    lane.run()
    assert all(event.query() for events in (events, *by_layer) for event in events)


def test_routes_are_made_once_for_two_pools() -> None:
    device, other, host = device_pool(MHA, 2), device_pool(MHA, 2), HostPool(MHA, 2)
    assert routes(device, host) is routes(device, host)
    assert routes(device, host) is not routes(other, host)
    assert not routes(device, host).pinned or torch.cuda.is_available()


@given(st.integers(1, 600), st.integers(1, 300), st.sampled_from(["first", "last", "none"]))
def test_a_staging_half_is_filled_evenly_but_for_the_few_pages_that_something_waits_for(
    count: int, at_a_time: int, few: Few
) -> None:
    found = pieces_of(count, at_a_time, few)
    assert [page for piece in found for page in range(count)[piece]] == list(range(count))
    sizes = [piece.stop - piece.start for piece in found]
    assert 0 < min(sizes) <= max(sizes) <= at_a_time
    apart = max(1, at_a_time // 8)
    if few != "none":
        waited_for = sizes.pop(0 if few == "first" else -1)
        assert waited_for == min(count, apart)
    assert not sizes or max(sizes) - min(sizes) <= 1
