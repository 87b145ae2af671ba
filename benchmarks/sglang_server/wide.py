"""A model with the KV of an 8-billion-parameter Llama and little else: 128 KiB a token.

32 layers of 8 KV heads of 128 channels, with random weights, and a draft of one such layer. What
it says means nothing; its pages are as large as a real model's.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

VOCABULARY, HIDDEN, HEADS, HEAD_DIM = 2048, 512, 8, 128
TARGET_LAYERS, DRAFT_LAYERS = 32, 1


def write_wide(out: Path, layers: int, seed: int = 0) -> None:
    """The model with so many layers, in folder `out`."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator).mul_(0.02).half()

    width = HEADS * HEAD_DIM
    weights = {
        "model.embed_tokens.weight": matrix(VOCABULARY, HIDDEN),
        "lm_head.weight": matrix(VOCABULARY, HIDDEN),
        "model.norm.weight": torch.ones(HIDDEN).half(),
    }
    for layer in range(layers):
        at = f"model.layers.{layer}."
        for name in "qkv":
            weights[f"{at}self_attn.{name}_proj.weight"] = matrix(width, HIDDEN)
        weights[f"{at}self_attn.o_proj.weight"] = matrix(HIDDEN, width)
        for name in ("gate", "up", "down"):
            weights[f"{at}mlp.{name}_proj.weight"] = matrix(HIDDEN, HIDDEN)
        for name in ("input", "post_attention"):
            weights[f"{at}{name}_layernorm.weight"] = torch.ones(HIDDEN).half()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": HIDDEN,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "dtype": "float16",
    }
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    save_file(weights, out / "model.safetensors", {"format": "pt"})
