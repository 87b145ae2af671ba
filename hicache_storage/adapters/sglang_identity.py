"""What a server is, as far as it decides what its pages mean: model, weights, ranks."""

from __future__ import annotations

import hashlib
import re
import sys
from dataclasses import dataclass, field
from typing import Any

from ..errors import ConfigError
from ..pools.ranks import Ranks
from .sglang_options import AdapterConfig

_SNAPSHOT = re.compile(r"models--(?P<name>[^/]+)/snapshots/(?P<commit>[0-9a-f]{40})/*$")
_CHANGES_VALUES = ("quantization", "quantization_param_path", "json_model_override_args")
"""Arguments that change the KV of the same checkpoint."""
_LONG = 200
_NO_DRAFT = (None, "", "NGRAM")


@dataclass(frozen=True)
class Identity:
    """Everything about a server that its namespaces need and a host pool doesn't know."""

    model: str
    revision: str
    draft_model: str
    draft_revision: str
    tenant: str
    ranks: Ranks
    replicated: bool
    """Whether all tensor-parallel ranks hold the same target pages (MLA and its like)."""
    kv_cache_dtype: str
    """As SGLang's argument has it: "auto", "fp8_e4m3", ..."""
    release: str
    """SGLang's version."""
    drafting: bool
    """Whether a draft model guesses tokens."""
    doubts: tuple[str, ...] = field(default=())
    """What the operator should know about this identity, each a sentence."""


def server_arguments() -> Any:
    """SGLang's arguments of this process, or None before it has any; imports nothing."""
    for module, getter in (
        ("sglang.srt.runtime_context", "get_server_args"),
        ("sglang.srt.server_args", "get_global_server_args"),
    ):
        try:
            arguments = getattr(sys.modules.get(module), getter)()
        except Exception:
            continue
        if arguments is not None:
            return arguments
    return None


def identify(
    storage_config: Any, options: AdapterConfig, arguments: Any = None, release: str = ""
) -> Identity:
    """The identity that SGLang's storage config, its arguments and the options make.

    Raises ConfigError where a page's meaning can't be named, or the parallelism isn't supported.
    """
    doubts = []
    model, commit = _checkpoint(getattr(arguments, "model_path", None))
    model = options.model or model or getattr(storage_config, "model_name", None) or ""
    if not model:
        raise ConfigError("SGLang gives no model name; set the option 'model'")
    revision = options.revision or _revision(arguments, commit, "revision")
    if not revision:
        doubts.append(
            f"the weights of {model!r} are known by that name alone: when other weights come to "
            "have this name, old pages would be read for them. Set 'revision' (any text that "
            "changes with the weights), or start SGLang with --revision"
        )
    if _mixes_requests(arguments):
        doubts.append(
            "this SGLang release names pages by their tokens alone, so requests with different "
            "LoRA adapters share pages in storage; don't use storage with LoRA in this release"
        )
    draft_path = getattr(arguments, "speculative_draft_model_path", None)
    draft_model, draft_commit = _checkpoint(draft_path)
    drafts = getattr(arguments, "speculative_algorithm", None) not in _NO_DRAFT
    return Identity(
        model=model,
        revision=revision,
        draft_model=options.draft_model or draft_model or model,
        draft_revision=options.draft_revision
        or _revision(arguments, draft_commit, "speculative_draft_model_revision"),
        tenant=options.tenant,
        ranks=_ranks(storage_config),
        replicated=bool(getattr(storage_config, "is_mla_model", False)),
        kv_cache_dtype=str(getattr(arguments, "kv_cache_dtype", None) or "auto"),
        release=release,
        drafting=drafts,
        doubts=tuple(doubts),
    )


def _checkpoint(path: Any) -> tuple[str, str]:
    """A model path as (name, commit); a snapshot in a hub's cache says both."""
    if not path:
        return "", ""
    found = _SNAPSHOT.search(str(path))
    if found is None:
        return str(path), ""
    return found["name"].replace("--", "/"), found["commit"]


def _revision(arguments: Any, commit: str, name: str) -> str:
    """The weights' revision, and the arguments that change what is computed with them."""
    parts = [str(commit or getattr(arguments, name, None) or "")]
    for argument in _CHANGES_VALUES:
        value = str(getattr(arguments, argument, None) or "")
        if value and value != "{}":
            if len(value) > _LONG:
                value = "sha256:" + hashlib.sha256(value.encode()).hexdigest()[:16]
            parts.append(f"{argument}={value}")
    return " ".join(part for part in parts if part)


def _mixes_requests(arguments: Any) -> bool:
    if not (getattr(arguments, "enable_lora", None) or getattr(arguments, "lora_paths", None)):
        return False
    hashing = sys.modules.get("sglang.srt.mem_cache.utils")
    return hashing is not None and not hasattr(hashing, "storage_namespace_seed")


def _ranks(storage_config: Any) -> Ranks:
    """The ranks that decide a page's bytes. Not among them is the data-parallel rank: its peers
    compute the same pages."""
    if getattr(storage_config, "dcp_size", 1) > 1:
        raise ConfigError(
            "decode context parallelism (dcp) splits pages in a way that this adapter doesn't "
            "know; start SGLang without it, or without this storage backend"
        )
    names = {
        "tp_rank": "tp_rank",
        "tp_size": "tp_size",
        "pp_rank": "pp_rank",
        "pp_size": "pp_size",
        "cp_rank": "attn_cp_rank",
        "cp_size": "attn_cp_size",
    }
    found = {ours: getattr(storage_config, theirs, None) for ours, theirs in names.items()}
    return Ranks(**{name: int(value) for name, value in found.items() if value is not None})
