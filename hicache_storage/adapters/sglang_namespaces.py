"""Namespaces of SGLang's host pools.

Target and draft pools of a known shape get the namespace that `PageGeometry` makes, so that a
server shares pages with every other program that has such pools, this package's own included.
Pools of any other kind are told apart by their type, size and SGLang's release: this package
can't know when their bytes change their meaning.
"""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import torch
from torch import Tensor

from ..errors import ConfigError
from ..namespace import Namespace, TokenOrder
from ..pools.geometry import PageGeometry
from ..pools.layouts import Layout, part_shape
from ..pools.ranks import Ranks
from .sglang_identity import Identity
from .sglang_keys import DRAFT, TARGET
from .sglang_pages import HostPages

ORDERS: dict[str, TokenOrder] = {
    "layer_first": "layer_token",
    "page_first": "token_layer",
    "page_first_direct": "layer_token",
    "page_head": "head_token_layer",
}
_LOGICAL = {
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
    "bf16": "bfloat16",
    "fp4_e2m1": "float4_e2m1fn",
}
STATES = "mamba"
"""The pool that every tensor-parallel rank has its own share of, also beside an MLA target."""


def pool_namespace(
    name: str, pages: HostPages, identity: Identity, target: Namespace | None
) -> Namespace:
    """The namespace of a host pool's pages; `target` is that of the target's, None for itself."""
    shape = _geometry(pages)
    if shape is None or name not in (TARGET, DRAFT):
        return _opaque(name, pages, identity, target)
    geometry, order = shape
    ranks = identity.ranks if geometry.kind == "mha" else _replicated(identity.ranks)
    dtype = _dtype(pages.pool, geometry.dtype, identity)
    if name == TARGET:
        found = geometry.namespace(
            model=identity.model,
            order=order,
            revision=_with_packed_drafts(pages.pool, identity),
            tenant=identity.tenant,
            **ranks.fields(),
        )
    else:
        if target is None:
            raise ConfigError("a draft pool is registered before its target's")
        found = geometry.draft_namespace(
            target,
            model=identity.draft_model,
            order=order,
            revision=identity.draft_revision,
            ranks=ranks,
        )
    return dataclasses.replace(found, dtype=dtype)


def flat_draft_namespace(
    page_bytes: int, dtype: torch.dtype, identity: Identity, target: Namespace
) -> Namespace:
    """The namespace of draft pages of which only flat tensors are known."""
    return _plain(
        target,
        identity,
        dtype=str(dtype).removeprefix("torch."),
        page_size=target.page_size,
        page_bytes=page_bytes,
        layers=1,
        what=f"flat draft pages, SGLang {identity.release}",
        drafts=True,
        ranks=identity.ranks,
    )


def writes(namespace: Namespace, ranks: Ranks) -> bool:
    """Whether this rank writes these pages: where tensor-parallel ranks share them, one does."""
    return namespace.tp_size == ranks.tp_size or ranks.tp_rank == 0


def _geometry(pages: HostPages) -> tuple[PageGeometry, TokenOrder] | None:
    """The geometry of a pool whose shape is exactly that of MHA or MLA pages, else None."""
    pool = pages.pool
    order = ORDERS.get(getattr(pool, "layout", ""))
    try:
        if hasattr(pool, "head_num"):
            head_dim = pool.head_dim
            geometry = PageGeometry(
                "mha", pool.layer_num, pool.head_num, head_dim,
                getattr(pool, "v_head_dim", None) or head_dim, pages.page_size, pool.dtype,
                _first_layer(pool),
            )  # fmt: skip
            parts = [pool.k_buffer, pool.v_buffer]
        else:
            geometry = PageGeometry(
                "mla", pool.layer_num, 1, pool.kv_cache_dim, 0, pages.page_size, pool.dtype,
                _first_layer(pool),
            )  # fmt: skip
            parts = [pool.kv_buffer]
        if order is None or geometry.page_bytes != pages.page_bytes:
            return None
        for number, part in enumerate(parts):
            shape = _part_shape(pool.layout, geometry, pages.num_pages, number)
            if list(cast("Tensor", part).shape) != shape:
                return None
    except (AttributeError, TypeError, ValueError):
        return None
    return geometry, order


def _part_shape(layout: str, geometry: PageGeometry, num_pages: int, part: int) -> list[int]:
    if layout == "page_head":
        dim = geometry.row_dims[part]
        return [num_pages, geometry.heads, geometry.page_size, geometry.layers, dim]
    return part_shape(cast("Layout", layout), geometry, num_pages, part)


def _first_layer(pool: Any) -> int:
    return int(getattr(pool, "start_layer", 0) or 0)


def _dtype(pool: Any, stored: torch.dtype, identity: Identity) -> str:
    """The logical element type: a pool may keep float8 as bytes."""
    logical = getattr(getattr(pool, "device_pool", None), "dtype", None)
    if isinstance(logical, torch.dtype):
        return str(logical).removeprefix("torch.")
    if stored not in (torch.uint8, torch.int8):
        return str(stored).removeprefix("torch.")
    named = _LOGICAL.get(identity.kv_cache_dtype, identity.kv_cache_dtype)
    if named == "float8_e4m3fn" and torch.version.hip:
        return "float8_e4m3fnuz"
    return f"{stored} as {named}".removeprefix("torch.") if named == "auto" else named


def _with_packed_drafts(pool: Any, identity: Identity) -> str:
    """The target's revision, with the draft's identity where its layers are in the same pages."""
    packed = pool.layer_num - (getattr(pool, "target_layer_num", None) or pool.layer_num)
    if packed <= 0:
        return identity.revision
    draft = f"{packed} layers of {identity.draft_model!r} {identity.draft_revision!r}"
    return f"{identity.revision} with {draft}".strip()


def _replicated(ranks: Ranks) -> Ranks:
    return dataclasses.replace(ranks, tp_rank=0, tp_size=1)


def _opaque(name: str, pages: HostPages, identity: Identity, target: Namespace | None) -> Namespace:
    pool = pages.pool
    kind = f"{type(pool).__name__} {getattr(pool, 'layout', '')}, SGLang {identity.release}"
    replicated = identity.replicated and name != STATES and not hasattr(pool, "head_num")
    return _plain(
        target,
        identity,
        dtype=str(getattr(pool, "dtype", "bytes")).removeprefix("torch."),
        page_size=pages.page_size,
        page_bytes=pages.page_bytes,
        layers=max(1, int(getattr(pool, "layer_num", 0) or 0)),
        what=kind,
        drafts=name.startswith(DRAFT) or target is None,
        ranks=_replicated(identity.ranks) if replicated else identity.ranks,
    )


def _plain(
    target: Namespace | None,
    identity: Identity,
    *,
    dtype: str,
    page_size: int,
    page_bytes: int,
    layers: int,
    what: str,
    drafts: bool,
    ranks: Ranks,
) -> Namespace:
    """A namespace of bytes; its revision says whose they are and of what kind."""
    parts = [what, f"for {target.digest}" if target is not None else identity.revision]
    if drafts and identity.drafting:
        parts.append(f"draft {identity.draft_model!r} {identity.draft_revision!r}")
    return Namespace(
        model=identity.model,
        pool="opaque",
        dtype=dtype,
        page_size=page_size,
        page_bytes=page_bytes,
        layers=layers,
        heads=1,
        head_dim=1,
        v_head_dim=0,
        order="opaque",
        revision=", ".join(part for part in parts if part),
        tenant=identity.tenant,
        **ranks.fields(),
    )
