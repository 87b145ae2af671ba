"""Transformer layers shared by the target and the draft head.

Shapes: T new tokens, S tokens of the sequence so far (new ones included), C hidden size, H query
heads, G key/value heads, D head size. `...` is nothing when serving and a batch when training.
"""

from __future__ import annotations

import torch
from kv import KVAccess
from torch import Tensor, nn
from torch.nn import functional

Rotation = tuple[Tensor, Tensor]  # cosines and sines, (T, 1, rope_dim / 2) each


class RMSNorm(nn.Module):
    """Root-mean-square normalisation with a learned gain."""

    def __init__(self, size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """(..., C) to (..., C)."""
        return functional.rms_norm(x.float(), self.weight.shape, self.weight, self.eps)


def rotation(positions: Tensor, rope_dim: int, theta: float) -> Rotation:
    """The rotary angles of `positions` (T,), for `rotate`."""
    steps = torch.arange(0, rope_dim, 2, device=positions.device, dtype=torch.float32)
    angles = positions[..., None, None].float() * theta ** (-steps / rope_dim)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, by: Rotation) -> Tensor:
    """Rotate the first `rope_dim` channels of each head of `x` (..., T, H, D); leave the rest.

    The unrotated channels compare contents at any distance, which is what copying needs.
    """
    cos, sin = by
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1).to(x.dtype)


def attend(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, scale: float) -> Tensor:
    """Causal attention of `q` (..., T, H, D) over `k`, `v` (..., S, G, D), to (..., T, H, D).

    Row j of `k` and `v` is the token at position j; a query sees the rows up to its own position.
    """
    new, total = q.shape[-3], k.shape[-3]
    whole = new == total
    mask = None
    if not whole:
        mask = torch.arange(total, device=q.device) <= positions[:, None]
    heads_first = [x.to(q.dtype).transpose(-3, -2) for x in (q, k, v)]
    if q.dim() == 3:  # the fast kernels want a batch dimension
        heads_first = [x[None] for x in heads_first]
    out = functional.scaled_dot_product_attention(
        *heads_first,
        attn_mask=mask,
        is_causal=whole,
        scale=scale,
        enable_gqa=q.shape[-2] != k.shape[-2],
    ).transpose(-3, -2)
    return out[0] if q.dim() == 3 else out


class Attention(nn.Module):
    """Multi-head attention, grouped when `kv_heads` < `heads`; its KV rows are (G, D) K and V."""

    def __init__(
        self, size_in: int, size_out: int, heads: int, kv_heads: int, head_dim: int
    ) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.q = nn.Linear(size_in, heads * head_dim, bias=False)
        self.k = nn.Linear(size_in, kv_heads * head_dim, bias=False)
        self.v = nn.Linear(size_in, kv_heads * head_dim, bias=False)
        self.o = nn.Linear(heads * head_dim, size_out, bias=False)

    def project(self, x: Tensor, by: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        """`x` (..., T, C) to rotated queries (..., T, H, D) and keys, and values (..., T, G, D)."""
        q = self.q(x).unflatten(-1, (self.heads, self.head_dim))
        k = self.k(x).unflatten(-1, (self.kv_heads, self.head_dim))
        v = self.v(x).unflatten(-1, (self.kv_heads, self.head_dim))
        return rotate(q, by), rotate(k, by), v

    def forward(
        self, x: Tensor, positions: Tensor, by: Rotation, layer: int, kv: KVAccess
    ) -> Tensor:
        """(..., T, C) to (..., T, C); writes the new tokens' rows to `kv`."""
        q, k, v = self.project(x, by)
        keys, values = kv.update(layer, k, v)
        assert values is not None
        out = attend(q, keys, values, positions, self.head_dim**-0.5)
        return self.o(out.flatten(-2))


class LatentAttention(nn.Module):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): one KV row a token.

    The row holds the normalised latent (`rank` channels), from which each head's key and value are
    expanded, and one rotated key part that the heads share (`rope_dim` channels). The expansion
    of the keys is folded into the queries and that of the values into the output, so that attention
    runs over the rows as they are stored: R = rank + rope_dim.
    """

    def __init__(
        self, size: int, heads: int, *, rank: int, nope_dim: int, rope_dim: int, v_dim: int
    ) -> None:
        super().__init__()
        self.heads, self.rank, self.nope_dim, self.rope_dim = heads, rank, nope_dim, rope_dim
        self.q = nn.Linear(size, heads * (rope_dim + nope_dim), bias=False)
        self.down = nn.Linear(size, rope_dim + rank, bias=False)
        self.norm = RMSNorm(rank)
        self.k_up = nn.Parameter(torch.empty(heads, nope_dim, rank))
        self.v_up = nn.Parameter(torch.empty(heads, rank, v_dim))
        self.o = nn.Linear(heads * v_dim, size, bias=False)

    def forward(
        self, x: Tensor, positions: Tensor, by: Rotation, layer: int, kv: KVAccess
    ) -> Tensor:
        """(..., T, C) to (..., T, C); writes the new tokens' rows (..., T, 1, R) to `kv`."""
        q = rotate(self.q(x).unflatten(-1, (self.heads, -1)), by)
        q_rope, q_nope = q.split((self.rope_dim, self.nope_dim), dim=-1)
        q = torch.cat((q_rope, torch.einsum("...hn,hnr->...hr", q_nope, self.k_up)), dim=-1)
        k_rope, latent = self.down(x).split((self.rope_dim, self.rank), dim=-1)
        row = torch.cat((rotate(k_rope[..., None, :], by), self.norm(latent)[..., None, :]), dim=-1)
        rows, _ = kv.update(layer, row, None)
        out = attend(q, rows, rows, positions, (self.nope_dim + self.rope_dim) ** -0.5)
        out = torch.einsum("...hr,hrv->...hv", out[..., self.rope_dim :], self.v_up)
        return self.o(out.flatten(-2))


class SwiGLU(nn.Module):
    """The gated feed-forward layer."""

    def __init__(self, size: int, inner: int) -> None:
        super().__init__()
        self.gate = nn.Linear(size, inner, bias=False)
        self.up = nn.Linear(size, inner, bias=False)
        self.down = nn.Linear(inner, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(..., C) to (..., C)."""
        return self.down(functional.silu(self.gate(x)) * self.up(x))


def initialise(module: nn.Module, layers: int) -> None:
    """Draw the weights: normal, smaller where a layer adds to the residual stream."""
    for name, weight in module.named_parameters():
        if weight.dim() > 1:
            adds = name.endswith((".o.weight", ".down.weight")) and "attention.down" not in name
            nn.init.normal_(weight, std=0.02 * ((2 * layers) ** -0.5 if adds else 1.0))
