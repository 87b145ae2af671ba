"""What a lane keeps between copies."""

from __future__ import annotations

import contextlib
import ctypes
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from pools.simulated_lane import SimulatedLane

from hicache_storage.pools import copy_engine, lanes
from hicache_storage.pools.lanes import Lane


def kept(done: bool | None, room: int = 4096) -> Any:
    return SimpleNamespace(slots=range(room), free=lambda: done is not False)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Slots of the pinned lists that were made anew."""
    found: list[int] = []

    def make(slots: int) -> Any:
        found.append(slots)
        return kept(False, slots)

    monkeypatch.setattr(lanes, "_Pinned", make)
    return found


class Device:
    """The current device, which a lane makes its own."""

    def __init__(self) -> None:
        self.lane = SimulatedLane(1, kernels=True, seed=1)
        self.lane.device = torch.device("cuda", 3)
        self.lane.settle = lambda: self._happens("settled")  # type: ignore[method-assign]
        self.happened: list[tuple[Any, bool]] = []
        """What, and whether the lane was this thread's alone."""
        self.fails: dict[str, type[BaseException]] = {}

    @contextlib.contextmanager
    def __call__(self, index: int | None) -> Iterator[None]:
        self._happens(f"device {index}")
        try:
            yield
        finally:
            self._happens("left")

    def _happens(self, what: str) -> None:
        self.happened.append((what, self.lane.lock.locked()))
        if what in self.fails:
            raise self.fails[what]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    found = Device()
    monkeypatch.setattr(torch.cuda, "device", found)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return found


def in_charge(lane: Lane, error: type[BaseException] | None = None) -> None:
    with lane.lock, lane.on_device(), lane:
        if error is not None:
            raise error


@pytest.mark.parametrize("capturing", [False, True])
def test_what_fails_midway_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, device: Device, capturing: bool
) -> None:
    """But not while the stream is captured: then nothing was asked for, and a wait would end it."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    with pytest.raises(MemoryError):
        in_charge(device.lane, MemoryError)
    settled = [] if capturing else [("settled", True)]
    assert device.happened == [("device 3", True), *settled, ("left", True)]
    device.happened.clear()
    in_charge(device.lane)
    assert device.happened == [("device 3", True), ("left", True)]
    assert not device.lane.lock.locked()


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["device 3", "settled", "left"])
def test_a_lane_is_free_again_whatever_fails(
    device: Device, where: str, error: type[BaseException]
) -> None:
    device.fails = {where: error}
    with pytest.raises(error):
        in_charge(device.lane, MemoryError)
    assert where in dict(device.happened)
    assert not device.lane.lock.locked()


def test_stretches_are_asked_for_as_the_lane_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr(copy_engine, "copy_stretches", lambda *a, **k: given.append((a, k)))
    lane = Lane.__new__(Lane)
    lane.link = SimpleNamespace(cuda_stream=5)
    copies = np.zeros((3, 1), np.int64)
    lane.copy_stretches(copies, pinned=False, batch=12)
    assert given == [((copies, 5), {"batched": False, "batch": 12})]


def test_what_has_come_is_counted_again_once_nothing_is_under_way() -> None:
    done: list[str] = []
    lane = Lane.__new__(Lane)
    for name in ("link", "side"):
        stream = SimpleNamespace(synchronize=lambda name=name: done.append(name))
        setattr(lane, name, stream)
    lane.signals = None
    lane.settle()
    counters: Any = SimpleNamespace(settle=lambda: done.append("signals"))
    lane.signals = counters
    lane.settle()
    assert done == ["link", "side", "link", "side", "signals"]


def lane_of(*lists: Any) -> Lane:
    lane = Lane.__new__(Lane)
    lane._lists = deque(lists)
    return lane


def test_pinned_lists_are_used_again_in_turn(made: list[int]) -> None:
    first, second = kept(None), kept(True)
    lane = lane_of(first, second)
    assert [lane._pinned(4096) for _ in range(3)] == [first, second, first]
    assert not made


def test_a_pinned_list_that_is_still_read_is_left_alone(made: list[int]) -> None:
    lane = lane_of(kept(False), kept(True))
    for _ in range(2):
        lane._pinned(5)
    assert made == [4096, 4096]
    assert len(lane._lists) == 4


def test_no_more_lists_are_kept_than_are_read(made: list[int]) -> None:
    """A hundred uploads while nothing is read, and then all is."""
    lane = lane_of(*(kept(None) for _ in range(4)))
    for pinned in lane._lists:
        pinned.free = lambda: False
    for _ in range(100):
        lane._pinned(5)
    assert len(lane._lists) == 104
    for pinned in lane._lists:
        pinned.free = lambda: True
    lane._pinned(5)
    assert len(lane._lists) == 4


def test_a_longer_list_takes_the_place_of_one_that_is_too_short(made: list[int]) -> None:
    lane = lane_of(kept(None))
    longer = lane._pinned(4097)
    longer.free = lambda: True
    assert lane._pinned(8192) is longer
    assert lane._pinned(8193) is not longer
    assert made == [8192, 16384]
    assert len(lane._lists) == 1


def test_lists_are_kept_until_they_are_read_when_a_lane_goes() -> None:
    waited: list[int] = []
    lists: Any = [
        SimpleNamespace(read=SimpleNamespace(synchronize=lambda: waited.append(1))),
        SimpleNamespace(read=None),
    ]
    lanes._wait_until_read(lists)
    assert waited == [1]


class _Memory:
    """Instead of pinned memory."""

    def __init__(self, slots: int) -> None:
        self.slots = np.zeros(slots, dtype=np.int64)
        self.address = self.slots.ctypes.data
        self.read: Any = None

    def free(self) -> bool:
        return True


class _CPULane(Lane):
    """Copies are done at once, events as soon as they are made."""

    def _start(self) -> None:
        self.link, self.side = (SimpleNamespace(cuda_stream=handle) for handle in (1, 2))
        self._lists = deque([_Memory(4096)])  # type: ignore[list-item]

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        return nullcontext()

    def record(self, stream: Any) -> Any:
        return SimpleNamespace(query=lambda: True)


@pytest.fixture
def lane(monkeypatch: pytest.MonkeyPatch) -> Lane:
    def copy(source: int, target: int, size: int, stream: int) -> None:
        ctypes.memmove(target, source, size)

    monkeypatch.setattr(lanes, "_Pinned", _Memory)
    monkeypatch.setattr(copy_engine, "copy_one", copy)
    return _CPULane(torch.device("cpu"))


@pytest.mark.parametrize("count", [1, 7, 4096, 5000])
@pytest.mark.parametrize("lists", [1, 2])
def test_lists_of_slots_arrive_as_they_were(lane: Lane, lists: int, count: int) -> None:
    given = [np.random.default_rng(i).integers(0, 1 << 40, count) for i in range(lists)]
    found = lane.upload(lane.link, *given)
    assert [part.tolist() for part in found] == [part.tolist() for part in given]


def test_a_stream_keeps_its_list_until_its_own_next_upload(lane: Lane) -> None:
    (first,) = lane.upload(lane.link, np.arange(100))
    (second,) = lane.upload(lane.side, np.arange(100, 200))
    longer = lane.upload(lane.side, np.arange(9000), np.arange(9000, 18000))
    assert first.tolist() == list(range(100))
    assert second.tolist() == list(range(100, 200)), "memory that is too short is left alone"
    assert [part.tolist() for part in longer] == [list(range(9000)), list(range(9000, 18000))]
    (again,) = lane.upload(lane.link, np.arange(50, 60))
    assert again.data_ptr() == first.data_ptr(), "no memory is made for each call"


def test_a_call_begins_behind_the_current_stream_its_events_and_what_was_left_to_be_asked_for(
    lane: Lane,
) -> None:
    happened: list[Any] = []

    class Given:
        def record(self, stream: Any = "the current one") -> None:
            happened.append(("record", stream))

        def wait(self, stream: Any) -> None:
            happened.append((stream, self))

    given, event = Given(), Given()
    lane._given = given  # type: ignore[assignment]

    class Left:
        def ask(self, layer: int) -> None:
            happened.append(layer >= 1000)

    left = Left()
    lane.later = weakref.ref(left)
    lane.begin([event])
    assert happened[:2] == [True, ("record", "the current one")]
    assert happened[2:] == [(lane.link, given), (lane.link, event)]
    happened.clear()
    lane.behind(lane.side, [event])
    assert happened == [(lane.side, given), (lane.side, event)]
    happened.clear()
    lane.begin()
    assert happened[0] == ("record", "the current one"), "it is asked for once"
    lane.later = weakref.ref(left)
    del left
    lane.ask_for_the_rest()
