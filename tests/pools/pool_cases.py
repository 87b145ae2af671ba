"""Pools with known bytes, and what a page of them must look like: an oracle in plain loops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from hicache_storage.pools.device import DevicePool, MHADevicePool, MLADevicePool
from hicache_storage.pools.geometry import PageGeometry
from hicache_storage.pools.host import HostPool

DTYPES = [
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.uint8,
]
POISON = 0xAB

MHA = PageGeometry("mha", 2, 2, 8, 8, 4, torch.bfloat16)
"""Pages of 512 bytes."""
MLA = PageGeometry("mla", 2, 1, 16, 0, 4, torch.bfloat16)
"""Pages of 256 bytes."""


def device_pool(geometry: PageGeometry, num_pages: int, device: str = "cpu") -> DevicePool:
    """A pool of this geometry's kind, all zero."""
    cls = MHADevicePool if geometry.kind == "mha" else MLADevicePool
    return cls(geometry, num_pages, device)


def strided_pool(geometry: PageGeometry, num_pages: int, device: str = "cpu") -> DevicePool:
    """The same over views into larger tensors: tokens, and heads where there are several, are
    not adjacent."""
    tokens = num_pages * geometry.page_size

    def part(dim: int) -> torch.Tensor:
        whole = torch.zeros(geometry.heads, tokens, 3, dim, dtype=geometry.dtype, device=device)
        return whole[:, :, 1].transpose(0, 1)

    layers = [tuple(part(dim) for dim in geometry.row_dims) for _ in range(geometry.layers)]
    if geometry.kind == "mha":
        k, v = zip(*layers, strict=True)
        return MHADevicePool.from_tensors(k, v, geometry.page_size)
    return MLADevicePool.from_tensors([layer[0] for layer in layers], geometry.page_size)


def parts(pool: DevicePool) -> list[list[torch.Tensor]]:
    """The pool's tensors as [part][layer]."""
    layers = [pool.layer_tensors(layer) for layer in range(pool.geometry.layers)]
    return [list(part) for part in zip(*layers, strict=True)]


def fill_random(pool: DevicePool, seed: int) -> None:
    """Random bytes everywhere, NaN patterns included."""
    source = np.random.default_rng(seed)
    for part in parts(pool):
        for tensor in part:
            shape = tensor.view(torch.uint8).shape
            noise = source.integers(0, 256, tuple(shape), dtype=np.uint8)
            tensor.view(torch.uint8).copy_(torch.from_numpy(noise))


def fill(pool: DevicePool, byte: int) -> None:
    """One byte everywhere."""
    for part in parts(pool):
        for tensor in part:
            tensor.view(torch.uint8).fill_(byte)


def rows(pool: DevicePool) -> list[list[list[bytes]]]:
    """A copy of every row, as [part][layer][token]."""
    return [
        [[bytes(row) for row in token_bytes(tensor)] for tensor in part] for part in parts(pool)
    ]


def token_bytes(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """(N, H, D) as (N, bytes), copied."""
    flat = tensor.detach().cpu().contiguous().view(torch.uint8)
    return flat.reshape(flat.shape[0], -1).numpy().copy()


def page_bytes(pool: DevicePool, index: int, order: str) -> bytes:
    """What the page in slot `index` is in a store, by the rules in words: all of K and then all
    of V; layer by layer, or token by token."""
    every = rows(pool)
    size = pool.geometry.page_size
    tokens = range(index * size, (index + 1) * size)
    layers = range(pool.geometry.layers)
    found = b""
    for part in every:
        if order == "layer_token":
            found += b"".join(part[layer][token] for layer in layers for token in tokens)
        else:
            found += b"".join(part[layer][token] for token in tokens for layer in layers)
    return found


def host_page(host: HostPool, index: int) -> bytes:
    """The bytes in a host slot."""
    return b"".join(host.spans(index))


def poison(host: HostPool, byte: int = POISON) -> None:
    """One byte in every slot."""
    for index in range(host.num_pages):
        for span in host.spans(index):
            span[:] = bytes([byte]) * len(span)


def slots(values: Sequence[int]) -> torch.Tensor:
    """Page indices as the pools take them."""
    return torch.tensor(list(values), dtype=torch.int64)


@dataclass(frozen=True)
class Case:
    """A random pair of pools and a transfer between them."""

    target: PageGeometry
    draft: PageGeometry | None
    layout: Any
    device_pages: int
    host_pages: int
    source: list[int]
    host: list[int]
    destination: list[int]
    strided: bool


@st.composite
def geometries(draw: st.DrawFn, page_size: int | None = None) -> PageGeometry:
    """Small pages of any kind; odd row sizes included."""
    size = page_size or draw(st.integers(1, 5))
    dtype = draw(st.sampled_from(DTYPES))
    layers, dim = draw(st.integers(1, 4)), draw(st.integers(1, 9))
    if draw(st.booleans()):
        return PageGeometry("mla", layers, 1, dim, 0, size, dtype)
    heads, v_dim = draw(st.integers(1, 3)), draw(st.integers(1, 9))
    return PageGeometry("mha", layers, heads, dim, v_dim, size, dtype)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Geometry x layout x dtype x indices, with or without a draft."""
    target = draw(geometries())
    draft = draw(st.none() | geometries(target.page_size))
    device_pages, host_pages = draw(st.integers(1, 8)), draw(st.integers(1, 8))
    count = draw(st.integers(0, min(device_pages, host_pages)))

    def pick(pages: int) -> list[int]:
        return draw(st.permutations(range(pages)))[:count]

    return Case(
        target,
        draft,
        draw(st.sampled_from(["layer_first", "page_first", "page_first_direct"])),
        device_pages,
        host_pages,
        pick(device_pages),
        pick(host_pages),
        pick(device_pages),
        draw(st.booleans()),
    )
