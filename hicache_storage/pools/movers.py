"""Movers: what gathers a device pool's rows and scatters them back, on the current stream.

`KernelMover` has one Triton kernel for all of it, and reaches pinned host memory too. `TorchMover`
needs torch alone; it moves between places on one device.
"""

from __future__ import annotations

import bisect
import functools
import importlib.util
import logging
import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from .routes import Route

_log = logging.getLogger(__name__)
_WARPS = 32
_TILE = 8192
"""Elements that a program moves at a time, 8 a thread: few programs suffice to fill the link."""
_UNIT_BYTES = 512
"""Most bytes that are addressed at once: 16 for each thread of a warp."""
_MOST_UNITS = 1 << 30


class Mover(Protocol):
    """Moves rows of whole pages; which, two equally long int64 tensors on the device say."""

    reaches_host: bool
    """Whether the other end may be pinned host memory."""

    def move(
        self,
        route: Route,
        pool_slots: Tensor,
        other_slots: Tensor,
        layers: range,
        *,
        to_pool: bool,
        programs: int,
        arrived: Tensor | None = None,
    ) -> None:
        """Moves the pages, in these layers, into the pool or out of it. Never waits. `programs`
        is how many multiprocessors it may take, where that can be said. With `arrived`, int32 on
        the device, each program adds 1 to `arrived[i]` once its share of `layers[i]` is there;
        needs `by_layer`."""
        ...

    def by_layer(self, route: Route, pages: int) -> bool:
        """Whether so many pages can be moved layer by layer in one launch."""
        ...


class TorchMover:
    """By torch's own index operations."""

    reaches_host = False

    def move(
        self,
        route: Route,
        pool_slots: Tensor,
        other_slots: Tensor,
        layers: range,
        *,
        to_pool: bool,
        programs: int,
        arrived: Tensor | None = None,
    ) -> None:
        """See `Mover`."""
        if arrived is not None:
            raise AssertionError("torch's operations don't say when a layer is there")
        for layer in layers:
            for rows, other in route.ends(layer):
                if to_pool:
                    rows.index_copy_(0, pool_slots, other.index_select(0, other_slots))
                else:
                    other.index_copy_(0, other_slots, rows.index_select(0, pool_slots))

    def by_layer(self, route: Route, pages: int) -> bool:
        """See `Mover`."""
        return False


@dataclass(frozen=True)
class _Planes:
    """Planes of equal shape: a part, or a head of it where heads aren't adjacent, in each layer.

    Plane i is of layer `layers[i]`, in ascending order. Steps are in bytes.
    """

    layers: list[int]
    pool_bases: Tensor
    other_bases: Tensor
    tokens: int
    row_bytes: int
    pool_steps: tuple[int, int]
    """From page to page and from token to token."""
    other_steps: tuple[int, int]
    aligned: int
    """A power of two that divides every address, at most 16."""

    def of(self, layers: range) -> tuple[int, int]:
        """The first plane of these layers, and how many there are."""
        first = bisect.bisect_left(self.layers, layers.start)
        return first, bisect.bisect_left(self.layers, layers.stop) - first

    @functools.cached_property
    def units_a_page(self) -> int:
        """Of a plane; see `_unit_bytes`."""
        return self.tokens * (self.row_bytes // _unit_bytes(self))

    @functools.cached_property
    def launches(self) -> tuple[_Launch, _Launch]:
        """Of the kernel, out of the pool and into it."""
        return _Launch(self, to_pool=False), _Launch(self, to_pool=True)


class _Launch:
    """The kernel for some planes in one direction, with all that is the same each time."""

    def __init__(self, planes: _Planes, *, to_pool: bool) -> None:
        from . import kernels

        self._kernels = kernels
        self._planes = planes
        self._nowhere = torch.empty(1, dtype=torch.int32, device=planes.pool_bases.device)
        self._to_pool = to_pool
        unit = _unit_bytes(planes)
        element = math.gcd(unit, planes.aligned, 8)
        pool = planes.pool_bases, planes.pool_steps
        other = planes.other_bases, planes.other_steps
        source, target = (other, pool) if to_pool else (pool, other)
        self._bases = source[0], target[0]
        self._constants = (
            *source[1],
            *target[1],
            planes.tokens,
            planes.row_bytes // unit,
            unit // element,
            kernels.ELEMENTS[element],
            element,
            planes.aligned,
            max(1, _TILE // (unit // element)),
            planes.tokens > 1 or planes.other_steps[0] != planes.row_bytes,
        )
        self._compiled: Any = None

    def __call__(
        self,
        pool_slots: Tensor,
        other_slots: Tensor,
        layers: range,
        programs: int,
        arrived: Tensor | None = None,
    ) -> None:
        first, count = self._planes.of(layers)
        if not count:
            return
        # What nobody waits for goes as if it were one layer.
        by_layer = 1 if arrived is None else len(layers)
        cells = self._nowhere if arrived is None else arrived
        ends = (other_slots, pool_slots) if self._to_pool else (pool_slots, other_slots)
        units = len(pool_slots) * self._planes.units_a_page
        planes = first, count // by_layer, by_layer
        arguments = *self._bases, *ends, cells, *planes, units, *self._constants
        if self._compiled is not None:
            self._compiled[programs, 1, 1](*arguments)
            return
        launched = self._kernels.move_rows[(programs,)](*arguments, num_warps=_WARPS)
        # With larger pages some launches would count in 64 bits, which takes another kernel.
        if self._kernels.CAN_LAUNCH_COMPILED and self._planes.units_a_page <= _MOST_UNITS:
            self._compiled = launched


class KernelMover:
    """By `kernels.move_rows`: one launch for each shape of rows, K and V together if equal."""

    reaches_host = True

    def move(
        self,
        route: Route,
        pool_slots: Tensor,
        other_slots: Tensor,
        layers: range,
        *,
        to_pool: bool,
        programs: int,
        arrived: Tensor | None = None,
    ) -> None:
        """See `Mover`."""
        for planes in self._planes(route):
            step = max(1, _MOST_UNITS // planes.units_a_page)
            for start in range(0, max(1, len(pool_slots)), step):
                ends = pool_slots[start : start + step], other_slots[start : start + step]
                planes.launches[to_pool](*ends, layers, programs, arrived)

    def by_layer(self, route: Route, pages: int) -> bool:
        """See `Mover`. Not for rows of two shapes, or so many that they take two launches."""
        planes = self._planes(route)
        if len(planes) != 1 or pages > _MOST_UNITS // planes[0].units_a_page:
            return False
        return len(planes[0].layers) % len(route.layers) == 0

    @staticmethod
    def _planes(route: Route) -> list[_Planes]:
        if route.prepared is None:
            route.prepared = _planes(route)
        found: list[_Planes] = route.prepared
        return found

    def prepare(self, route: Route, *, to_pool: bool) -> None:
        """Compiles what `move` will need."""
        none = torch.empty(0, dtype=torch.int64, device=route.pool.device)
        self.move(route, none, none, route.layers, to_pool=to_pool, programs=1)


def _unit_bytes(planes: _Planes) -> int:
    """The largest power of two that divides a row, within limits."""
    return math.gcd(planes.row_bytes, _UNIT_BYTES)


def _planes(route: Route) -> list[_Planes]:
    """The route's planes, those of one shape together."""
    device = route.pool.device
    found: dict[tuple[int, ...], list[tuple[int, int, int]]] = {}
    for layer in route.layers:
        for rows, other in route.ends(layer):
            _, tokens, heads, size = rows.shape
            if heads == 1 or rows.stride(2) == other.stride(2) == size:
                heads, size = 1, heads * size
            steps = [rows.stride(0), rows.stride(1), other.stride(0), other.stride(1)]
            if steps[1] == steps[3] == size or tokens == 1:
                tokens, size = 1, tokens * size
                steps[1] = steps[3] = size
            for head in range(heads):
                pool_base = rows.data_ptr() + head * rows.stride(2)
                other_base = other.data_ptr() + head * other.stride(2)
                found.setdefault((tokens, size, *steps), []).append((layer, pool_base, other_base))
    result = []
    for (tokens, size, *steps), planes in found.items():
        layers, pool_bases, other_bases = zip(*planes, strict=True)
        bases = _table([pool_bases, other_bases], device)
        result.append(
            _Planes(
                list(layers),
                bases[0],
                bases[1],
                tokens,
                size,
                (steps[0], steps[1]),
                (steps[2], steps[3]),
                math.gcd(16, size, *steps, *pool_bases, *other_bases),
            )
        )
    return result


def _table(rows: list[tuple[int, ...]], device: torch.device) -> Tensor:
    """On the device when this returns, so that any stream may use it. An idle stream brings it:
    others would be waited for."""
    idle = torch.cuda.Stream(device) if device.type == "cuda" else None
    with torch.cuda.stream(idle):
        return torch.tensor(rows, dtype=torch.int64, device=device)


@functools.lru_cache(maxsize=1)
def cuda_mover() -> KernelMover | TorchMover:
    """The mover for CUDA devices: kernels where Triton is installed."""
    if importlib.util.find_spec("triton") is not None:
        return KernelMover()
    _log.warning(
        "triton is not installed: pages that are small or scattered are moved by torch, "
        "which is slower"
    )
    return TorchMover()
