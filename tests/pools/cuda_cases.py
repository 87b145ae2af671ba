"""Pools on a CUDA device beside CPU twins: a copy must leave what the CPU's leaves."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from pools.pool_cases import POISON, device_pool, parts, strided_pool

from hicache_storage.pools.device import DevicePool
from hicache_storage.pools.geometry import PageGeometry
from hicache_storage.pools.host import HostPool
from hicache_storage.pools.layouts import Layout
from hicache_storage.pools.strategy import Strategy
from hicache_storage.pools.transfer import backup, load_back

ORDERS = ("random", "contiguous", "runs")


def storages(pool: DevicePool) -> list[torch.Tensor]:
    """All memory behind the pool's tensors as bytes, each allocation once, in their order; what
    lies between strided rows is part of it."""
    found: dict[int, torch.Tensor] = {}
    for part in parts(pool):
        for tensor in part:
            memory = tensor.untyped_storage()
            if memory.data_ptr() not in found:
                empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
                found[memory.data_ptr()] = empty.set_(memory)  # type: ignore[call-overload]
    return list(found.values())


def pages_in_order(order: str, pages: int, count: int) -> torch.Tensor:
    """`count` page slots: in any order, in a row, or in runs of a few."""
    if order == "random":
        return torch.randperm(pages)[:count]
    if order == "contiguous":
        return torch.arange(count) + random.randrange(pages - count + 1)
    runs = torch.arange(pages).split(4)
    return torch.cat([runs[i] for i in torch.randperm(len(runs)).tolist()])[:count]


class Twins:
    """A device pool and a host pool, and the same on the CPU. Made once for many copies.

    `beside` is called before each copy: other work for the device.
    """

    def __init__(
        self,
        geometry: PageGeometry,
        pages: int,
        layout: Layout,
        *,
        strided: bool = False,
        pin: bool = True,
        beside: Callable[[], object] = lambda: None,
    ) -> None:
        make = strided_pool if strided else device_pool
        self.pages, self.host_pages = pages, pages + 3
        self.pool, self.twin = make(geometry, pages, "cuda"), make(geometry, pages, "cpu")
        self.host = HostPool(geometry, self.host_pages, layout, pin=pin)
        self.host_twin = HostPool(geometry, self.host_pages, layout, pin=False)
        self.beside = beside

    def check(self, strategy: Strategy, count: int, order: str = "random") -> None:
        """Backup and load-back of fresh random bytes write what the CPU's write, and nothing
        else anywhere."""
        for ours, theirs in zip(storages(self.pool), storages(self.twin), strict=True):
            ours.random_(0, 256)
            theirs.copy_(ours)
        source, destination = (pages_in_order(order, self.pages, count) for _ in range(2))
        middle = pages_in_order(order, self.host_pages, count)
        for host in (self.host, self.host_twin):
            host._memory.tensor.fill_(POISON)
        self.beside()
        moved = backup(self.pool, self.host, source, middle, strategy=strategy)
        backup(self.twin, self.host_twin, source, middle)
        moved.wait()
        assert torch.equal(self.host._memory.tensor, self.host_twin._memory.tensor)
        for memory in (*storages(self.pool), *storages(self.twin)):
            memory.fill_(POISON)
        self.beside()
        loading = load_back(self.host, self.pool, middle, destination, strategy=strategy)
        load_back(self.host_twin, self.twin, middle, destination)
        loading.synchronize()
        for ours, theirs in zip(storages(self.pool), storages(self.twin), strict=True):
            assert torch.equal(ours.cpu(), theirs)


class Model:
    """A forward pass for the device: matrix products on a stream of their own, a millisecond of
    them at a time."""

    def __init__(self) -> None:
        self.left, self.right = torch.randn(
            2, 2048, 2048, device="cuda", dtype=torch.bfloat16
        ).unbind()
        self.product = torch.empty_like(self.left)
        self.stream = torch.cuda.Stream()

    def forward(self) -> None:
        with torch.cuda.stream(self.stream):
            for _ in range(30):
                torch.mm(self.left, self.right, out=self.product)
