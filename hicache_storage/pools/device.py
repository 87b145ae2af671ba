"""Device pools: an engine's own KV tensors, seen as pages.

Legend: P pages, S page_size, N = P x S tokens, H heads, D elements per head, B bytes per head.
Slot i is tokens i x S to (i + 1) x S of every layer tensor.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import ConfigError
from .geometry import PageGeometry


class DevicePool:
    """Layer tensors of one model on one device; base of the pools that can be paged.

    The tensors stay the caller's: the pool reads them in a backup and writes only the pages
    named in a load-back.
    """

    def __init__(
        self, geometry: PageGeometry, num_pages: int, tensors: Sequence[tuple[Tensor, ...]]
    ) -> None:
        self.geometry = geometry
        self.num_pages = num_pages
        self._tensors = tuple(tensors)
        self.check_storage("device pool")
        self.device = self._tensors[0][0].device
        self._rows = [
            tuple(_page_rows(tensor, geometry.page_size) for tensor in layer)
            for layer in self._tensors
        ]

    def layer_tensors(self, layer: int) -> tuple[Tensor, ...]:
        """The tensors of `layer` (counted from this pool's first), each (N, H, D): K and V, or
        the latent one."""
        return self._tensors[layer]

    def page_rows(self, layer: int) -> tuple[Tensor, ...]:
        """The same as bytes by page: uint8 views (P, S, H, B)."""
        return self._rows[layer]

    def check_storage(self, name: str) -> None:
        """Raises ConfigError, naming the pool, if it has no pages, or tensors that don't fit its
        geometry or have no memory behind them."""
        name = f"{name} ({type(self).__name__})"
        if self.num_pages < 1:
            raise ConfigError(
                f"{name} has {self.num_pages} pages; only a pool that stores pages "
                "of its own can be paged"
            )
        if len(self._tensors) != self.geometry.layers:
            raise ConfigError(
                f"{name} has tensors for {len(self._tensors)} layers, its geometry "
                f"has {self.geometry.layers}"
            )
        tokens = self.num_pages * self.geometry.page_size
        for layer, tensors in enumerate(self._tensors):
            if len(tensors) != len(self.geometry.row_dims):
                raise ConfigError(
                    f"{name}: layer {layer} has {len(tensors)} tensors, expected "
                    f"{len(self.geometry.row_dims)}"
                )
            for tensor, dim in zip(tensors, self.geometry.row_dims, strict=True):
                self._check_tensor(
                    f"{name}: layer {layer}", tensor, (tokens, self.geometry.heads, dim)
                )

    def _check_tensor(self, name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
        if not isinstance(tensor, Tensor):
            raise ConfigError(
                f"{name} has no tensor but {type(tensor).__name__}; a pool without "
                "physical storage can't be paged"
            )
        if tuple(tensor.shape) != shape:
            raise ConfigError(
                f"{name} has a tensor of shape {tuple(tensor.shape)}, expected {shape}"
            )
        stored, logical = tensor.dtype, self.geometry.dtype
        if stored.itemsize != logical.itemsize or (
            stored != logical and (stored.is_floating_point or stored.is_complex)
        ):
            raise ConfigError(
                f"{name} has elements of {stored}, expected {logical} or an integer type of "
                f"{logical.itemsize} bytes that stores it"
            )
        if tensor.is_meta or tensor.untyped_storage().nbytes() == 0:
            raise ConfigError(
                f"{name} has a tensor without memory behind it; a pool without "
                "physical storage can't be paged"
            )
        if tensor.device != self._tensors[0][0].device:
            raise ConfigError(
                f"{name} is on {tensor.device}, layer 0 on {self._tensors[0][0].device}; a pool "
                "is on one device"
            )
        if tensor.stride(-1) != 1:
            raise ConfigError(
                f"{name} has elements of a head that aren't adjacent in memory "
                f"(strides {tensor.stride()}); the bytes of a row must be"
            )


class MHADevicePool(DevicePool):
    """K and V by layer: `.k[layer]` (N, H, D), `.v[layer]` (N, H, DV)."""

    def __init__(
        self,
        geometry: PageGeometry,
        num_pages: int,
        device: str | torch.device = "cpu",
        *,
        tensors: Sequence[tuple[Tensor, Tensor]] | None = None,
    ) -> None:
        if geometry.kind != "mha":
            raise ConfigError(f"MHADevicePool takes an 'mha' geometry, got {geometry.kind!r}")
        super().__init__(geometry, num_pages, tensors or _zeros(geometry, num_pages, device))
        self.k = [layer[0] for layer in self._tensors]
        self.v = [layer[1] for layer in self._tensors]

    @classmethod
    def from_tensors(
        cls,
        k: Sequence[Tensor],
        v: Sequence[Tensor],
        page_size: int,
        *,
        dtype: torch.dtype | None = None,
        first_layer: int = 0,
    ) -> MHADevicePool:
        """A pool over an engine's tensors, one of K and one of V a layer, (N, H, D) each.

        The geometry comes from the tensors. `dtype` is the logical type where the tensors store
        it as another of the same size (float8 as uint8).
        """
        if not k or len(k) != len(v):
            raise ConfigError(f"expected K and V of the same layers, got {len(k)} and {len(v)}")
        tokens, heads, head_dim = _shape("k", k[0])
        geometry = PageGeometry(
            "mha",
            len(k),
            heads,
            head_dim,
            _shape("v", v[0])[2],
            page_size,
            dtype or k[0].dtype,
            first_layer,
        )
        return cls(geometry, _pages(tokens, page_size), tensors=list(zip(k, v, strict=True)))


class MLADevicePool(DevicePool):
    """One latent row by layer: `.kv[layer]` (N, 1, D)."""

    def __init__(
        self,
        geometry: PageGeometry,
        num_pages: int,
        device: str | torch.device = "cpu",
        *,
        tensors: Sequence[tuple[Tensor]] | None = None,
    ) -> None:
        if geometry.kind != "mla":
            raise ConfigError(f"MLADevicePool takes an 'mla' geometry, got {geometry.kind!r}")
        super().__init__(geometry, num_pages, tensors or _zeros(geometry, num_pages, device))
        self.kv = [layer[0] for layer in self._tensors]

    @classmethod
    def from_tensors(
        cls,
        kv: Sequence[Tensor],
        page_size: int,
        *,
        dtype: torch.dtype | None = None,
        first_layer: int = 0,
    ) -> MLADevicePool:
        """A pool over an engine's tensors, one (N, 1, D) a layer; see MHADevicePool."""
        if not kv:
            raise ConfigError("expected the latent tensors of at least one layer, got none")
        tokens, heads, head_dim = _shape("kv", kv[0])
        geometry = PageGeometry(
            "mla", len(kv), heads, head_dim, 0, page_size, dtype or kv[0].dtype, first_layer
        )
        return cls(geometry, _pages(tokens, page_size), tensors=[(tensor,) for tensor in kv])


class HybridDevicePool:
    """A model in which only some layers have full attention; only those are paged.

    `layer_ids` are the model's indices of those layers, ascending, in the order of
    `full_attention_pool`. Sliding-window, state-space and other layers stay with the engine.
    """

    def __init__(self, full_attention_pool: DevicePool, layer_ids: Sequence[int]) -> None:
        if len(layer_ids) != full_attention_pool.geometry.layers:
            raise ConfigError(
                f"HybridDevicePool: {len(layer_ids)} layer_ids for a pool of "
                f"{full_attention_pool.geometry.layers} layers"
            )
        if any(b <= a for a, b in itertools.pairwise(layer_ids)):
            raise ConfigError(f"HybridDevicePool: layer_ids must ascend, got {list(layer_ids)}")
        if layer_ids[0] != full_attention_pool.geometry.first_layer:
            raise ConfigError(
                f"HybridDevicePool: layer_ids start at {layer_ids[0]}, but the full-attention "
                f"pool has first_layer {full_attention_pool.geometry.first_layer}"
            )
        self.full_attention_pool = full_attention_pool
        self.layer_ids = tuple(layer_ids)
        self.geometry = full_attention_pool.geometry
        self.num_pages = full_attention_pool.num_pages
        self.device = full_attention_pool.device

    def layer_tensors(self, layer: int) -> tuple[Tensor, ...]:
        """The tensors of the `layer`-th full-attention layer."""
        return self.full_attention_pool.layer_tensors(layer)

    def paged_layer(self, model_layer: int) -> int | None:
        """Which paged layer the model's layer is, or None if it has no full attention."""
        return self.layer_ids.index(model_layer) if model_layer in self.layer_ids else None


def paged_part(pool: object) -> DevicePool | None:
    """The part of `pool` that can be paged, or None if its type isn't supported."""
    if isinstance(pool, HybridDevicePool):
        return pool.full_attention_pool
    return pool if isinstance(pool, DevicePool) else None


def _zeros(
    geometry: PageGeometry, num_pages: int, device: str | torch.device
) -> list[tuple[Tensor, ...]]:
    # One allocation a part: layers at equal distances go to the host in one copy a page.
    tokens = max(num_pages, 0) * geometry.page_size
    parts = [
        torch.zeros(
            geometry.layers, tokens, geometry.heads, dim, dtype=geometry.dtype, device=device
        )
        for dim in geometry.row_dims
    ]
    return [tuple(part[layer] for part in parts) for layer in range(geometry.layers)]


def _page_rows(tensor: Tensor, page_size: int) -> Tensor:
    rows = tensor.detach().view(torch.uint8)
    return rows.view(-1, page_size, *rows.shape[1:])


def _shape(name: str, tensor: Tensor) -> tuple[int, int, int]:
    if tensor.ndim != 3:
        raise ConfigError(
            f"{name}: expected tensors (tokens, heads, dim), got shape {tuple(tensor.shape)}"
        )
    tokens, heads, dim = tensor.shape
    return tokens, heads, dim


def _pages(tokens: int, page_size: int) -> int:
    if page_size < 1 or tokens % page_size:
        raise ConfigError(
            f"a pool of {tokens} tokens isn't a whole number of pages of {page_size} tokens"
        )
    return tokens // page_size
