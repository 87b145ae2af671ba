"""Namespace: everything that decides the meaning of a page's bytes.

Two configurations that would read each other's bytes wrongly have different digests, so they
never see each other's pages; two that are really the same have equal digests and share them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from .errors import ConfigError

FORMAT_VERSION = 1
RECORD_BYTES = 4096

PoolKind = Literal["mha", "mla", "opaque"]
TokenOrder = Literal["layer_token", "token_layer", "head_token_layer", "opaque"]


@dataclass(frozen=True, eq=False)
class Namespace:
    """The identity of one pool's pages. Frozen, compared by digest.

    A page belongs to the namespace of the pool that it came from, so a target and its draft
    have one each. Use `pools.geometry.PageGeometry.namespace` where a pool exists: it takes
    the geometry from the tensors, never from a constant.
    """

    model: str
    """Name or path of the model whose KV this is, e.g. "org/model"."""
    pool: PoolKind
    """What a token's entry is: "mha" (K and V per head), "mla" (one latent row), "opaque"."""
    dtype: str
    """Logical element type, e.g. "bfloat16", "float8_e4m3fn"; not the storage type."""
    page_size: int
    """Tokens in a page."""
    page_bytes: int
    """Payload bytes of a page."""
    layers: int
    """Layers in a page."""
    heads: int
    """KV heads in a page (of this rank); 1 for MLA."""
    head_dim: int
    """Elements of K per head, or of the latent row."""
    v_head_dim: int
    """Elements of V per head; 0 for MLA."""
    order: TokenOrder
    """Byte order of each part of a page: [layer, token, head, ...], [token, layer, head, ...] or
    [head, token, layer, ...]."""
    revision: str = ""
    """Identity of the weights: a commit, a checkpoint digest. Give one wherever weights can
    change behind the same model name."""
    first_layer: int = 0
    """Index of the page's first layer in the model (pipeline stages differ)."""
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    cp_rank: int = 0
    cp_size: int = 1
    tenant: str = ""
    """Salt that keeps tenants, adapters or deployments apart."""

    def __post_init__(self) -> None:
        if not self.model:
            raise ConfigError("namespace: model must name the model, got an empty string")
        for name in ("page_size", "page_bytes", "layers", "tp_size", "pp_size", "cp_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"namespace: {name} must be at least 1: {getattr(self, name)}")
        for axis in ("tp", "pp", "cp"):
            rank, size = getattr(self, f"{axis}_rank"), getattr(self, f"{axis}_size")
            if not 0 <= rank < size:
                raise ConfigError(f"namespace: {axis}_rank {rank} is not below {axis}_size {size}")
        if self.pool == "mla" and self.tp_size != 1:
            # Every tensor-parallel rank holds the same latent rows, so they share pages.
            object.__setattr__(self, "tp_rank", 0)
            object.__setattr__(self, "tp_size", 1)
        if len(self.record) > RECORD_BYTES:
            raise ConfigError(
                f"namespace: its text form has {len(self.record)} bytes, more than {RECORD_BYTES}; "
                "shorten model, revision or tenant"
            )

    @cached_property
    def canonical(self) -> str:
        """Canonical JSON: sorted names, no spaces, ASCII only; what the digest covers."""
        fields: dict[str, Any] = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        fields["format_version"] = FORMAT_VERSION
        return json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=True)

    @cached_property
    def digest(self) -> str:
        """32 hex digits: the first half of the SHA-256 of `canonical`."""
        return hashlib.sha256(self.canonical.encode()).hexdigest()[:32]

    @cached_property
    def record(self) -> bytes:
        """`canonical`, padded with blanks to 4096 bytes: stored beside the pages so that tools
        can say what a store holds."""
        return self.canonical.encode().ljust(RECORD_BYTES)

    @classmethod
    def from_record(cls, record: bytes) -> Namespace:
        """The namespace that wrote `record`; raises ConfigError if it is of another format."""
        try:
            fields = json.loads(record)
            version = fields.pop("format_version")
            if version != FORMAT_VERSION:
                raise ConfigError(
                    f"namespace record has format_version {version}; this release reads "
                    f"{FORMAT_VERSION}"
                )
            return cls(**fields)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"not a namespace record: {error}") from error

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Namespace) and self.digest == other.digest

    def __hash__(self) -> int:
        return int(self.digest[:15], 16)

    def differences(self, other: Namespace) -> list[str]:
        """The fields in which `other` differs, as "name: theirs instead of ours"; for messages."""
        return [
            f"{f.name}: {getattr(other, f.name)!r} instead of {getattr(self, f.name)!r}"
            for f in dataclasses.fields(self)
            if getattr(self, f.name) != getattr(other, f.name)
        ]
