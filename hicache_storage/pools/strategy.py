"""Which way pages take between device and host: the copy engines', or a kernel's.

Copy engines leave the multiprocessors to the model, but take 0.5 to 1 us of the calling thread for
each stretch of memory, and shorter stretches slow them down. They copy "direct", layer by layer
between the pools, which keeps what they write close together; as "rows", a page's layers one copy,
where those follow each other in the host pool; or "staged", through memory on the device, where a
kernel gathers or scatters rows, so that few and long stretches cross the link. A "kernel" that
reads or writes pinned memory itself doesn't mind small rows and costs the caller least, but it
takes a few multiprocessors, its writes hold up what else the device does, and its packets of 128
bytes carry 52.5 GB/s out and 51.3 back at most where plain copies reach 55.

"auto" backs up by what gives the highest rate, and loads back by what a forward pass that waits
layer by layer is done with first; "copy_engine" by what gives the highest rate without
multiprocessors. The limits below are where one overtakes the other on an H200
(benchmarks/results/gpu_link.md, and the part `forward` of gpu_transfer.md).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple, get_args

from ..errors import ConfigError
from .geometry import PageGeometry
from .layouts import Layout

Strategy = Literal["auto", "kernel", "copy_engine"]
Way = Literal["kernel", "direct", "rows", "staged"]
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)

DIRECT_STRETCH = 64 << 10
"""Bytes of a layer's page from which on pages go direct, or as rows: 53 GB/s there, 54 with 128
KiB; half of it gives 51, which a kernel reaches too."""
STAGED_STRETCH = 256 << 10
"""Bytes of host memory that all layers of a page have in a stretch from which on backups are
staged: 53 to 54 GB/s there."""
LOAD_ROW = 48 << 10
"""Bytes of adjacent layers in a token-layer page that one load-back by copy engine takes: 52 GB/s;
half of it gives 49. If no two groups of layers have as much, pages come whole, at 54."""
_STEP_BYTES = 2 << 20
"""Layers that are smaller together share a step: some 40 us on the link."""
LOAD_STRETCH = 512 << 10
"""Bytes of adjacent layers in a layer-token page that one load-back takes where a layer's are too
few: 54.7 GB/s."""
_FIRST_SHARE = 16
"""A kernel takes 1 in this many pages of a staged backup while the rest is being prepared, so that
the link is busy soon."""


class Step(NamedTuple):
    """Layers that are loaded together, and how."""

    layers: range
    how: Way


def check_strategy(strategy: str) -> None:
    """Raises ConfigError unless `strategy` is one of STRATEGIES."""
    if strategy not in STRATEGIES:
        raise ConfigError(f"strategy must be one of {', '.join(STRATEGIES)}; got {strategy!r}")


def backup_way(
    geometry: PageGeometry,
    layout: Layout,
    run_pages: Callable[[], float],
    strategy: Strategy,
    *,
    kernels: bool,
    dense: bool,
    spaced: bool,
) -> Way:
    """How a backup goes.

    `run_pages` says how many pages follow each other in the host pool on average, as they are
    given; `kernels` whether a kernel can write to it; `dense` whether a page of one layer is one
    stretch at both ends; `spaced` whether the device pool's layers are equally spaced in one
    allocation, so that a page is one copy.
    """
    if strategy == "kernel" and kernels:
        return "kernel"
    only_copies = strategy == "copy_engine" or not kernels
    by_layer = layout == "layer_first" or geometry.layers == 1
    if dense and geometry.layer_stretch >= DIRECT_STRETCH and (by_layer or spaced):
        return "direct" if by_layer else "rows"
    if only_copies:
        return "staged"
    if by_layer:
        return "kernel"
    # Only if needed: the link waits meanwhile.
    part_bytes = min(geometry.part_bytes)
    long = part_bytes >= STAGED_STRETCH or part_bytes * run_pages() >= STAGED_STRETCH
    return "staged" if long else "kernel"


def pages_first(count: int) -> int:
    """How many of `count` pages a kernel takes before the others are staged."""
    return -(-count // _FIRST_SHARE)


def loads_directly(
    geometry: PageGeometry,
    layout: Layout,
    pages: int,
    run_pages: Callable[[], float],
    strategy: Strategy,
    *,
    kernels: bool,
    dense: bool,
) -> bool:
    """Whether a load-back goes direct, all of it.

    `run_pages` says how many pages follow each other at both ends on average, as they are given, of
    account with `layer_first` alone; `kernels` whether a kernel can read the host pool; `dense`
    whether a page of one layer is one stretch at both ends.
    """
    if not dense or pages == 0 or (strategy == "kernel" and kernels):
        return False
    stretch = geometry.layer_stretch
    if layout == "layer_first" and stretch < DIRECT_STRETCH <= stretch * pages:
        stretch = int(stretch * run_pages())
    return stretch >= DIRECT_STRETCH


def load_steps(
    geometry: PageGeometry,
    layout: Layout,
    pages: int,
    strategy: Strategy,
    *,
    kernels: bool,
    direct: bool,
) -> Mapping[int, Step]:
    """The steps of a load-back in the order of layers, each by its first layer; `direct` as
    `loads_directly` says."""
    layer_bytes = max(1, pages) * geometry.page_bytes // geometry.layers
    return _load_steps(geometry, layout, -(-_STEP_BYTES // layer_bytes), strategy, kernels, direct)


@functools.lru_cache(maxsize=1024)
def _load_steps(
    geometry: PageGeometry,
    layout: Layout,
    few: int,
    strategy: Strategy,
    kernels: bool,
    direct: bool,
) -> Mapping[int, Step]:
    """`few` layers make a step of some size; `direct` is whether pages may go so."""
    layers = range(geometry.layers)
    stretch = geometry.layer_stretch
    if direct:
        steps = _steps(layers, few, "direct")
    elif kernels and strategy != "copy_engine":
        steps = _steps(layers, few, "kernel")
    else:
        wide = {
            "layer_first": 1,
            "page_first": -(-LOAD_ROW * geometry.page_size // stretch),
            "page_first_direct": -(-LOAD_STRETCH // stretch),
        }[layout]
        steps = _groups(layers, max(few, wide))
    return MappingProxyType({step.layers.start: step for step in steps})


def _steps(layers: range, size: int, how: Literal["kernel", "direct"]) -> list[Step]:
    return [Step(layers[start : start + size], how) for start in range(0, len(layers), size)]


def _groups(layers: range, fewest: int) -> list[Step]:
    """Groups of so many layers at least, or all of them; as even as they can be."""
    groups = max(1, len(layers) // fewest)
    bounds = [len(layers) * i // groups for i in range(groups + 1)]
    return [Step(layers[start:stop], "staged") for start, stop in itertools.pairwise(bounds)]
