"""A lane without a device: streams that do their work in any order that the events allow."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from pools.pool_cases import POISON

from hicache_storage.pools.indices import Slots
from hicache_storage.pools.lanes import Lane
from hicache_storage.pools.movers import TorchMover
from hicache_storage.pools.routes import Route
from hicache_storage.pools.row_copies import RowCopies
from hicache_storage.pools.signals import Signals
from hicache_storage.pools.stretches import Copies


class Event:
    """Done once its stream has got to it."""

    def __init__(self) -> None:
        self.arrived = False

    def query(self) -> bool:
        return self.arrived


class Signal(Event):
    """Done once a counter has got so far."""

    def __init__(self, cells: torch.Tensor, cell: int, value: int) -> None:
        self._cells, self._cell, self._value = cells, cell, value

    @property
    def arrived(self) -> bool:  # type: ignore[override]
        return int(self._cells[self._cell]) >= self._value


class SimulatedSignals(Signals):
    """Counters in memory."""

    def __init__(self, most: int = 64) -> None:
        super().__init__(torch.zeros(most, dtype=torch.int32))
        self.most = most

    def signal(self, layer: int) -> Signal:
        return Signal(self.cells, layer, self._expected[layer])


class Stream:
    """Work in order: functions that are called, and events that are waited for."""

    def __init__(self) -> None:
        self.work: deque[Callable[[], None] | Event] = deque()

    def ready(self) -> bool:
        while self.work and isinstance(self.work[0], Event) and self.work[0].arrived:
            self.work.popleft()
        return bool(self.work) and not isinstance(self.work[0], Event)

    def step(self) -> None:
        work = self.work.popleft()
        assert not isinstance(work, Event)
        work()


class SimulatedLane(Lane):
    """Holds back all that it is given until `run`."""

    def __init__(self, staged_bytes: int, *, kernels: bool, seed: int) -> None:
        self._kernels = kernels
        self._random = random.Random(seed)
        super().__init__(torch.device("cpu"))
        self.staged_bytes = staged_bytes

    def _start(self) -> None:
        self.link, self.side = Stream(), Stream()
        self.current = self.link
        self._kept: dict[Stream, torch.Tensor] = {}
        chance = self._random.random()
        self.signals = None if chance < 0.2 else SimulatedSignals(2 if chance < 0.4 else 64)
        self.mover = HeldMover(self, self._kernels, by_layer=chance < 0.9)
        self.processors = 1

    def run(self, watch: Callable[[], None] = lambda: None) -> None:
        """Does everything, in a random order of streams; `watch` is called after each piece."""
        watch()
        while ready := [stream for stream in self.streams if stream.ready()]:
            self._random.choice(ready).step()
            watch()
        waiting = [stream for stream in self.streams if stream.work]
        assert not waiting, "a stream waits for what never comes"

    def begin(self, events: Sequence[Any] = ()) -> None:
        self.ask_for_the_rest()
        self.behind(self.link, events)

    def behind(self, stream: Any, events: Sequence[Any]) -> None:
        for event in events:
            self.wait(stream, event)

    @contextlib.contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def record(self, stream: Any) -> Any:
        event = Event()

        def arrive() -> None:
            event.arrived = True

        stream.work.append(arrive)
        return event

    def wait(self, stream: Any, event: Any) -> None:
        if event is not None:
            stream.work.append(event)

    def hold(self, stream: Any, signals: Signals, layer: int) -> None:
        assert isinstance(signals, SimulatedSignals)
        stream.work.append(signals.signal(layer))

    def upload(self, stream: Any, *lists: Slots) -> list[torch.Tensor]:
        given = torch.from_numpy(np.concatenate(lists))
        kept = self._kept.get(stream)
        if kept is None or len(kept) < len(given):
            kept = self._kept[stream] = torch.full((2 * len(given),), -1)
        here = kept[: len(given)]
        stream.work.append(lambda: here.copy_(given))
        return list(here.view(len(lists), -1))

    def positions(self, count: int) -> torch.Tensor:
        return torch.arange(count)

    def allocate(self, size_bytes: int) -> torch.Tensor:
        return torch.full((size_bytes,), POISON, dtype=torch.uint8)

    def copy(self, copies: Sequence[RowCopies], *, to_device: bool, pinned: bool) -> None:
        copies = [piece._replace() for piece in copies]
        self.link.work.append(lambda: copy_rows(copies))

    def copy_stretches(self, copies: Copies, *, pinned: bool, batch: int) -> None:
        held = copies.copy()
        self.link.work.append(lambda: _copy_stretches(held))


class HeldMover(TorchMover):
    """Torch's own operations, when their stream gets to them."""

    def __init__(self, lane: SimulatedLane, reaches_host: bool, by_layer: bool) -> None:
        self.lane = lane
        self.reaches_host = reaches_host
        self._by_layer = by_layer

    def move(
        self,
        route: Route,
        pool_slots: torch.Tensor,
        other_slots: torch.Tensor,
        layers: range,
        *,
        to_pool: bool,
        programs: int,
        arrived: torch.Tensor | None = None,
    ) -> None:
        def work(layers: range) -> None:
            TorchMover().move(
                route, pool_slots, other_slots, layers, to_pool=to_pool, programs=programs
            )

        if arrived is None:
            self.lane.current.work.append(lambda: work(layers))
            return
        assert self._by_layer
        for number, layer in enumerate(layers):
            self.lane.current.work.append(functools.partial(work, range(layer, layer + 1)))
            for _ in range(programs):
                self.lane.current.work.append(lambda number=number: arrived[number].add_(1))

    def by_layer(self, route: Route, pages: int) -> bool:
        return self._by_layer


def copy_rows(copies: Sequence[RowCopies]) -> None:
    """What a copy engine does with them."""
    for piece in copies:
        assert piece.width > 0
        assert piece.height > 0
        for source, target in zip(piece.source.tolist(), piece.target.tolist(), strict=True):
            for row in range(piece.height):
                ctypes.memmove(
                    target + row * piece.target_pitch,
                    source + row * piece.source_pitch,
                    piece.width,
                )


def _copy_stretches(copies: Copies) -> None:
    for source, target, size in copies.T.tolist():
        assert size > 0
        ctypes.memmove(target, source, size)


def as_slots(values: Sequence[int]) -> Slots:
    """Page indices as the copies take them."""
    return np.array(list(values), dtype=np.int64)
