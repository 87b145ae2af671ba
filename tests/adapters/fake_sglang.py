"""What a storage backend sees of SGLang, as small doubles: host pools, configs, base classes.

Pools have the shapes, page tensors and page addresses that SGLang's have, and nothing else.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass, field
from enum import Enum
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from hicache_storage.adapters.sglang import bind
from hicache_storage.pools.geometry import PageGeometry

LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")


class MhaHostPool:
    """K and V of `heads` heads in one tensor with a leading 2."""

    def __init__(
        self,
        layout: str = "page_first",
        *,
        pages: int = 8,
        page_size: int = 4,
        layers: int = 2,
        heads: int = 2,
        dim: int = 8,
        dtype: torch.dtype = torch.bfloat16,
        start_layer: int = 0,
    ) -> None:
        self.layout, self.page_size, self.page_num = layout, page_size, pages
        self.size = pages * page_size
        self.layer_num, self.head_num, self.head_dim = layers, heads, dim
        self.dtype, self.start_layer, self.device = dtype, start_layer, "cpu"
        self.size_per_token = 2 * layers * heads * dim * dtype.itemsize
        shape = {
            "layer_first": (2, layers, self.size, heads, dim),
            "page_first": (2, self.size, layers, heads, dim),
            "page_first_direct": (2, pages, layers, page_size, heads, dim),
            "page_head": (2, pages, heads, page_size, layers, dim),
        }[layout]
        self.kv_buffer = torch.zeros(shape, dtype=dtype)

    @property
    def k_buffer(self) -> Tensor:
        return self.kv_buffer[0]

    @property
    def v_buffer(self) -> Tensor:
        return self.kv_buffer[1]

    def _page(self, index: int) -> tuple[Any, ...]:
        if self.layout == "layer_first":
            return (slice(None), slice(None), slice(index, index + self.page_size))
        if self.layout == "page_first":
            return (slice(None), slice(index, index + self.page_size))
        page = index // self.page_size
        return (slice(None), slice(page, page + 1))

    def get_data_page(self, index: int, flat: bool = True) -> Tensor:
        page = self.kv_buffer[self._page(index)]
        return page.flatten() if flat else page

    def get_dummy_flat_data_page(self) -> Tensor:
        return torch.zeros(self.page_size * self.size_per_token, dtype=torch.uint8).view(self.dtype)

    def set_from_flat_data_page(self, index: int, data_page: Tensor) -> None:
        place = self._page(index)
        self.kv_buffer[place] = data_page.reshape(self.kv_buffer[place].shape)


class MlaHostPool(MhaHostPool):
    """One latent row a token."""

    def __init__(self, layout: str = "page_first", *, dim: int = 16, **options: Any) -> None:
        super().__init__(layout, dim=dim, heads=1, **options)
        del self.head_num, self.head_dim
        self.kv_cache_dim = dim
        self.size_per_token //= 2
        self.kv_buffer = self.kv_buffer[0].clone()

    def _page(self, index: int) -> tuple[Any, ...]:
        return super()._page(index)[1:]


class UnequalHostPool(MhaHostPool):
    """K and V of unequal width: pages have addresses and no flat form."""

    def __init__(self, *, dim: int = 8, v_dim: int = 4, pages: int = 8) -> None:
        super().__init__("page_first", dim=dim, pages=pages)
        self.v_head_dim = v_dim
        self.size_per_token = self.layer_num * self.head_num * (dim + v_dim) * self.dtype.itemsize
        shape = (self.size, self.layer_num, self.head_num)
        self.kv_buffer = [  # type: ignore[assignment]
            torch.zeros(*shape, dim, dtype=self.dtype),
            torch.zeros(*shape, v_dim, dtype=self.dtype),
        ]

    def get_data_page(self, index: int, flat: bool = True) -> Tensor:
        raise NotImplementedError("no flat page")

    get_dummy_flat_data_page = get_data_page  # type: ignore[assignment]

    def get_page_buffer_meta(self, indices: Tensor) -> tuple[list[int], list[int]]:
        pointers, sizes = [], []
        for index in indices.tolist()[:: self.page_size]:
            for part in self.kv_buffer:
                page = part[index : index + self.page_size]
                pointers.append(page.data_ptr())
                sizes.append(page.numel() * page.element_size())
        return pointers, sizes


class StateHostPool:
    """Two states a slot, of unlike types, shown as one flat copy; addresses if `addressed`."""

    def __init__(self, *, slots: int = 8, addressed: bool = True) -> None:
        self.page_size, self.size, self.page_num = 1, slots, slots
        self.layout, self.dtype, self.layer_num = "page_first", torch.bfloat16, 3
        self.size_per_token = 3 * 5 * 4 + 3 * 7 * 2
        self.temporal = torch.zeros(slots, 3, 5)
        self.conv = [torch.zeros(slots, 3, 7, dtype=torch.bfloat16)]
        self._addressed = addressed

    def _parts(self, index: int) -> list[Tensor]:
        return [self.temporal[index], self.conv[0][index]]

    def get_data_page(self, index: int, flat: bool = True) -> Tensor:
        return torch.cat([part.reshape(-1).view(torch.uint8) for part in self._parts(index)])

    def get_dummy_flat_data_page(self) -> Tensor:
        return torch.zeros(self.size_per_token, dtype=torch.uint8)

    def set_from_flat_data_page(self, index: int, data_page: Tensor) -> None:
        start = 0
        for part in self._parts(index):
            end = start + part.numel() * part.element_size()
            part.copy_(data_page[start:end].clone().view(part.dtype).reshape(part.shape))
            start = end

    def get_page_buffer_meta(self, indices: Tensor) -> tuple[list[int], list[int]]:
        if not self._addressed:
            raise NotImplementedError
        parts = [part for index in indices.tolist() for part in self._parts(index)]
        return [p.data_ptr() for p in parts], [p.numel() * p.element_size() for p in parts]


class SlotsOnlyPool:
    """Page slots without memory."""

    def __init__(self) -> None:
        self.page_size, self.size, self.page_num, self.layout = 4, 32, 8, "layer_first"
        self.size_per_token, self.kv_buffer, self.dtype = 0, None, torch.uint8

    def get_data_page(self, index: int, flat: bool = True) -> Tensor:
        return torch.empty(0, dtype=torch.uint8)


def fill(pool: Any, seed: int = 0) -> None:
    """Random bytes in every tensor of the pool."""
    generator = torch.Generator().manual_seed(seed)
    for value in vars(pool).values():
        for tensor in value if isinstance(value, list) else (value,):
            if isinstance(tensor, Tensor):
                raw = torch.randint(0, 256, (tensor.nbytes,), generator=generator)
                flat = raw.to(torch.uint8)
                # No NaN: tensors are compared as bytes, but copied as elements.
                flat[1::2] &= 0x3F
                tensor.copy_(flat.view(tensor.dtype).reshape(tensor.shape))


def page_bytes(pool: Any, page: int) -> bytes:
    """A page as SGLang's flat tensor has it."""
    flat = pool.get_data_page(page * pool.page_size, flat=True)
    return bytes(flat.contiguous().view(torch.uint8).numpy().data)


def indices(pool: Any, *pages: int) -> Tensor:
    """The host indices of all tokens of these pages."""
    starts = torch.tensor(pages, dtype=torch.int64) * pool.page_size
    return (starts[:, None] + torch.arange(pool.page_size)).reshape(-1)


def geometry_of(pool: Any, **changes: Any) -> PageGeometry:
    """The geometry that this package's own pools would have."""
    mla = isinstance(pool, MlaHostPool)
    fields: dict[str, Any] = {
        "kind": "mla" if mla else "mha",
        "layers": pool.layer_num,
        "heads": 1 if mla else pool.head_num,
        "head_dim": pool.kv_cache_dim if mla else pool.head_dim,
        "v_head_dim": 0 if mla else pool.head_dim,
        "page_size": pool.page_size,
        "dtype": pool.dtype,
        "first_layer": pool.start_layer,
    }
    return PageGeometry(**{**fields, **changes})


@dataclass
class StorageConfig:
    """SGLang's HiCacheStorageConfig."""

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    attn_cp_rank: int = 0
    attn_cp_size: int = 1
    is_mla_model: bool = False
    model_name: str | None = "org/model"
    extra_config: Any = field(default_factory=dict)
    dcp_size: int = 1
    enable_storage_metrics: bool = False


class PoolName(str, Enum):
    KV = "kv"
    DRAFT = "draft"
    MAMBA = "mamba"
    INDEXER = "indexer"


@dataclass
class PoolTransfer:
    name: Any
    host_indices: Tensor | None = None
    keys: list[str] | None = None
    hit_policy: Any = "all_pages"


@dataclass
class PoolTransferResult:
    """As from 0.5.20 on."""

    kv_hit_pages: int
    extra_pool_hit_pages: dict[str, int]
    restorable_prefix_pages: list[int] | None = None


@dataclass
class OldPoolTransferResult:
    """As up to 0.5.18."""

    kv_hit_pages: int
    extra_pool_hit_pages: dict[str, int]


class HiCacheStorage(abc.ABC):
    """The abstract methods of SGLang's base class."""

    @abc.abstractmethod
    def get(self, key: str) -> Any: ...
    @abc.abstractmethod
    def batch_get(self, keys: list[str]) -> Any: ...
    @abc.abstractmethod
    def set(self, key: str) -> Any: ...
    @abc.abstractmethod
    def batch_set(self, keys: list[str]) -> Any: ...
    @abc.abstractmethod
    def exists(self, key: str) -> Any: ...

    def clear(self) -> None:
        raise AssertionError("the base class's own")


def base(**changes: Any) -> Any:
    """SGLang's module of the base class."""
    names = {
        "HiCacheStorage": HiCacheStorage,
        "PoolTransferResult": PoolTransferResult,
        "PoolName": PoolName,
    }
    return SimpleNamespace(**{**names, **changes})


def storage_class(backend: str = "memory", **changes: Any) -> type[Any]:
    """A backend's class on the doubles."""
    return bind(base(**changes), "0.0.0", {"backend_name": backend})
