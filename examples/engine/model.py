"""The example's target model, and loading a trained pair of target and draft head.

The target is a small Llama-style transformer (RMSNorm, rotary positions, SwiGLU, tied embeddings)
with grouped or latent attention. Its one skill is to copy and continue text that it sees in
its context. Weights are stored as bfloat16 and run as float32.

Shapes: T new tokens, C hidden size, F feature layers, V vocabulary. `...` is nothing when serving
and a batch when training.

    target, head, tokenizer = load_pair(directory)
    kv = ContiguousCache(target.config.layers)          # or any KVAccess
    states = target(tokens, positions, kv)              # tokens, positions: (T,)
    scores = target.logits(states.last[-1:])            # (1, V)
    output = head(next_tokens, head.fuse(states.features), positions, draft_kv)
    guess = head.logits(output[-1:]).argmax(-1)         # then head(guess, output[-1:], ...) and on
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from draft import DraftConfig, EagleHead
from kv import ContiguousCache, KVAccess, NoCache
from layers import Attention, LatentAttention, RMSNorm, Rotation, SwiGLU, initialise, rotation
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional

__all__ = [
    "BOS",
    "SEP",
    "ContiguousCache",
    "DraftConfig",
    "EagleHead",
    "KVAccess",
    "NoCache",
    "Target",
    "TargetConfig",
    "TargetStates",
    "copy_prompt",
    "load_pair",
    "load_tokenizer",
    "save_pair",
]

BOS, SEP = 0, 1  # token ids: the start of a sequence, and the end of a document in it


@dataclass(frozen=True)
class TargetConfig:
    """Sizes of a `Target`. `attention` is "mha" (grouped if kv_heads < heads) or "mla"."""

    attention: str = "mha"
    vocab: int = 2048
    hidden: int = 192
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2  # mha
    head_dim: int = 64  # mha
    rope_dim: int = 32  # channels of a key that are rotated
    kv_lora_rank: int = 96  # mla: channels of the latent
    nope_dim: int = 32  # mla: channels of a head's key that are not rotated
    v_dim: int = 48  # mla: channels of a head's value
    inner: int = 384  # feed-forward width
    rope_theta: float = 10_000.0
    feature_layers: tuple[int, ...] = (1, 2, 4)  # the draft reads the state after so many layers

    @property
    def kv_row_shape(self) -> tuple[int, int]:
        """(H, D) of a token's row: of K and of V, or (1, R) of the only row for MLA."""
        if self.attention == "mla":
            return 1, self.kv_lora_rank + self.rope_dim
        return self.kv_heads, self.head_dim

    @property
    def has_values(self) -> bool:
        """Whether a layer keeps V rows beside its K rows; MLA doesn't."""
        return self.attention != "mla"


class TargetStates(NamedTuple):
    """What a forward call of the target yields."""

    last: Tensor  # (..., T, C): normalised, for `logits`
    features: Tensor  # (..., T, F * C): for `EagleHead.fuse`


class Layer(nn.Module):
    """One transformer layer of the target."""

    def __init__(self, c: TargetConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(c.hidden)
        self.attention: nn.Module
        if c.attention == "mla":
            self.attention = LatentAttention(
                c.hidden,
                c.heads,
                rank=c.kv_lora_rank,
                nope_dim=c.nope_dim,
                rope_dim=c.rope_dim,
                v_dim=c.v_dim,
            )
        else:
            self.attention = Attention(c.hidden, c.hidden, c.heads, c.kv_heads, c.head_dim)
        self.mlp_norm = RMSNorm(c.hidden)
        self.mlp = SwiGLU(c.hidden, c.inner)

    def forward(
        self, x: Tensor, positions: Tensor, by: Rotation, index: int, kv: KVAccess
    ) -> Tensor:
        """(..., T, C) to (..., T, C); writes the new tokens' rows of layer `index`."""
        x = x + self.attention(self.attention_norm(x), positions, by, index, kv)
        return x + self.mlp(self.mlp_norm(x))


class Target(nn.Module):
    """The model whose tokens are served; the draft only guesses them."""

    def __init__(self, config: TargetConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab, config.hidden)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.hidden)
        initialise(self, config.layers)

    def forward(self, tokens: Tensor, positions: Tensor, kv: KVAccess) -> TargetStates:
        """Run T tokens (..., T) at `positions` (T,), which follow the rows that `kv` holds."""
        x = self.embedding(tokens)
        by = rotation(positions, self.config.rope_dim, self.config.rope_theta)
        features = []
        for index, layer in enumerate(self.layers):
            x = layer(x, positions, by, index, kv)
            if index + 1 in self.config.feature_layers:
                features.append(x)
        return TargetStates(self.norm(x), torch.cat(features, dim=-1))

    def logits(self, last: Tensor) -> Tensor:
        """States (..., T, C) to scores of the next token (..., T, V)."""
        return functional.linear(last, self.embedding.weight)


def copy_prompt(document: list[int], prompt_tokens: int, lead: int = 24) -> list[int]:
    """[BOS] document [SEP] first `lead` tokens of the document: at most `prompt_tokens` ids.

    The model goes on with the document's token `lead`. The document is cut to what fits.
    """
    document = document[: prompt_tokens - lead - 2]
    return [BOS, *document, SEP, *document[:lead]]


def load_tokenizer(path: Path | str | None = None) -> Tokenizer:
    """The byte-level tokenizer of both pairs: `decode(encode(text).ids) == text` for any text."""
    path = path or Path(__file__).with_name("tokenizer.json")
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.encode_special_tokens = True  # "[SEP]" in a text is text, not the token
    return tokenizer


def load_pair(directory: Path | str) -> tuple[Target, EagleHead, Tokenizer]:
    """The pair saved in `directory`, in float32 on the CPU, ready for inference."""
    directory = Path(directory)
    config = json.loads((directory / "config.json").read_text())
    sizes = config["target"]
    sizes["feature_layers"] = tuple(sizes["feature_layers"])
    target = Target(TargetConfig(**sizes))
    head = EagleHead(DraftConfig(**config["draft"]), target.embedding)
    for module, name in ((target, "target"), (head, "draft")):
        weights = load_file(directory / f"{name}.safetensors")
        module.load_state_dict({key: weight.float() for key, weight in weights.items()})
        module.eval().requires_grad_(False)
    return target, head, load_tokenizer()


def save_pair(directory: Path | str, target: Target, head: EagleHead) -> None:
    """Write config.json, target.safetensors and draft.safetensors, in bfloat16."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    config = {"target": asdict(target.config), "draft": asdict(head.config)}
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for module, name in ((target, "target"), (head, "draft")):
        weights = {
            key: weight.detach().to("cpu", torch.bfloat16).contiguous()
            for key, weight in module.state_dict().items()
        }
        save_file(weights, directory / f"{name}.safetensors")
