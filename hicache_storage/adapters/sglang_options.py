"""Options of a storage backend in SGLang: its extra config, split and checked.

SGLang passes one mapping for everything: its own names, this adapter's, the backend's and those
of the middleware. Precedence of each option: the extra config, then the environment
(HICACHE_STORAGE_SGLANG_<OPTION> for the adapter's, HICACHE_STORAGE_<BACKEND>_<OPTION> for the
backend's), then the default.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ..config import build_config, environment_url, option, split_url
from ..discovery import load_backend
from ..errors import ConfigError
from ..middleware.stack import INNERMOST_FIRST

SGLANGS_OWN = frozenset(
    {
        "backend_name",
        "class_name",
        "hicache_storage_pass_prefix_keys",
        "interface_v1",
        "module_path",
        "prefetch_threshold",
        "prefetch_timeout_base",
        "prefetch_timeout_per_ki_token",
        "tp_lcm_size",
    }
)
"""Names that SGLang reads from the same mapping; some releases leave them in it."""
LOCAL = frozenset({"file", "lmdb", "memory"})
"""Backends without a network, which start without a breaker."""

PairingOption = Literal["auto", "best_effort", "required"]


@dataclass(frozen=True)
class AdapterConfig:
    """The adapter's own options."""

    pairing: PairingOption = option(
        "auto",
        doc="What a lost draft page costs. required: the pages from it on, which are computed "
        "again, draft included. best_effort: the draft's memory is zeroed and speculation is slow "
        "there. auto: required where the draft's host pool is known, else best_effort.",
    )
    tenant: str = option("", doc="Salt: servers with different ones never share pages.")
    model: str = option("", doc="Name of the model; what SGLang was started with if unset.")
    revision: str = option(
        "",
        doc="Identity of the weights, taken as it is; if unset, what SGLang's arguments say "
        "(revision, quantization, overrides).",
    )
    draft_model: str = option("", doc="Name of the draft model; SGLang's if unset.")
    draft_revision: str = option("", doc="Identity of the draft's weights; SGLang's if unset.")


@dataclass(frozen=True)
class Options:
    """What an extra config asks for."""

    backend: str
    """Name of the backend."""
    url: str | dict[str, Any]
    """As `open_store` takes it."""
    overrides: dict[str, Any]
    """Backend and middleware options beside a URL."""
    adapter: AdapterConfig


def read_options(backend: str, extra_config: Any) -> Options:
    """The options of `backend`, or of the backend that the extra config names if it is "".

    `extra_config` is a mapping, a JSON object as text, or None; it isn't modified. Raises
    ConfigError for anything else and for an unknown name, with the nearest known one.
    """
    given = dict(_as_mapping(extra_config))
    for name in SGLANGS_OWN:
        given.pop(name, None)
    own = {field.name for field in dataclasses.fields(AdapterConfig)}
    adapter: AdapterConfig = build_config(
        AdapterConfig, "sglang", {name: given.pop(name) for name in own & set(given)}
    )
    url = given.pop("url", None)
    if url is not None and not isinstance(url, str):
        raise ConfigError(f"option 'url' must be text, got {type(url).__name__}")
    named = given.pop("backend", None)
    if not backend and url is None and named is None:
        url = environment_url()
        if url is None:
            raise ConfigError(
                "no store is named: give the extra config a 'url', for example "
                '{"url": "s3://bucket/prefix"}, or set HICACHE_STORAGE_URL'
            )
    name = _one_name(backend, named, None if url is None else split_url(url)[0])
    _check_known(name, given, own)
    in_url = split_url(url)[1] if url is not None else {}
    if name not in LOCAL and not any(_first_part(key) == "breaker" for key in (*given, *in_url)):
        given["breaker"] = True
    if url is not None:
        return Options(name, url, given, adapter)
    return Options(name, {"backend": name, **given}, {}, adapter)


def _as_mapping(extra_config: Any) -> Mapping[str, Any]:
    if extra_config is None:
        return {}
    if isinstance(extra_config, str):
        if extra_config.startswith("@"):
            raise ConfigError(
                "the extra config is the name of a file ('@...'); only SGLang reads such files, "
                "from --hicache-storage-backend-extra-config. Give a JSON object here"
            )
        try:
            extra_config = json.loads(extra_config or "{}")
        except ValueError as error:  # its message doesn't show the text, which may hold secrets
            raise ConfigError(f"the extra config is not JSON: {error}") from None
    if not isinstance(extra_config, Mapping):
        raise ConfigError(
            f"the extra config must be a JSON object of options, got {type(extra_config).__name__}"
        )
    for name in extra_config:
        if not isinstance(name, str):
            raise ConfigError(f"an option's name must be text, got {name!r:.100}")
    return extra_config


def _one_name(*claims: Any) -> str:
    names = {claim for claim in claims if claim}
    if len(names) != 1:
        listing = " and ".join(repr(name) for name in sorted(map(str, names)))
        raise ConfigError(
            f"the extra config names {listing}: the scheme of 'url', 'backend' and the backend "
            "that SGLang was started with must be one"
        )
    (name,) = names
    if not isinstance(name, str):
        raise ConfigError(f"option 'backend' must be text, got {type(name).__name__}")
    return name


def _check_known(backend: str, given: Mapping[str, Any], own: set[str]) -> None:
    config = getattr(load_backend(backend), "Config", None)
    fields = {field.name for field in dataclasses.fields(config)} if config is not None else set()
    known = fields | own | set(INNERMOST_FIRST) | {"url"}
    for name in given:
        if name in known or _first_part(name) in INNERMOST_FIRST:
            continue
        first, dot, rest = name.partition(".")
        candidates = INNERMOST_FIRST if dot else known | SGLANGS_OWN
        near = difflib.get_close_matches(first, sorted(candidates), 1)
        hint = f"; did you mean {near[0] + dot + rest!r}?" if near else ""
        raise ConfigError(
            f"unknown option {name!r} in the extra config{hint} (backend {backend!r} has "
            f"{', '.join(sorted(fields)) or 'none'}; the adapter has {', '.join(sorted(own))}; "
            f"middleware: {', '.join(sorted(INNERMOST_FIRST))})"
        )


def _first_part(name: str) -> str:
    return name.partition(".")[0]
