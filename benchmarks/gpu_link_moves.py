"""Ways of moving pieces of memory over one GPU's link, for `gpu_link.py`.

Legend: P pages on the device, 2 P in the host, of which half are moved, both uint8. A page is a
stretch of adjacent bytes (B,), or rows (R, B) that lie apart in the host and follow each other on
the device.
"""

from __future__ import annotations

import ctypes
import itertools
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gpu_pools import VERBS, Way, comes_back, draw, in_order
from torch import Tensor

from hicache_storage.pools import copy_engine
from hicache_storage.pools.device import MLADevicePool
from hicache_storage.pools.geometry import PageGeometry
from hicache_storage.pools.memory import HostMemory
from hicache_storage.pools.movers import KernelMover
from hicache_storage.pools.routes import Route
from hicache_storage.pools.row_copies import RowCopies, runs, view_copies

DEVICE = "cuda"
KIB = 1 << 10
SOURCE = Path(__file__).with_name("gpu_link.cu")
_OPTIONS = ("-O3", "-std=c++17", "-arch=sm_90", "--shared", "-Xcompiler", "-fPIC")
ROWS = 64
"""Of a page of rows: tokens of a page."""
_UNTIL_ASKED = 300_000
"""Clock ticks, some 0.2 ms, in which all is asked for before an event begins."""


@dataclass
class Move:
    """One way of moving the same bytes out and back; `ask(verb)` asks for all of it on `streams`
    and doesn't wait."""

    size_bytes: int
    device: Tensor
    streams: Sequence[Any]
    ask: Callable[[str], None]
    held: object
    """What keeps the host's memory."""

    def way(self) -> Way:
        """Returns the seconds that the call took."""
        return self._way(self._asked)

    def way_by_events(self) -> Way:
        """Returns the seconds between an event before and one behind, of the one stream."""
        return self._way(self._between_events)

    def copies(self, verb: str, times: int) -> Callable[[], list[Any]]:
        """Asks so many times, and gives what to wait for."""

        def copies() -> list[Any]:
            for _ in range(times):
                self.ask(verb)
            return list(self.streams)

        return copies

    def equal(self) -> str:
        """ "equal", or "DIFFER": random bytes out, poison on the device, and back."""
        draw([self.device])
        way = self.way()
        return "equal" if comes_back([self.device], way.backup, way.load) else "DIFFER"

    def _way(self, run: Callable[[str], float]) -> Way:
        backup, load = VERBS
        return Way(lambda: run(backup), lambda: run(load))

    def _asked(self, verb: str) -> float:
        start = time.perf_counter()
        self.ask(verb)
        asked = time.perf_counter() - start
        for stream in self.streams:
            stream.synchronize()
        return asked

    def _between_events(self, verb: str) -> float:
        (stream,) = self.streams
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        busy(stream)
        first.record(stream)
        self.ask(verb)
        last.record(stream)
        last.synchronize()
        return float(first.elapsed_time(last)) / 1e3


def busy(stream: Any) -> None:
    """Holds the stream up for a moment, in which it is given what is to be timed."""
    with torch.cuda.stream(stream):
        torch.cuda._sleep(_UNTIL_ASKED)


class Ends:
    """`size_bytes` on the device, and twice as many of registered host memory."""

    def __init__(self, size_bytes: int) -> None:
        self.memory = HostMemory(2 * size_bytes, pin=True)  # pinned as long as this lives
        self.host = self.memory.tensor
        self.device = torch.empty(size_bytes, dtype=torch.uint8, device=DEVICE)
        draw([self.device])
        self.streams = [torch.cuda.Stream(priority=-1) for _ in range(2)]


def plain(device: Tensor, host: Tensor, stream: Any) -> Move:
    """One copy of everything."""

    def ask(verb: str) -> None:
        to, source = (host, device) if verb == "backup" else (device, host)
        with torch.cuda.stream(stream):
            to.copy_(source, non_blocking=True)

    return Move(device.numel(), device, [stream], ask, host)


class Pages:
    """Pages in random order at both ends, taken in the order of the host's, as the package does."""

    def __init__(self, ends: Ends, device: Tensor, host: Tensor) -> None:
        self.ends, self.device, self.host = ends, device, host
        self.on_device = in_order("random", len(device), len(device))
        self.in_host = in_order("random", len(host), len(device)).sort().values

    @classmethod
    def stretches(cls, ends: Ends, stretch_bytes: int, size_bytes: int) -> Pages:
        """(P, B)"""
        count = size_bytes // stretch_bytes
        size_bytes = count * stretch_bytes
        return cls(
            ends,
            ends.device[:size_bytes].view(count, stretch_bytes),
            ends.host[: 2 * size_bytes].view(2 * count, stretch_bytes),
        )

    @classmethod
    def rows(cls, ends: Ends, row_bytes: int, pitch_bytes: int) -> Pages:
        """(P, R, B): as many as fit; `pitch_bytes` from row to row in the host."""
        page_bytes = ROWS * pitch_bytes
        count = len(ends.host) // page_bytes // 2
        host = ends.host[: 2 * count * page_bytes].view(2 * count, ROWS, pitch_bytes)
        device = ends.device[: count * ROWS * row_bytes].view(count, ROWS, row_bytes)
        return cls(ends, device, host[:, :, :row_bytes])

    def batches(self, streams: int, a_call: int) -> Move:
        """By copy engine, so many pages a call, the calls on so many streams in turns."""
        on_device, in_host = self.on_device.numpy(), self.in_host.numpy()
        found = runs(in_host, on_device)
        calls = {
            "backup": view_copies(self.device, self.host, on_device, in_host, found),
            "load": view_copies(self.host, self.device, in_host, on_device, found),
        }
        parts = {verb: list(_parts(copies, a_call)) for verb, copies in calls.items()}
        used = self.ends.streams[:streams]

        def ask(verb: str) -> None:
            with _calls_of(a_call):
                for part, stream in zip(parts[verb], itertools.cycle(used), strict=False):
                    copy_engine.copy(
                        [part], stream.cuda_stream, to_device=verb == "load", batched=True
                    )

        return self._move(ask, streams)

    def kernel(self) -> Callable[[int], Move]:
        """By the package's kernel, on so many multiprocessors. Stretches only."""
        count, stretch = self.device.shape
        geometry = PageGeometry("mla", 1, 1, stretch // 2, 0, 1, torch.bfloat16)
        layer = self.device.view(torch.bfloat16).view(count, 1, stretch // 2)
        pool = MLADevicePool(geometry, count, tensors=[(layer,)])
        route = Route(pool, [self.host.view(len(self.host), 1, 1, 1, stretch)], range(1))
        slots = self.on_device.to(DEVICE), self.in_host.to(DEVICE)
        mover, stream = KernelMover(), self.ends.streams[0]

        def with_programs(programs: int) -> Move:
            def ask(verb: str) -> None:
                with torch.cuda.stream(stream):
                    mover.move(route, *slots, range(1), to_pool=verb == "load", programs=programs)

            return self._move(ask)

        return with_programs

    def compiled(self, kernels: Compiled, name: str, settings: dict[str, tuple[int, ...]]) -> Move:
        """By a kernel of `gpu_link.cu` with these numbers by verb. Stretches only."""
        count, stretch = self.device.shape
        addresses = [
            (tensor.data_ptr() + slots * stretch).to(DEVICE)
            for tensor, slots in ((self.device, self.on_device), (self.host, self.in_host))
        ]
        stream = self.ends.streams[0]

        def ask(verb: str) -> None:
            target, source = addresses if verb == "load" else addresses[::-1]
            kernels.call(name, source, target, count, stretch, *settings[verb], stream=stream)

        return self._move(ask)

    def _move(self, ask: Callable[[str], None], streams: int = 1) -> Move:
        return Move(self.device.numel(), self.device, self.ends.streams[:streams], ask, self.ends)


def _parts(copies: Sequence[RowCopies], a_call: int) -> Iterator[RowCopies]:
    for piece in copies:
        for start in range(0, len(piece.source), a_call):
            some = slice(start, start + a_call)
            yield piece._replace(source=piece.source[some], target=piece.target[some])


@contextmanager
def _calls_of(count: int) -> Iterator[None]:
    """Has the package ask for so many copies a call."""
    usual = copy_engine.BATCH
    copy_engine.BATCH = count
    try:
        yield
    finally:
        copy_engine.BATCH = usual


class Compiled:
    """The kernels of `gpu_link.cu`. nvcc works on them while other parts run."""

    def __init__(self, directory: Path) -> None:
        self._built = directory / "gpu_link.so"
        self._library: ctypes.CDLL | None = None
        self._compiler: subprocess.Popen[str] | None = None
        nvcc, capability = shutil.which("nvcc"), torch.cuda.get_device_capability()
        self.missing: str | None = None
        """Why there are none."""
        if capability < (9, 0):
            self.missing = f"compute capability {capability} is below (9, 0)"
        elif nvcc is None:
            self.missing = "no nvcc on PATH"
        else:
            self._compiler = subprocess.Popen(
                [nvcc, *_OPTIONS, "-o", str(self._built), str(SOURCE)],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )

    def wait(self) -> str | None:
        """None when the kernels are there, or why they are not."""
        if self._compiler is not None:
            text, _ = self._compiler.communicate()
            if self._compiler.returncode:
                self.missing = f"nvcc gave {self._compiler.returncode}: {text[-2000:]}"
            self._compiler = None
        return self.missing

    def call(self, name: str, source: Tensor, target: Tensor, *numbers: int, stream: Any) -> None:
        """Launches one. Raises RuntimeError if CUDA refuses."""
        if self._library is None:
            self._library = ctypes.CDLL(str(self._built))
            self._library.message.restype = ctypes.c_char_p
        status = getattr(self._library, name)(
            ctypes.c_void_p(source.data_ptr()),
            ctypes.c_void_p(target.data_ptr()),
            *(ctypes.c_int(number) for number in numbers),
            ctypes.c_void_p(stream.cuda_stream),
        )
        if status:
            said = self._library.message(status).decode()
            raise RuntimeError(f"CUDA refused {name}{numbers}: {status} ({said})")
