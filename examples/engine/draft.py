"""The draft: a one-layer EAGLE-3 style head (arXiv 2503.01840) that guesses after its target.

Entry t of the head is made from the embedding of token t + 1 and the target's hidden states at
token t, has position t, and predicts token t + 2. So its KV rows can't be computed again from the
tokens alone: they need hidden states that the target produces only when it runs over them.

Shapes: T new entries, C hidden size, F fused layers, V vocabulary, H heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from kv import KVAccess
from layers import Attention, RMSNorm, SwiGLU, initialise, rotation
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class DraftConfig:
    """Sizes of an `EagleHead`; the hidden size and the vocabulary are its target's."""

    hidden: int = 192
    fused_layers: int = 3  # how many of the target's hidden states it reads
    heads: int = 4
    head_dim: int = 64
    rope_dim: int = 32  # channels of a head that are rotated
    inner: int = 256  # feed-forward width
    rope_theta: float = 10_000.0

    @property
    def kv_row_shape(self) -> tuple[int, int]:
        """(H, D) of one token's K row; its V row has the same shape. There is one layer."""
        return self.heads, self.head_dim


class EagleHead(nn.Module):
    """Guesses the token after next from the target's hidden states and its own KV rows.

    `embedding` is the target's table: it embeds the head's tokens and scores its output.
    """

    def __init__(self, config: DraftConfig, embedding: nn.Embedding) -> None:
        super().__init__()
        c = config
        self.config = config
        self._borrowed = (embedding,)  # a tuple: its weights are not parameters of the head
        self.fusion = nn.Linear(c.fused_layers * c.hidden, c.hidden, bias=False)
        self.embed_norm = RMSNorm(c.hidden)
        self.hidden_norm = RMSNorm(c.hidden)
        self.attention = Attention(2 * c.hidden, c.hidden, c.heads, c.heads, c.head_dim)
        self.mlp_norm = RMSNorm(c.hidden)
        self.mlp = SwiGLU(c.hidden, c.inner)
        self.norm = RMSNorm(c.hidden)
        initialise(self, layers=1)

    def fuse(self, features: Tensor) -> Tensor:
        """The target's `features` (..., T, F * C) to the head's hidden input (..., T, C)."""
        parts = features.unflatten(-1, (self.config.fused_layers, self.config.hidden))
        return self.fusion(functional.rms_norm(parts, parts.shape[-1:]).flatten(-2))

    def forward(
        self, next_tokens: Tensor, hidden: Tensor, positions: Tensor, kv: KVAccess
    ) -> Tensor:
        """Run T entries and return their hidden output (..., T, C); writes T rows of layer 0.

        `next_tokens` (..., T) holds token t + 1 for each entry t of `positions` (T,). `hidden`
        (..., T, C) is `fuse(features)` of token t where the target has run over it, and the
        output of entry t - 1 while guessing on.
        """
        x = self.inputs(next_tokens, hidden)
        by = rotation(positions, self.config.rope_dim, self.config.rope_theta)
        return self.finish(hidden, self.attention(x, positions, by, 0, kv))

    def inputs(self, next_tokens: Tensor, hidden: Tensor) -> Tensor:
        """What attention reads: normalised embeddings beside hidden states, (..., T, 2C)."""
        embedded = self._borrowed[0](next_tokens)
        return torch.cat((self.embed_norm(embedded), self.hidden_norm(hidden)), dim=-1)

    def finish(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """What follows attention: both residual additions and the feed-forward layer."""
        hidden = hidden + attended
        return hidden + self.mlp(self.mlp_norm(hidden))

    def logits(self, output: Tensor) -> Tensor:
        """`forward`'s output (..., T, C) to scores of token t + 2, (..., T, V)."""
        return functional.linear(self.norm(output), self._borrowed[0].weight)
