"""Lane: the streams, staging memory and engines of the copies in one direction on one device."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from . import copy_engine
from .indices import Slots
from .movers import Mover, cuda_mover
from .routes import Routes
from .row_copies import RowCopies
from .signals import Signals, signals
from .stretches import Copies

STAGED_BYTES = (128 << 20) + (1 << 20)
"""Device memory of a staging half: 128 MiB of pages. A lane has two, and makes them when it first
needs them; pages that are larger make them larger. While a long kernel of the model holds every
multiprocessor, no half is filled: both must last until its end. Halves of 64 MiB cost the calling
thread two thirds more, and 0.5 % of a backup's rate."""
_LIST = 4096
"""Slots of the shortest list that a lane makes room for."""
_LISTS = 4
"""Pinned lists that a lane keeps; it has more only while as many uploads are under way."""
_POSITIONS = 4096


class Later(Protocol):
    """Copies that are asked for layer by layer."""

    def ask(self, layer: int) -> None:
        """Asks for layers up to this one, and for some that follow."""
        ...


class Half:
    """Half of a lane's staging memory: filled while the other one is emptied."""

    def __init__(self) -> None:
        self.memory: Tensor | None = None
        self.free: Any = None
        """The event after which it may be filled again; None if it never was."""


class _Pinned:
    """Pinned memory for lists of slots. Torch gives it to others once this object is gone, and
    doesn't know of the driver's copies: keep it until `free`."""

    def __init__(self, slots: int) -> None:
        self._memory = torch.empty(slots, dtype=torch.int64, pin_memory=True)
        self.slots: Slots = self._memory.numpy()
        self.address = self._memory.data_ptr()
        self.read: Any = None
        """The event after which it may be written again; None if it never was."""

    def free(self) -> bool:
        """Whether nothing reads it any more."""
        return self.read is None or self.read.query()


def _wait_until_read(lists: deque[_Pinned]) -> None:
    for pinned in lists:
        if pinned.read is not None:
            with contextlib.suppress(RuntimeError):
                pinned.read.synchronize()


class Lane:
    """What the copies of one direction run on: `link` for what crosses the link, `side` for what
    gathers or scatters rows on the device meanwhile.

    Both streams go before others on the device, so that their few programs aren't left waiting
    behind the model's. A second stream for the link adds nothing. Copies may come from any thread:
    ask for them in `with lane.lock, lane.on_device(), lane:`. What fails there leaves no copy under
    way: nobody would know of it, and the slots would be used again.
    """

    staged_bytes = STAGED_BYTES
    link: Any
    side: Any
    mover: Mover
    signals: Signals | None
    """Of the kernels on `link`; None where the driver has none."""
    processors: int
    """Multiprocessors of the device. What gathers or scatters takes all of them: a model's kernel
    loses more to a few that are late than to all that are late for a moment."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.lock = threading.Lock()
        self._halves = (Half(), Half())
        self._turn = 0
        self.scattered: Any = None
        """The event after which all that was scattered on `side` is in its pool; None if nothing
        was."""
        self._positions: Tensor | None = None
        self._uploaded: dict[int, Tensor] = {}
        self.later: weakref.ref[Later] | None = None
        """What may have yet to be asked for by an earlier call."""
        self._start()

    def _start(self) -> None:
        self.link = torch.cuda.Stream(self.device, priority=-1)
        self.side = torch.cuda.Stream(self.device, priority=-1)
        self._given = torch.Event(self.device, enable_timing=False)
        self.mover = cuda_mover()
        self.signals = signals(self.link, self.side)
        self.processors = torch.cuda.get_device_properties(self.device).multi_processor_count
        self._lists = deque(_Pinned(_LIST) for _ in range(_LISTS))
        weakref.finalize(self, _wait_until_read, self._lists).atexit = False

    def on_device(self) -> AbstractContextManager[None]:
        """Makes the lane's device the current one."""
        return torch.cuda.device(self.device.index)

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        # While the stream is captured, nothing was asked for, and a wait would end that.
        if error is not None and not torch.cuda.is_current_stream_capturing():
            self.settle()

    @property
    def streams(self) -> tuple[Any, ...]:
        """Both of them."""
        return self.link, self.side

    def reaches(self, pair: Routes) -> bool:
        """Whether a kernel reaches the pair's host pool."""
        return self.mover.reaches_host and pair.pinned

    def begin(self, events: Sequence[Any] = ()) -> None:
        """Has `link` wait for what the current stream has been given, and for `events`. What reads
        pages on `side` waits by `behind`; what writes them there waits for `link`."""
        self.ask_for_the_rest()
        # On the current device's current stream, which it finds in a fifth of the time that asking
        # for it takes. The waits are for what it stands for now, so the next call may record it.
        self._given.record()
        self.behind(self.link, events)

    def behind(self, stream: Any, events: Sequence[Any]) -> None:
        """Has a stream wait for what the current stream had been given when the call began, and for
        `events`."""
        self._given.wait(stream)
        for event in events:
            event.wait(stream)

    def ask_for_the_rest(self) -> None:
        """Asks for what an earlier call has left to be asked for, if somebody still holds that."""
        later = None if self.later is None else self.later()
        if later is not None:
            later.ask(sys.maxsize)
        self.later = None

    def settle(self) -> None:
        """Returns when all that was asked for is done."""
        for stream in self.streams:
            stream.synchronize()
        if self.signals is not None:
            self.signals.settle()

    def hold(self, stream: Any, signals: Signals, layer: int) -> None:
        """Has the stream wait until a kernel has brought its layer number `layer`."""
        signals.hold(stream.cuda_stream, layer)

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Makes `stream` the current one."""
        return torch.cuda.stream(stream)

    def record(self, stream: Any) -> Any:
        """An event that is done when the stream has done what it has been given."""
        event = torch.cuda.Event()
        event.record(stream)
        return event

    def wait(self, stream: Any, event: Any) -> None:
        """Has the stream wait for an event, if there is one."""
        if event is not None:
            event.wait(stream)

    def upload(self, stream: Any, *lists: Slots) -> list[Tensor]:
        """Equally long lists of slots on the device, for use on this stream until the next upload
        there. Through pinned memory, else the copy would hold up the CPU until the stream gets to
        it; and by the driver, which takes a third less of the CPU than torch."""
        length = len(lists[0])
        count = len(lists) * length
        pinned = self._pinned(count)
        np.concatenate(lists, out=pinned.slots[:count])
        handle = stream.cuda_stream
        on_device = self._uploaded.get(handle)
        if on_device is None or len(on_device) < count:
            with self.on(stream):
                on_device = torch.empty(_room(count), dtype=torch.int64, device=self.device)
            self._uploaded[handle] = on_device
        size = count * pinned.slots.itemsize
        copy_engine.copy_one(pinned.address, on_device.data_ptr(), size, handle)
        pinned.read = self.record(stream)
        return [on_device[start : start + length] for start in range(0, count, length)]

    def _pinned(self, count: int) -> _Pinned:
        """Pinned memory for `count` slots that nothing reads any more."""
        lists = self._lists
        while len(lists) > _LISTS and lists[0].free():
            lists.popleft()
        if lists[0].free():
            oldest = lists.popleft()
            if len(oldest.slots) >= count:
                lists.append(oldest)
                return oldest
        lists.append(_Pinned(_room(count)))
        return lists[-1]

    def positions(self, count: int) -> Tensor:
        """0 to `count` - 1 on the device."""
        if self._positions is None or len(self._positions) < count:
            with self.on(self.side):
                self._positions = torch.arange(max(count, _POSITIONS), device=self.device)
        return self._positions[:count]

    def half(self, size_bytes: int) -> tuple[Half, Tensor]:
        """The staging half whose turn it is, with at least that much memory. Use it behind its
        `free` event and set that again."""
        self._turn = 1 - self._turn
        half = self._halves[self._turn]
        if half.memory is None or half.memory.numel() < size_bytes:
            with self.on(self.side):
                half.memory = self.allocate(max(size_bytes, self.staged_bytes))
        return half, half.memory

    def allocate(self, size_bytes: int) -> Tensor:
        """Memory on the device that nobody else gets while either stream uses it."""
        memory = torch.empty(size_bytes, dtype=torch.uint8, device=self.device)
        memory.record_stream(self.link)
        return memory

    def copy(self, copies: Sequence[RowCopies], *, to_device: bool, pinned: bool) -> None:
        """Copies between host and device on `link`."""
        copy_engine.copy(copies, self.link.cuda_stream, to_device=to_device, batched=pinned)

    def copy_stretches(self, copies: Copies, *, pinned: bool, batch: int) -> None:
        """The same, of stretches; `batch` of them in the first call."""
        copy_engine.copy_stretches(copies, self.link.cuda_stream, batched=pinned, batch=batch)


def _room(count: int) -> int:
    """Slots that a list has room for: of few sizes, so that it is seldom made anew."""
    return max(_LIST, 1 << (count - 1).bit_length())


@functools.lru_cache(maxsize=32)
def shared_lane(device: torch.device, direction: Literal["out", "back"]) -> Lane:
    """The lane of callers that have none of their own."""
    return Lane(device)
