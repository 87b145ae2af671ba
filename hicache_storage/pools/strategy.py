"""Which way pages take between device and host: the copy engines', or a kernel's.

Copy engines leave the multiprocessors to the model, but take 0.5 to 1 us of the calling thread for
each stretch of memory, and shorter stretches slow them down. They copy "direct", layer by layer
between the pools, which keeps what they write close together; as "rows", a page's layers one copy,
where those follow each other in the host pool; or "staged", through memory on the device, where a
kernel gathers or scatters rows, so that few and long stretches cross the link. A "kernel" that
reads or writes pinned memory itself doesn't mind small rows and costs the caller least, but it
takes a few multiprocessors, its writes hold up what else the device does, and its packets of 128
bytes carry 52.5 GB/s out and 51.3 back at most where plain copies reach 55. The limits below are
where one overtakes the other on an H200 (benchmarks/results/gpu_link.md).
"""

from __future__ import annotations

import itertools
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
half of it gives 49, less than a kernel."""
ENGINE_ROW = 32 << 10
"""The same where the copy engine takes every layer, which then come in more groups."""
FEWEST_ROWS = 8
"""Tokens of a page from which on that pays: with fewer, there are too many copies."""
_STEP_BYTES = 2 << 20
"""Layers that are smaller together share a step: some 40 us on the link."""
KERNEL_SHARE = 16
"""A load-back of token-layer pages takes 1 in this many layers by kernel, one by one, so that the
forward pass starts early, and the rest by copy engine."""


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
    run_pages: float,
    strategy: Strategy,
    *,
    kernels: bool,
    dense: bool,
    spaced: bool,
) -> Way:
    """How a backup goes.

    `run_pages` is how many pages follow each other in the host pool on average; `kernels` whether
    a kernel can write to it; `dense` whether a page of one layer is one stretch at both ends;
    `spaced` whether the device pool's layers are equally spaced in one allocation, so that a page
    is one copy.
    """
    if strategy == "kernel" and kernels:
        return "kernel"
    only_copies = strategy == "copy_engine" or not kernels
    part_bytes = min(geometry.part_bytes)
    by_layer = layout == "layer_first" or geometry.layers == 1
    if dense and part_bytes // geometry.layers >= DIRECT_STRETCH and (by_layer or spaced):
        return "direct" if by_layer else "rows"
    long = not by_layer and part_bytes * run_pages >= STAGED_STRETCH
    return "staged" if only_copies or long else "kernel"


def load_steps(
    geometry: PageGeometry,
    layout: Layout,
    pages: int,
    run_pages: float,
    strategy: Strategy,
    *,
    kernels: bool,
    dense: bool,
) -> list[Step]:
    """The steps of a load-back, in the order of layers.

    `run_pages` is how many pages follow each other at both ends on average, of account with
    `layer_first` alone; `kernels` whether a kernel can read the host pool; `dense` whether a page
    of one layer is one stretch at both ends.
    """
    layers = range(geometry.layers)
    layer_bytes = max(1, pages) * geometry.page_bytes // geometry.layers
    few = -(-_STEP_BYTES // layer_bytes)
    if strategy == "kernel" and kernels:
        return _steps(layers, few, "kernel")
    row = min(geometry.part_bytes) // (geometry.layers * geometry.page_size)
    stretch = row * geometry.page_size * (run_pages if layout == "layer_first" else 1)
    if dense and stretch >= DIRECT_STRETCH:
        return _steps(layers, few, "direct")
    if strategy == "copy_engine" or not kernels:
        row = row * geometry.page_size if layout == "layer_first" else row
        return _even(layers, len(layers) // max(few, -(-ENGINE_ROW // row)), "staged")
    first, wide = -(-len(layers) // KERNEL_SHARE), -(-LOAD_ROW // row)
    if (
        layout != "page_first"
        or geometry.page_size < FEWEST_ROWS
        or first < few
        or len(layers) - first < wide
    ):
        return _steps(layers, few, "kernel")
    rest = layers[first:]
    return [*_steps(layers[:first], few, "kernel"), *_even(rest, len(rest) // wide, "staged")]


def _steps(layers: range, size: int, how: Literal["kernel", "direct"]) -> list[Step]:
    return [Step(layers[start : start + size], how) for start in range(0, len(layers), size)]


def _even(layers: range, groups: int, how: Literal["staged"]) -> list[Step]:
    """As many groups, at least one, as even as they can be."""
    groups = max(1, groups)
    bounds = [len(layers) * i // groups for i in range(groups + 1)]
    return [Step(layers[start:stop], how) for start, stop in itertools.pairwise(bounds)]
