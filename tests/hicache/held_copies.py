"""CUDA's part of a HiCache on the CPU: copies are held back until somebody waits for them, and
come in any order that streams and events allow."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pools.simulated_lane import Event, SimulatedLane

from hicache_storage.pools import cuda_load_back, direct, paired, strategy
from hicache_storage.pools.device import MHADevicePool
from hicache_storage.pools.routes import Routes

CUDA: Any = SimpleNamespace(type="cuda")


class Device:
    """What goes on by itself: the streams of all lanes."""

    def __init__(self, seed: int, *, kernels: bool) -> None:
        self.kernels = kernels
        self.lanes: list[SimulatedLane] = []
        self._random = random.Random(seed)
        self._lock = threading.RLock()

    def lane(self, device: Any) -> SimulatedLane:
        """A lane whose settling and events have the device go on."""
        lane = SimulatedLane(1 << 20, kernels=self.kernels, seed=self._random.randrange(1000))
        lane.settle = lambda: self.until(lambda: not any(s.work for s in lane.streams))  # type: ignore[method-assign]
        self.lanes.append(lane)
        return lane

    def until(self, done: Callable[[], bool]) -> None:
        """Goes on until then."""
        with self._lock:
            while not done():
                assert self.step() or done(), "somebody waits for what never comes"

    def step(self) -> bool:
        """Does one thing more; False if there is none."""
        with self._lock:
            ready = [stream for lane in self.lanes for stream in lane.streams if stream.ready()]
            if ready:
                self._random.choice(ready).step()
            return bool(ready)

    def query(self, event: Event) -> bool:
        """Whether it is done by now."""
        for _ in range(self._random.choice((0, 0, 0, 1))):
            self.step()
        return event.arrived


@contextlib.contextmanager
def held_copies(seed: int, *, kernels: bool) -> Iterator[Device]:
    """HiCaches that are made meanwhile have such a device; load-backs are asked for a layer at a
    time."""
    device = Device(seed, kernels=kernels)
    made = Routes.__init__

    def pinned(routes: Routes, *ends: Any) -> None:
        made(routes, *ends)
        routes.pinned = True

    with pytest.MonkeyPatch.context() as patch:
        for name in ("_STEP_BYTES", "DIRECT_STRETCH", "LOAD_ROW", "LOAD_STRETCH"):
            patch.setattr(strategy, name, 1)
        patch.setattr(cuda_load_back, "AHEAD_BYTES", 1)
        patch.setattr(direct, "_FIRST_COPIES", 2)
        patch.setattr(paired, "Lane", device.lane)
        patch.setattr(
            MHADevicePool, "device", property(lambda pool: CUDA, lambda *given: None), raising=False
        )
        patch.setattr(Routes, "__init__", pinned)

        def query(event: Event) -> bool:
            return device.query(event)

        patch.setattr(Event, "query", query)
        patch.setattr(
            Event, "synchronize", lambda event: device.until(lambda: event.arrived), raising=False
        )
        patch.setattr(torch.cuda, "device", lambda device: nullcontext())
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        # What a forward pass is given by the current stream, it does at once.
        current = SimpleNamespace(wait_event=lambda event: event.synchronize())
        patch.setattr(torch.cuda, "current_stream", lambda device: current)
        strategy._load_steps.cache_clear()
        yield device
    strategy._load_steps.cache_clear()
