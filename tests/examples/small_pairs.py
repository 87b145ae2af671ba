"""Small pairs with random weights: quick, and good at nothing."""

from __future__ import annotations

import torch
from model import DraftConfig, EagleHead, Target, TargetConfig


def small_pair(attention: str, vocab: int = 5, seed: int = 0) -> tuple[Target, EagleHead]:
    """A pair of random weights. With so few tokens some guesses are right by chance."""
    torch.manual_seed(seed)
    config = TargetConfig(
        attention,
        vocab=vocab,
        hidden=32,
        layers=3,
        heads=2,
        kv_heads=1,
        head_dim=16,
        rope_dim=8,
        kv_lora_rank=16,
        nope_dim=8,
        v_dim=16,
        inner=48,
        feature_layers=(1, 2, 3),
    )
    target = Target(config)
    draft = DraftConfig(hidden=32, fused_layers=3, heads=2, head_dim=16, rope_dim=8, inner=48)
    head = EagleHead(draft, target.embedding)
    for module in (target, head):
        module.eval().requires_grad_(False)
        for weight in module.parameters():
            if weight.dim() > 1:  # larger than for training: near-ties would make tests fragile
                weight.mul_(15)
    return target, head
