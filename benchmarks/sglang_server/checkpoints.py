"""The example's trained pairs (`examples/engine/checkpoints`) as models that SGLang serves.

The grouped-attention target becomes a Llama, the latent-attention one a DeepSeek-V2, the draft head
an EAGLE3 head, all in float16. The mathematics stay the same:

- EAGLE3 takes a target's states before a layer, so where the head reads those after the last layer
  the target gets one more, which adds nothing;
- latent attention is widened to DeepSeek's own sizes, which are what kernels are made for: more
  channels, all zero, with queries and the latent's gains scaled for what the sizes stand for.

Names of weights are those of the checkpoints that SGLang loads. Sizes: C hidden, R latent, H heads.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Weights = dict[str, Tensor]
MOST_POSITIONS = 32768
NOPE, ROPE, VALUE, LATENT = 128, 64, 128, 512  # DeepSeek-V2's channels of a head, and the latent's
_COMMON = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": MOST_POSITIONS,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "dtype": "float16",
}


def write_target(pair: Path, out: Path) -> None:
    """The target of the pair in folder `pair`, as a model in folder `out`."""
    config, weights = _config(pair)["target"], load_file(pair / "target.safetensors")
    latent = config["attention"] == "mla"
    empty = max(config["feature_layers"]) - config["layers"] + 1
    layers = config["layers"] + max(0, empty)
    found = {
        "model.embed_tokens.weight": weights["embedding.weight"],
        "lm_head.weight": weights["embedding.weight"],
        "model.norm.weight": weights["norm.weight"],
    }
    for index in range(layers):
        source = _layer(weights, f"layers.{min(index, config['layers'] - 1)}.")
        layer = _latent_layer(source, config) if latent else _grouped_attention(source)
        layer |= _feed_forward(source)
        if index >= config["layers"]:
            layer = {name: weight.new_zeros(weight.shape) for name, weight in layer.items()}
        found |= {f"model.layers.{index}.{name}": weight for name, weight in layer.items()}
    _write(out, (_deepseek if latent else _llama)(config, layers), found)


def write_head(pair: Path, out: Path) -> None:
    """The draft head of the pair in folder `pair`, as an EAGLE3 head in folder `out`."""
    sizes, weights = _config(pair), load_file(pair / "draft.safetensors")
    target, head = sizes["target"], sizes["draft"]
    embedding = load_file(pair / "target.safetensors")["embedding.weight"]
    layer = _grouped_attention(weights) | _feed_forward(weights)
    layer["input_layernorm.weight"] = weights["embed_norm.weight"]
    layer["hidden_norm.weight"] = weights["hidden_norm.weight"]
    found = {f"midlayer.{name}": weight for name, weight in layer.items()}
    found |= {
        "fc.weight": weights["fusion.weight"],
        "norm.weight": weights["norm.weight"],
        "lm_head.weight": embedding,
    }
    for index in range(head["fused_layers"]):
        found[f"fc_norm.{index}.weight"] = torch.ones(head["hidden"])
    config = _llama({**target, **head, "kv_heads": head["heads"]}, 1) | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": target["vocab"],
        "fc_norm": True,
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": [n - 1 for n in target["feature_layers"]],
        },
    }
    _write(out, config, found)


def _config(pair: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((pair / "config.json").read_text())
    return found


def _layer(weights: Weights, prefix: str) -> Weights:
    return {n.removeprefix(prefix): w for n, w in weights.items() if n.startswith(prefix)}


def _grouped_attention(source: Weights) -> Weights:
    found = {f"self_attn.{n}_proj.weight": source[f"attention.{n}.weight"] for n in "qkvo"}
    if "attention_norm.weight" in source:
        found["input_layernorm.weight"] = source["attention_norm.weight"]
    return found


def _feed_forward(source: Weights) -> Weights:
    found = {
        f"mlp.{name}_proj.weight": source[f"mlp.{name}.weight"] for name in ("gate", "up", "down")
    }
    return {**found, "post_attention_layernorm.weight": source["mlp_norm.weight"]}


def _latent_layer(source: Weights, config: dict[str, Any]) -> Weights:
    heads, rank, rope, nope, value = (
        config[name] for name in ("heads", "kv_lora_rank", "rope_dim", "nope_dim", "v_dim")
    )
    hidden = source["attention.down.weight"].shape[1]
    places = _rotated_places(rope)
    scale = math.sqrt((NOPE + ROPE) / (nope + rope))

    queries = source["attention.q.weight"].float().view(heads, rope + nope, hidden) * scale
    q = torch.zeros(heads, NOPE + ROPE, hidden)
    q[:, :nope] = queries[:, rope:]
    q[:, NOPE + places] = queries[:, :rope]

    down = source["attention.down.weight"].float()
    kv_a = torch.zeros(LATENT + ROPE, hidden)
    kv_a[:rank] = down[rope:]
    kv_a[LATENT + places] = down[:rope]

    gains = torch.zeros(LATENT)
    gains[:rank] = source["attention.norm.weight"].float() * math.sqrt(rank / LATENT)

    kv_b = torch.zeros(heads, NOPE + VALUE, LATENT)
    kv_b[:, :nope, :rank] = source["attention.k_up"].float()
    kv_b[:, NOPE : NOPE + value, :rank] = source["attention.v_up"].float().transpose(1, 2)

    o = torch.zeros(hidden, heads, VALUE)
    o[..., :value] = source["attention.o.weight"].float().view(hidden, heads, value)
    return {
        "input_layernorm.weight": source["attention_norm.weight"],
        "self_attn.q_proj.weight": q.flatten(0, 1),
        "self_attn.kv_a_proj_with_mqa.weight": kv_a,
        "self_attn.kv_a_layernorm.weight": gains,
        "self_attn.kv_b_proj.weight": kv_b.flatten(0, 1),
        "self_attn.o_proj.weight": o.flatten(1),
    }


def _rotated_places(rope: int) -> Tensor:
    """Where each of `rope` rotated channels has its frequency among ROPE of them."""
    step = ROPE // rope
    first = torch.arange(rope // 2) * step
    return torch.cat((first, first + ROPE // 2))


def _llama(config: dict[str, Any], layers: int) -> dict[str, Any]:
    return {
        **_COMMON,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config["vocab"],
        "hidden_size": config["hidden"],
        "intermediate_size": config["inner"],
        "num_hidden_layers": layers,
        "num_attention_heads": config["heads"],
        "num_key_value_heads": config["kv_heads"],
        "head_dim": config["head_dim"],
        "rope_theta": config["rope_theta"],
        "partial_rotary_factor": config["rope_dim"] / config["head_dim"],
    }


def _deepseek(config: dict[str, Any], layers: int) -> dict[str, Any]:
    return {
        **_COMMON,
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "vocab_size": config["vocab"],
        "hidden_size": config["hidden"],
        "intermediate_size": config["inner"],
        "moe_intermediate_size": config["inner"],
        "num_hidden_layers": layers,
        "num_attention_heads": config["heads"],
        "num_key_value_heads": config["heads"],
        "q_lora_rank": None,
        "kv_lora_rank": LATENT,
        "qk_nope_head_dim": NOPE,
        "qk_rope_head_dim": ROPE,
        "v_head_dim": VALUE,
        "rope_theta": config["rope_theta"],
        "rope_interleave": False,
        # No layer has experts, but the loader counts them.
        "first_k_dense_replace": layers,
        "n_routed_experts": 2,
        "n_shared_experts": 1,
        "num_experts_per_tok": 1,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "greedy",
        "scoring_func": "softmax",
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "moe_layer_freq": 1,
    }


def _write(out: Path, config: dict[str, Any], weights: Weights) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    half = {name: weight.to(torch.float16).contiguous().clone() for name, weight in weights.items()}
    save_file(half, out / "model.safetensors", {"format": "pt"})
