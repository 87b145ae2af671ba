"""The models whose pages `gpu_transfer.py` moves, and where it puts what it finds."""

from __future__ import annotations

from typing import Any

import torch

from hicache_storage.pools.device import DevicePool, MHADevicePool, MLADevicePool
from hicache_storage.pools.geometry import PageGeometry

TOKENS = 16384
SHAPES = {
    "MHA 32 layers": PageGeometry("mha", 32, 8, 128, 128, 64, torch.bfloat16),
    "MLA 61 layers": PageGeometry("mla", 61, 1, 576, 0, 64, torch.bfloat16),
    "draft 1 layer": PageGeometry("mha", 1, 8, 128, 128, 64, torch.bfloat16),
}
Row = dict[str, Any]
Times = dict[str, list[float]]


class Results:
    """Rows by part, printed as they come."""

    def __init__(self) -> None:
        self.rows: dict[str, list[Row]] = {}

    def add(self, part: str, **row: Any) -> None:
        self.rows.setdefault(part, []).append(row)
        print(part, *(f"{name}={value}" for name, value in row.items()), flush=True)


def device_pool(geometry: PageGeometry) -> DevicePool:
    """Room for TOKENS tokens, random bytes."""
    cls = MHADevicePool if geometry.kind == "mha" else MLADevicePool
    pool = cls(geometry, TOKENS // geometry.page_size, "cuda")
    draw(pool)
    return pool


def layers_apart(geometry: PageGeometry) -> DevicePool:
    """An MHA pool over tensors that lie anywhere, as some engines have them."""
    shape = TOKENS, geometry.heads, geometry.head_dim
    k, v = (
        [torch.empty(shape, dtype=geometry.dtype, device="cuda") for _ in range(geometry.layers)]
        for _ in range(2)
    )
    pool = MHADevicePool.from_tensors(k, v, geometry.page_size)
    draw(pool)
    return pool


def draw(pool: DevicePool) -> None:
    for layer in range(pool.geometry.layers):
        for tensor in pool.layer_tensors(layer):
            tensor.view(torch.uint8).random_(0, 256)


def every_tensor(pool: DevicePool) -> list[torch.Tensor]:
    return [
        tensor.view(torch.uint8)
        for layer in range(pool.geometry.layers)
        for tensor in pool.layer_tensors(layer)
    ]
