"""Load-back on CUDA, layer by layer, by the ways that `strategy` chooses."""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from .direct import Direct
from .indices import Slots
from .lanes import Lane
from .moves import Moves
from .routes import Routes
from .signals import Signals
from .staging import Few, pages_at_a_time, part_copies, pieces_of
from .strategy import Step, Strategy, Way, load_steps, loads_directly

READING_PROGRAMS = 8
"""Multiprocessors of a kernel that reads from the host: 4 fill the link, but not beside a backup,
when they take a third longer."""
AHEAD_BYTES = 128 << 20
"""What is asked for at once, and then behind each layer that is waited for: 2.4 ms on the link, in
which a caller comes to its first layer. It has a model's kernels to launch then, and 1 GiB of
copies would hold it up for 5 to 10 ms before the first of them."""


class _Task(NamedTuple):
    """Layers of a pair that are asked for together."""

    pair: Routes
    how: Way
    steps: list[range]

    @property
    def first(self) -> int:
        """The first of the layers."""
        return self.steps[0].start


class Loading:
    """Pages of every pair on their way to the device, layer by layer, behind the current stream and
    the events `after`. The first layers are asked for at once, the others by `ask` and by the next
    call on the lane, as long as somebody holds it. Be alone on the lane, and its device the current
    one, to make or ask it."""

    def __init__(
        self,
        pairs: Sequence[Routes],
        host_slots: Slots,
        device_slots: Slots,
        lane: Lane,
        strategy: Strategy,
        after: Sequence[Any] = (),
    ) -> None:
        lane.begin(after)
        self.lane = lane
        self.layers = max([pair.geometry.layers for pair in pairs])
        if self.layers > 1:  # the caller may change its lists meanwhile
            device_slots, host_slots = device_slots.copy(), host_slots.copy()
        self._moves = Moves(device_slots, host_slots)
        self._waited = False
        self._directly: dict[Routes, Direct] = {}
        # The draft first, so that a kernel then brings all layers of the target in one launch.
        pairs = pairs[::-1]
        direct = [self._goes_direct(pair, strategy) for pair in pairs]
        if direct[0]:  # the link has nothing to do
            self._wait_for_scattered()
            self._direct(pairs[0]).begin()
        layer_bytes = len(host_slots) * sum([pair.geometry.page_bytes for pair in pairs])
        self._ahead = -(-AHEAD_BYTES // max(1, layer_bytes // self.layers))
        """Layers."""
        self._on_link: Any = None
        self._signalled = False
        """Whether events were recorded on `side` that say when a kernel brought a layer."""
        self._on_side: Any = None
        self._arrived: dict[int, tuple[Any, ...]] = {}
        """Events by the first of the layers that have arrived then, with all before them."""
        plans = [self._plan(pair, strategy, how) for pair, how in zip(pairs, direct, strict=True)]
        self._tasks = deque(_tasks(pairs, plans, self.layers))
        self.asked = 0
        """Layers that have been asked for."""
        if not self._tasks:
            # Others may be on their way to pages that are on the device already.
            self._wait_for_scattered()
            self._arrived[0] = self._all_arrived()
        self.ask(-1)
        if self._tasks:
            lane.later = weakref.ref(self)

    def ask(self, layer: int) -> None:
        """Asks for layers up to this one, and for some that follow. What failed is asked for
        again: its pages are still this load-back's, and nobody was told that they are there."""
        while self._tasks and self._tasks[0].first <= layer + self._ahead:
            self._take(self._tasks[0])
            if self._signalled and len(self._tasks) == 1:
                self._arrived[max(self._arrived)] = self._all_arrived()
            self._tasks.popleft()
        self.asked = self._tasks[0].first if self._tasks else self.layers

    def events(self, layer: int) -> tuple[Any, ...]:
        """Events that are done when a layer that has been asked for has arrived. The last layer's
        are done when all have."""
        while layer not in self._arrived:
            layer -= 1
        return self._arrived[layer]

    def _goes_direct(self, pair: Routes, strategy: Strategy) -> bool:
        return loads_directly(
            pair.geometry,
            pair.layout,
            len(self._moves),
            lambda: self._moves.run_pages(both_ends=True),
            strategy,
            kernels=self.lane.reaches(pair),
            dense=pair.stretches is not None,
        )

    def _plan(self, pair: Routes, strategy: Strategy, direct: bool) -> Mapping[int, Step]:
        pages = len(self._moves)
        if pages == 0:
            return {}
        kernels = self.lane.reaches(pair)
        return load_steps(
            pair.geometry, pair.layout, pages, strategy, kernels=kernels, direct=direct
        )

    def _wait_for_scattered(self) -> None:
        # An earlier call may still scatter into the same pages.
        if not self._waited:
            self.lane.wait(self.lane.link, self.lane.scattered)
            self._waited = True

    def _take(self, task: _Task) -> None:
        if task.how != "staged":
            self._wait_for_scattered()
        if task.how == "kernel":
            self._by_kernel(task.pair, task.steps)
        else:
            for layers in task.steps:
                if task.how == "direct":
                    for layer in layers:
                        self._direct(task.pair).copy(layer)
                else:
                    self._staged(task.pair, layers)
                self._arrived[layers.start] = self._all_arrived()

    def _all_arrived(self) -> tuple[Any, ...]:
        """The events behind all that has been taken so far."""
        lane = self.lane
        if self._on_side is None and not self._signalled:
            return (lane.record(lane.link),)
        return lane.record(lane.link), lane.record(lane.side)

    def _by_kernel(self, pair: Routes, steps: Sequence[range]) -> None:
        """In one launch if the device can say when a layer is there: a launch of its own would have
        to wait for the multiprocessors that the model has taken meanwhile. In any order, which is
        as fast."""
        lane = self.lane
        if self._on_link is None:
            self._on_link = lane.upload(lane.link, self._moves.device, self._moves.host)
        layers = range(steps[0].start, steps[-1].stop)
        signals = self._signals(pair, layers) if len(steps) > 1 else None
        if signals is None:
            for some in steps:
                self._move(pair, some)
                self._arrived[some.start] = self._all_arrived()
            return
        signals.exact = False
        self._move(pair, layers, signals.cells)
        signals.expect(len(layers), READING_PROGRAMS)
        self._signalled = True
        for some in steps:
            lane.hold(lane.side, signals, some.stop - 1 - layers.start)
            self._arrived[some.start] = (lane.record(lane.side),)

    def _signals(self, pair: Routes, layers: range) -> Signals | None:
        """What a kernel says of these layers by; None if it can't."""
        found = self.lane.signals
        if found is None or not found.exact or len(layers) > found.most:
            return None
        return found if self.lane.mover.by_layer(pair.host, len(self._moves)) else None

    def _move(self, pair: Routes, layers: range, arrived: Tensor | None = None) -> None:
        on_device, in_host = self._on_link
        with self.lane.on(self.lane.link):
            self.lane.mover.move(
                pair.host,
                on_device,
                in_host,
                layers,
                to_pool=True,
                programs=READING_PROGRAMS,
                arrived=arrived,
            )

    def _direct(self, pair: Routes) -> Direct:
        if pair not in self._directly:
            self._directly[pair] = Direct(self.lane, pair, self._moves, to_device=True)
        return self._directly[pair]

    def _staged(self, pair: Routes, layers: range) -> None:
        lane = self.lane
        host_slots = self._moves.in_order.host
        if self._on_side is None:
            (self._on_side,) = lane.upload(lane.side, self._moves.in_order.device)
        page_bytes = pair.staged_bytes(layers)
        at_a_time = pages_at_a_time(lane, page_bytes)
        few: Few = "last" if layers.stop == pair.geometry.layers else "none"
        for some in pieces_of(len(host_slots), at_a_time, few):
            slots = host_slots[some]
            half, memory = lane.half(at_a_time * page_bytes)
            area = pair.staged(memory, layers, at_a_time)
            lane.wait(lane.link, half.free)
            lane.copy(
                part_copies(pair.host, area, slots, np.arange(len(slots))),
                to_device=True,
                pinned=pair.pinned,
            )
            lane.wait(lane.side, lane.record(lane.link))
            with lane.on(lane.side):
                lane.mover.move(
                    area,
                    self._on_side[some],
                    lane.positions(len(slots)),
                    layers,
                    to_pool=True,
                    programs=lane.processors,
                )
            half.free = lane.scattered = lane.record(lane.side)


def _tasks(
    pairs: Sequence[Routes], plans: Sequence[Mapping[int, Step]], layers: int
) -> list[_Task]:
    """In the order of layers, and for each in the order of `pairs`, of which each has a plan."""
    due = [
        (pair, plan[layer])
        for layer in range(layers)
        for pair, plan in zip(pairs, plans, strict=True)
        if layer in plan
    ]
    tasks = []
    for (pair, how), taken in itertools.groupby(due, lambda each: (each[0], each[1].how)):
        steps = [step.layers for _, step in taken]
        together = [steps] if how == "kernel" else [[layers] for layers in steps]
        tasks += [_Task(pair, how, some) for some in together]
    return tasks
