"""Which way pages take between device and host: the copy engines', or a kernel's.

Copy engines leave the multiprocessors to the model but lose time with each stretch of host memory,
some 0.05 us where stretches are equally spaced and 0.4 us where they aren't. A kernel that reads
or writes pinned memory doesn't mind small rows, reaches 93 % of the link and takes a few
multiprocessors. The limits below are where one overtakes the other, measured on an H200 at 55 GB/s
(benchmarks/results): a kernel writes at 52 GB/s and reads at 50 to 51 whatever the row.
"""

from __future__ import annotations

import itertools
from typing import Literal, NamedTuple, get_args

from ..errors import ConfigError
from .geometry import PageGeometry
from .layouts import Layout

Strategy = Literal["auto", "kernel", "copy_engine"]
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)

BACKUP_STRETCH = 32 << 10
"""Bytes of host memory in one stretch from which on backups go by copy engine: 51 GB/s there, 54
and more from 128 KiB on. Below, the engine's rate falls to 40 GB/s and less."""
LOAD_STRETCH = 64 << 10
"""The same for load-backs layer by layer: 52 GB/s at 64 KiB, 31 at 32 KiB."""
LOAD_ROW = 48 << 10
"""Bytes of adjacent layers in a token-layer page that one load-back by copy engine takes: 52 GB/s;
half of it gives 49, less than a kernel."""
ENGINE_ROW = 32 << 10
"""The same where the copy engine takes every layer, which then come in more groups."""
FEWEST_ROWS = 8
"""Tokens of a page from which on that pays: with fewer, there are too many copies."""
_STEP_BYTES = 2 << 20
"""Layers that are smaller together share a step: some 40 us on the link."""
KERNEL_SHARE = 8
"""A load-back of token-layer pages takes 1 in this many layers by kernel, one by one, so that the
forward pass starts early, and the rest by copy engine."""


class Step(NamedTuple):
    """Layers that are loaded together, and how."""

    layers: range
    how: Literal["kernel", "direct", "staged"]
    """By kernel; by copy engine into the layers, or into staging memory and from there."""


def check_strategy(strategy: str) -> None:
    """Raises ConfigError unless `strategy` is one of STRATEGIES."""
    if strategy not in STRATEGIES:
        raise ConfigError(f"strategy must be one of {', '.join(STRATEGIES)}; got {strategy!r}")


def backup_by_kernel(
    geometry: PageGeometry, layout: Layout, run_pages: float, strategy: Strategy
) -> bool:
    """Whether a backup goes by kernel, where there is one; `run_pages` is how many pages follow
    each other in the host pool on average."""
    if strategy != "auto":
        return strategy == "kernel"
    stretch = min(geometry.part_bytes) * run_pages
    if layout == "layer_first":
        stretch /= geometry.layers
    return stretch < BACKUP_STRETCH


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

    `run_pages` is how many pages follow each other at both ends on average; `kernels` whether a
    kernel can read the host pool; `dense` whether a page of one layer is one stretch at both ends.
    """
    layers = range(geometry.layers)
    layer_bytes = max(1, pages) * geometry.page_bytes // geometry.layers
    few = -(-_STEP_BYTES // layer_bytes)
    if strategy == "kernel" and kernels:
        return _steps(layers, few, "kernel")
    row = min(geometry.part_bytes) // (geometry.layers * geometry.page_size)
    stretch = row * geometry.page_size * (run_pages if layout == "layer_first" else 1)
    if dense and stretch >= LOAD_STRETCH:
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
