"""PageGeometry: what one page of a pool looks like, and the namespace that follows from it."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

import torch

from ..errors import ConfigError
from ..namespace import Namespace, TokenOrder
from .ranks import Ranks

Kind = Literal["mha", "mla"]


@dataclass(frozen=True)
class PageGeometry:
    """Shape of one page: `page_size` tokens in `layers` layers.

    A row is what one token has in one layer of one part: (heads, head_dim) elements of K, and
    (heads, v_head_dim) of V for "mha"; one latent (1, head_dim) for "mla".
    """

    kind: Kind
    layers: int
    heads: int
    """KV heads of this rank; 1 for MLA."""
    head_dim: int
    v_head_dim: int
    """0 for MLA, which has no V part."""
    page_size: int
    """Tokens in a page."""
    dtype: torch.dtype
    """Logical element type. A pool may store float8 as uint8: the bytes are the same, but the
    namespace names the logical type."""
    first_layer: int = 0
    """Index of the first layer in the model."""

    def __post_init__(self) -> None:
        if self.kind not in ("mha", "mla"):
            raise ConfigError(f"geometry: kind must be 'mha' or 'mla', got {self.kind!r}")
        for name in ("layers", "heads", "head_dim", "page_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"geometry: {name} must be at least 1: {getattr(self, name)}")
        if self.first_layer < 0:
            raise ConfigError(f"geometry: first_layer must not be negative: {self.first_layer}")
        if self.kind == "mla" and (self.heads != 1 or self.v_head_dim != 0):
            raise ConfigError(
                "geometry: an MLA page has heads 1 and v_head_dim 0, got heads "
                f"{self.heads} and v_head_dim {self.v_head_dim}"
            )
        if self.kind == "mha" and self.v_head_dim < 1:
            raise ConfigError(
                f"geometry: an MHA page needs v_head_dim of at least 1: {self.v_head_dim}"
            )

    @property
    def row_dims(self) -> tuple[int, ...]:
        """Elements per head of each part: (K, V), or (latent,)."""
        return (self.head_dim,) if self.kind == "mla" else (self.head_dim, self.v_head_dim)

    @functools.cached_property
    def part_bytes(self) -> tuple[int, ...]:
        """Bytes of each part in one page: (K, V), or (latent,)."""
        rows = self.layers * self.page_size * self.heads * self.dtype.itemsize
        return tuple(rows * dim for dim in self.row_dims)

    @functools.cached_property
    def layer_stretch(self) -> int:
        """Bytes of the smallest part of a layer in one page."""
        return min(self.part_bytes) // self.layers

    @functools.cached_property
    def page_bytes(self) -> int:
        """Payload bytes of a page."""
        return sum(self.part_bytes)

    @property
    def dtype_name(self) -> str:
        """Logical type without "torch.", e.g. "bfloat16", "float8_e4m3fn"."""
        return str(self.dtype).removeprefix("torch.")

    def namespace(
        self,
        *,
        model: str,
        order: TokenOrder,
        revision: str = "",
        tenant: str = "",
        tp_rank: int = 0,
        tp_size: int = 1,
        pp_rank: int = 0,
        pp_size: int = 1,
        cp_rank: int = 0,
        cp_size: int = 1,
    ) -> Namespace:
        """The namespace of these pages; `order` comes from the host pool (`HostPool.order`)."""
        return Namespace(
            model=model,
            pool=self.kind,
            dtype=self.dtype_name,
            page_size=self.page_size,
            page_bytes=self.page_bytes,
            layers=self.layers,
            heads=self.heads,
            head_dim=self.head_dim,
            v_head_dim=self.v_head_dim,
            order=order,
            revision=revision,
            first_layer=self.first_layer,
            tp_rank=tp_rank,
            tp_size=tp_size,
            pp_rank=pp_rank,
            pp_size=pp_size,
            cp_rank=cp_rank,
            cp_size=cp_size,
            tenant=tenant,
        )

    def draft_namespace(
        self,
        target: Namespace,
        *,
        model: str,
        order: TokenOrder,
        revision: str = "",
        ranks: Ranks | None = None,
    ) -> Namespace:
        """The namespace of these pages as a draft of `target`.

        A draft's rows are made from the target's hidden states, so they belong to both models:
        the revision names the target too, and the tenant is the target's.
        """
        if not model:
            raise ConfigError(
                "a draft pool is registered, so its pages need draft_model: the draft's name, or "
                "the target's if the draft is part of it"
            )
        return self.namespace(
            model=model,
            order=order,
            revision=f"{revision!r} for {target.model!r} {target.revision!r}",
            tenant=target.tenant,
            **(ranks or Ranks()).fields(),
        )
