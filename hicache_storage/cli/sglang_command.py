"""SGLang's command line, as far as storage depends on it; read without SGLang."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import ConfigError

DEFAULT_THRESHOLD_TOKENS = 256
_ELEMENT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1}


@dataclass(frozen=True)
class Launch:
    """What a server is started with."""

    backend: str | None = None
    extra_config: Mapping[str, Any] = field(default_factory=dict)
    hierarchical: bool = False
    page_size: int = 1
    """Tokens."""
    ratio: float | None = None
    """Host pool over device pool, if given."""
    size_gb: int = 0
    """Host pool of each rank, if given."""
    model_path: str = ""
    draft_path: str = ""
    algorithm: str = ""
    kv_dtype: str = "auto"
    tp_size: int = 1
    write_policy: str = "write_through"

    @property
    def threshold_tokens(self) -> int:
        """Shortest prefix that is prefetched."""
        asked = self.extra_config.get("prefetch_threshold", DEFAULT_THRESHOLD_TOKENS)
        return max(int(asked), self.page_size)


def read_launch(arguments: Sequence[str]) -> Launch:
    """The arguments behind `python -m sglang.launch_server` or `sglang serve`; others are left
    to SGLang. Raises ConfigError for an extra config that can't be read."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--hicache-storage-backend")
    parser.add_argument("--hicache-storage-backend-extra-config")
    parser.add_argument("--enable-hierarchical-cache", action="store_true")
    parser.add_argument("--page-size", type=int, default=1)
    parser.add_argument("--hicache-ratio", type=float)
    parser.add_argument("--hicache-size", type=int, default=0)
    parser.add_argument("--hicache-write-policy", default="write_through")
    parser.add_argument("--model-path", "--model", default="")
    parser.add_argument("--speculative-draft-model-path", "--speculative-draft-model", default="")
    parser.add_argument("--speculative-algorithm", default="")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--tensor-parallel-size", "--tp-size", "--tp", type=int, default=1)
    try:
        found, _ = parser.parse_known_args(list(arguments))
    except SystemExit as error:
        raise ConfigError(f"SGLang's arguments can't be read: {' '.join(arguments)}") from error
    return Launch(
        backend=found.hicache_storage_backend,
        extra_config=_extra_config(found.hicache_storage_backend_extra_config),
        hierarchical=found.enable_hierarchical_cache,
        page_size=found.page_size,
        ratio=found.hicache_ratio,
        size_gb=found.hicache_size,
        model_path=found.model_path,
        draft_path=found.speculative_draft_model_path,
        algorithm=found.speculative_algorithm,
        kv_dtype=found.kv_cache_dtype,
        tp_size=found.tensor_parallel_size,
        write_policy=found.hicache_write_policy,
    )


def token_bytes(model_path: str, kv_dtype: str, tp_size: int) -> int | None:
    """Bytes of KV that a token takes on one rank, from a checkpoint's config.json; None if there
    is none on this machine, or it has fields of no known meaning."""
    try:
        config = json.loads(Path(model_path, "config.json").read_text())
        config = config.get("text_config", config)
        layers = int(config["num_hidden_layers"])
        name = kv_dtype if kv_dtype != "auto" else str(config.get("torch_dtype", "bfloat16"))
        element = _ELEMENT_BYTES[name]
        if "kv_lora_rank" in config:
            latent = int(config["kv_lora_rank"]) + int(config["qk_rope_head_dim"])
            return layers * latent * element
        heads = int(config["num_attention_heads"])
        kv_heads = int(config.get("num_key_value_heads") or heads)
        dim = int(config.get("head_dim") or config["hidden_size"] // heads)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return 2 * layers * max(1, kv_heads // tp_size) * dim * element


def _extra_config(given: str | None) -> Mapping[str, Any]:
    """The extra config as SGLang reads it: JSON, or the name of a file behind an "@"."""
    if not given:
        return {}
    if not given.startswith("@"):
        found = _parsed("the extra config", lambda: json.loads(given))
    else:
        path = Path(given[1:])
        found = _parsed(f"extra config {path}", lambda: _file(path))
    if not isinstance(found, Mapping):
        raise ConfigError("the extra config must be an object of options")
    return found


def _file(path: Path) -> Any:
    kind = path.suffix.lower()
    if kind == ".json":
        return json.loads(path.read_text())
    if kind == ".toml":
        import tomllib  # type: ignore[import-not-found, unused-ignore]

        return tomllib.loads(path.read_text())
    if kind in (".yaml", ".yml"):
        import yaml  # type: ignore[import-untyped, unused-ignore]

        return yaml.safe_load(path.read_text())
    raise ConfigError(f"SGLang reads .json, .toml and .yaml, not {kind or 'a name without ending'}")


def _parsed(what: str, read: Any) -> Any:
    try:
        return read()
    except ConfigError:
        raise
    except ImportError as error:
        raise ConfigError(f"{what} needs a package to be read: {error}") from error
    except Exception as error:  # each reader has its own; none shows the text, with its secrets
        raise ConfigError(f"{what} can't be read: {type(error).__name__}") from None
