"""Layers of a load-back that are asked for once somebody waits for those before them."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from pools.pool_cases import MLA, POISON, device_pool, fill, fill_random, host_page, page_bytes
from pools.simulated_lane import SimulatedLane, as_slots

from hicache_storage import ConfigError
from hicache_storage.pools import cuda_load_back, cuda_prepare, direct, strategy, transfer
from hicache_storage.pools.cuda_backup import backup
from hicache_storage.pools.cuda_load_back import Loading
from hicache_storage.pools.host import HostPool
from hicache_storage.pools.routes import routes
from hicache_storage.pools.transfer import LayerEvents

LAYERS, PAGES = 8, 6
GEOMETRY = replace(MLA, layers=LAYERS)
LAYER_BYTES = GEOMETRY.page_bytes // LAYERS
"""Of a page."""


@pytest.fixture(autouse=True)
def layers_apart(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A copy engine takes each layer by itself, two are asked for ahead; CUDA is simulated."""
    for name, value in (("_STEP_BYTES", 1), ("DIRECT_STRETCH", 1)):
        monkeypatch.setattr(strategy, name, value)
    strategy._load_steps.cache_clear()
    monkeypatch.setattr(cuda_load_back, "AHEAD_BYTES", 2 * 2 * LAYER_BYTES)
    monkeypatch.setattr(direct, "_FIRST_COPIES", 1)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    yield
    strategy._load_steps.cache_clear()


class Rig:
    """A host pool with bytes, and a lane that brings them to a poisoned device pool."""

    def __init__(self) -> None:
        self.device = device_pool(GEOMETRY, PAGES)
        self.host = HostPool(GEOMETRY, PAGES, "layer_first")
        fill_random(self.device, 1)
        self.pair = routes(self.device, self.host)
        self.pair.pinned = True
        out = SimulatedLane(1 << 20, kernels=True, seed=1)
        every = as_slots(range(PAGES))
        backup([self.pair], every, every, out, "copy_engine")
        out.run()
        fill(self.device, POISON)
        self.lane = SimulatedLane(1 << 20, kernels=True, seed=1)

    def load(self, host: Any = (0, 2), device: Any = (1, 4)) -> LayerEvents:
        loading = Loading([self.pair], as_slots(host), as_slots(device), self.lane, "auto")
        return LayerEvents([(self.device, self.host)], LAYERS, loading)

    def waits(self, loading: LayerEvents, layer: int) -> list[Any]:
        """The events that the current stream is made to wait for."""
        found: list[Any] = []
        stream = SimpleNamespace(wait_event=found.append)
        with mock.patch.object(torch.cuda, "current_stream", return_value=stream):
            loading.wait(layer)
        return found

    def holds(self, slot: int, page: int) -> bool:
        """Whether this page is in that device slot."""
        return page_bytes(self.device, slot, self.host.order) == host_page(self.host, page)


def test_a_call_asks_for_the_first_layers_and_each_wait_for_some_that_follow() -> None:
    rig = Rig()
    loading = rig.load()
    assert loading._loading is not None
    found = [loading._loading.asked]
    for layer in range(LAYERS):
        assert rig.waits(loading, layer)
        found.append(loading._loading.asked)
    assert found == [2, 3, 4, 5, 6, 7, 8, 8, 8]
    assert loading.asked
    rig.lane.run()
    assert loading.done()
    assert rig.holds(1, 0)
    assert rig.holds(4, 2)


@pytest.mark.parametrize(
    ("act", "asked"),
    [
        (lambda loading: loading.arrived(3), 6),
        (lambda loading: loading.events_of(0), 3),
        (lambda loading: loading.done(), LAYERS),
        (lambda loading: loading.events, LAYERS),
        (lambda loading: loading.asked, 2),
    ],
    ids=["arrived", "events_of", "done", "events", "asked"],
)
def test_whoever_wants_to_know_of_a_layer_has_it_asked_for(act: Any, asked: int) -> None:
    rig = Rig()
    loading = rig.load()
    act(loading)
    assert loading._loading is not None
    assert loading._loading.asked == asked
    assert loading.asked is (asked == LAYERS)


def test_a_layer_is_not_there_before_its_events_say_so() -> None:
    rig = Rig()
    loading = rig.load()
    for layer in (0, 3, 6):
        assert not loading.arrived(layer)
        rig.lane.run()
        assert loading.arrived(layer)
        (rows,) = rig.device.page_rows(layer)
        assert torch.equal(rows[1], rig.host.page_rows(0)[0, layer])
    assert loading.done()


@pytest.mark.parametrize("which", ["host", "device"])
@pytest.mark.parametrize("ahead", [1, 2, LAYERS - 1])
def test_the_callers_lists_may_change_meanwhile(
    monkeypatch: pytest.MonkeyPatch, which: str, ahead: int
) -> None:
    monkeypatch.setattr(cuda_load_back, "AHEAD_BYTES", ahead * 2 * LAYER_BYTES)
    rig = Rig()
    lists = {"host": as_slots((0, 2)), "device": as_slots((1, 4))}
    loading = Loading([rig.pair], lists["host"], lists["device"], rig.lane, "auto")
    lists[which][:] = 5, 3
    loading.ask(LAYERS)
    rig.lane.run()
    assert rig.holds(1, 0)
    assert rig.holds(4, 2)
    assert set(page_bytes(rig.device, 3, rig.host.order)) == {POISON}


def test_the_next_call_on_the_lane_asks_for_the_rest_before_its_own() -> None:
    rig = Rig()
    first = rig.load(device=(1, 4))
    second = rig.load(host=(3, 5), device=(4, 2))
    assert first.asked
    assert not second.asked
    assert not second.done()
    rig.lane.run()
    assert first.done()
    assert second.done()
    assert rig.holds(1, 0)
    assert rig.holds(4, 3), "the later call's page stays"
    assert rig.holds(2, 5)


def test_what_is_all_asked_for_leaves_a_later_call_alone() -> None:
    """Another thread may have waited for the lane meanwhile, to ask for what the later call did."""
    rig = Rig()
    first, second = rig.load(), rig.load(device=(0, 2))
    assert first._loading is not None
    first._loading.ask(3)
    assert rig.lane.later is not None
    assert rig.lane.later() is second._loading
    assert not second.asked


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("done_before", [False, True])
@pytest.mark.parametrize("act", ["arrived", "done", "next call"])
def test_what_cannot_be_asked_for_is_asked_for_again(
    error: type[BaseException], done_before: bool, act: str
) -> None:
    """Until then nobody hears that it is there, and its slots stay in use."""
    rig = Rig()
    loading = rig.load()
    settled: list[bool] = []

    def settle() -> None:
        settled.append(rig.lane.lock.locked())
        rig.lane.run()

    rig.lane.settle = settle  # type: ignore[method-assign]
    copy = rig.lane.copy_stretches

    def fail(copies: Any, **given: Any) -> None:
        if done_before:
            copy(copies, **given)
        raise error

    acts: dict[str, Any] = {
        "arrived": lambda: loading.arrived(3),
        "done": loading.done,
        "next call": lambda: rig.load(host=(3, 5), device=(4, 2)),
    }
    for _ in range(2):
        with (
            mock.patch.object(rig.lane, "copy_stretches", side_effect=fail),
            pytest.raises(error),
        ):
            acts[act]()
        assert not loading.asked
        assert not rig.lane.lock.locked()
    assert settled == [True, True] or act == "next call"
    kept = acts[act]()
    rig.lane.run()
    assert loading.arrived(3)
    assert not loading.done() or act != "arrived"
    assert act != "next call" or not kept.done()
    rig.lane.run()
    assert loading.done()
    assert rig.holds(1, 0)
    assert rig.holds(4, 3 if act == "next call" else 2)


def test_a_call_that_breaks_off_leaves_no_layers_to_ask_for() -> None:
    """Its slots belong to others then."""
    rig = Rig()
    ask = Loading.ask

    def interrupted(loading: Loading, layer: int) -> None:
        ask(loading, layer)
        raise KeyboardInterrupt

    with (
        mock.patch.object(Loading, "ask", interrupted),
        pytest.raises(KeyboardInterrupt) as caught,
    ):
        rig.load((0, 2), (1, 4))
    rig.lane.run()
    fill(rig.device, POISON)
    rig.load((3,), (0,)).done()
    rig.lane.run()
    assert caught
    assert rig.holds(0, 3)
    assert set(page_bytes(rig.device, 1, rig.host.order)) == {POISON}


def test_what_nobody_holds_is_not_asked_for_and_holds_nothing() -> None:
    """None of the pools' memory."""
    rig = Rig()
    loading: Any = rig.load()
    memory, pool, lane = weakref.ref(rig.host._memory), weakref.ref(rig.device), rig.lane
    del rig
    gc.disable()
    try:
        assert memory() is not None, "it is yet to be copied from"
        del loading
        assert memory() is None
        assert pool() is None
        lane.ask_for_the_rest()
    finally:
        gc.enable()
    rig = Rig()
    rig.load(device=(1, 4))
    rig.load(device=(0, 2)).done()
    rig.lane.run()
    assert rig.holds(2, 2)
    assert not rig.holds(4, 2)


def test_a_stream_waits_for_all_events_of_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Staged pages are there once they are scattered."""
    monkeypatch.setattr(strategy, "DIRECT_STRETCH", 1 << 30)
    strategy._load_steps.cache_clear()
    rig = Rig()
    loading = Loading([rig.pair], as_slots([0]), as_slots([1]), rig.lane, "copy_engine")
    events = LayerEvents([(rig.device, rig.host)], LAYERS, loading)
    assert len(rig.waits(events, 0)) == 2


def test_what_is_prepared_comes_behind_what_is_left_to_be_asked_for() -> None:
    """It uses the same lists on the device."""
    rig = Rig()
    loading = rig.load()
    asked: list[bool] = []
    with mock.patch.object(cuda_prepare, "prepare") as prepare:
        prepare.side_effect = lambda *args, **given: asked.append(loading.asked)
        transfer.prepare((rig.device, rig.host), rig.lane, rig.lane, "auto")
    assert asked == [True, True]


def test_layers_are_not_asked_for_during_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    loading = rig.load()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(ConfigError, match="before the graph is captured"):
        loading.wait(0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    rig.waits(loading, LAYERS - 1)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert rig.waits(loading, 0), "all has been asked for"


@pytest.mark.parametrize("pages", [1, 4])
def test_small_load_backs_are_asked_for_at_once(pages: int) -> None:
    rig = Rig()
    size = pages * GEOMETRY.page_bytes
    with mock.patch.object(cuda_load_back, "AHEAD_BYTES", size - 1):
        assert rig.load(range(pages), range(pages)).asked
    with mock.patch.object(cuda_load_back, "AHEAD_BYTES", size * (LAYERS - 1) // LAYERS):
        assert not rig.load(range(pages), range(pages)).asked


def test_a_draft_counts_too() -> None:
    rig, draft = Rig(), Rig()
    with mock.patch.object(cuda_load_back, "AHEAD_BYTES", 2 * GEOMETRY.page_bytes):
        slots = as_slots((0, 2)), as_slots((1, 4))
        assert Loading([rig.pair, draft.pair], *slots, rig.lane, "auto").asked == LAYERS // 2


def test_a_kernel_is_launched_for_all_layers_at_once() -> None:
    """That takes no longer than for one."""
    rig = Rig()
    rig.lane.signals = None
    loading = Loading([rig.pair], as_slots([0]), as_slots([1]), rig.lane, "kernel")
    assert loading.asked == LAYERS
    rig.lane.run()
    assert all(event.query() for layer in range(LAYERS) for event in loading.events(layer))


def test_threads_that_wait_take_turns() -> None:
    rig = Rig()
    loading = rig.load()
    taken: list[bool] = []
    copy = rig.lane.copy_stretches

    def watched(copies: Any, **given: Any) -> None:
        taken.append(rig.lane.lock.locked())
        copy(copies, **given)

    rig.lane.copy_stretches = watched  # type: ignore[method-assign]
    loading.events_of(LAYERS - 1)
    assert taken == [True] * (LAYERS - 2)
    assert not rig.lane.lock.locked()
