"""What a forward pass takes whose layers wait for a load-back: `gpu_transfer.py`'s part `forward`.

The pass is a stand-in: in each layer one product of the new tokens with as many weights as a layer
of an 8B model has. Layer i starts once layer i's pages are there, so a load-back that brings them
early hides behind the pass, and one that brings all of them at the end adds to it.
"""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import gpu_peer
import torch
from gpu_pools import SHAPES, Results, Slots, device_pool, in_order, pools_for, turns

from hicache_storage.pools.layouts import LAYOUTS, Layout
from hicache_storage.pools.paired import PairedPools
from hicache_storage.pools.strategy import STRATEGIES, Strategy

NEW_TOKENS = (64, 512, 2048)
HIDDEN, WEIGHTS = 4096, 13 * 4096
"""A layer's weights are HIDDEN x WEIGHTS, of bfloat16."""
ROUNDS = 5
Wait = Callable[[int], None]
"""Has the current stream wait for a layer."""
Load = Callable[[], Wait]
"""Asks for a load-back."""


class Forward:
    """A pass of so many layers over so many new tokens, on the current stream."""

    def __init__(self, layers: int, tokens: int) -> None:
        self.layers = layers
        self.weights = _weights()
        self.new, self.out = _bfloat16(tokens, HIDDEN), _bfloat16(tokens, WEIGHTS)

    def behind(self, load: Load) -> float:
        """Milliseconds from the asking for the pages until the last layer has been computed."""
        torch.cuda.synchronize()
        began = time.perf_counter()
        wait = load()
        for layer in range(self.layers):
            wait(layer)
            torch.mm(self.new, self.weights[layer % 2], out=self.out)
        torch.cuda.current_stream().synchronize()
        return (time.perf_counter() - began) * 1e3


def forward(results: Results, quick: bool) -> None:
    """Half of the pages come back; the others stay, or are backed up meanwhile by the same
    strategy. "No load-back" is the pass with nothing beside it."""
    shapes = ("MHA 32 layers", "MLA 61 layers")[quick:]
    for name, layout in itertools.product(shapes, LAYOUTS):
        pool = device_pool(SHAPES[name])
        pools = pools_for(pool, layout)
        device, host = (in_order("random", n, n) for n in (pool.num_pages, pools.host.num_pages))
        half = pool.num_pages // 2
        loaded, kept = (device[:half], host[:half]), (device[half:], host[half : 2 * half])
        with _peer(name, layout, half) as peer:
            for tokens, busy in itertools.product(NEW_TOKENS, (False, True)):
                passes = Forward(pool.geometry.layers, tokens)
                others = kept if busy else None
                loads: dict[str, Load] = {"no load-back": lambda: lambda layer: None}
                for strategy in STRATEGIES:
                    loads[strategy] = _ours(pools, loaded, strategy, others)
                if not busy:
                    loads |= peer
                found = _in_turns(passes, loads)
                alone = found["no load-back"]
                for way, took in found.items():
                    results.add(
                        "forward",
                        shape=name,
                        layout=layout,
                        new_tokens=tokens,
                        beside="a backup" if busy else "",
                        way=way,
                        ms=round(took, 2),
                        added_ms=round(took - alone, 2),
                    )


@functools.cache
def _weights() -> tuple[torch.Tensor, torch.Tensor]:
    """Of two layers in turn: more than the device's cache holds."""
    return _bfloat16(HIDDEN, WEIGHTS), _bfloat16(HIDDEN, WEIGHTS)


def _bfloat16(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def _ours(pools: PairedPools, slots: Slots, strategy: Strategy, others: Slots | None) -> Load:
    pages, host = slots

    def load() -> Wait:
        pools.strategy = strategy
        if others is not None:
            pools.backup(*others)
        return pools.load_back(host, pages).wait

    return load


@contextmanager
def _peer(name: str, layout: Layout, pages: int) -> Iterator[dict[str, Load]]:
    """SGLang's load-back of as many pages, by the path for this layout that is fastest."""
    if not gpu_peer.is_here():
        yield {}
        return
    path = gpu_peer.PATHS[layout][0]
    peer = gpu_peer.Peer(SHAPES[name], layout, path, pages)
    yield {f"SGLang {path}": peer.by_layer}
    peer.close()


def _in_turns(passes: Forward, loads: dict[str, Load]) -> dict[str, float]:
    """Medians in milliseconds."""
    found: dict[str, list[float]] = {name: [] for name in loads}
    for name, counts in turns(loads, ROUNDS):
        took = passes.behind(loads[name])
        if counts:
            found[name].append(took)
    return {name: statistics.median(times) for name, times in found.items()}
