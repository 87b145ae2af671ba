"""Backend options: from a URL, a mapping or the environment to one typed, frozen dataclass.

A backend declares its options as a frozen dataclass of fields made with `option(...)` and names
it as its attribute `Config`. This module alone reads the environment.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
import types
import typing
from collections.abc import Mapping
from fractions import Fraction
from typing import Any, Literal
from urllib.parse import parse_qsl, unquote, urlsplit

from .errors import ConfigError

ENVIRONMENT_PREFIX = "HICACHE_STORAGE_"
UrlPart = Literal["", "location", "host", "path"]

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_UNITS |= {"KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]I?)?B?\s*", re.IGNORECASE)
_TRUE = {"1", "true", "yes", "on"}
_FALSE = {"0", "false", "no", "off"}


def option(
    default: Any = dataclasses.MISSING,
    *,
    doc: str,
    unit: str = "",
    url: UrlPart = "",
    secret: bool = False,
    choices: tuple[str, ...] = (),
) -> Any:
    """A field of a backend's `Config`.

    `unit` is shown to users; "bytes" also accepts "10GiB". `url` says which part of
    `scheme://host/path` fills the field: "host", "path" (without its first slash), or
    "location" for both as one path. `secret` keeps the value out of repr and of errors.
    """
    return dataclasses.field(
        default=default,
        repr=not secret,
        metadata={"doc": doc, "unit": unit, "url": url, "choices": choices, "secret": secret},
    )


def split_url(url: str) -> tuple[str, dict[str, str]]:
    """`scheme://location?name=value` as (scheme, options), where the URL's own parts stand
    under "url:host", "url:path" and "url:location"."""
    try:
        parts = urlsplit(url)
        query = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
    except ValueError:
        parts, query = None, []
    if parts is None or not parts.scheme or "://" not in url:
        raise ConfigError(
            f"{masked_url(url)!r} is not a store URL; expected NAME://LOCATION?OPTION=VALUE, "
            "for example file:///var/cache/kv?capacity=100GiB"
        )
    if parts.fragment or url.endswith("#"):
        raise ConfigError(f"store URL {masked_url(url)!r} has a '#'; write it as %23")
    host, path = unquote(parts.netloc), unquote(parts.path)
    options = {"url:host": host, "url:path": path.removeprefix("/"), "url:location": host + path}
    for name, value in query:
        if name in options:
            raise ConfigError(f"store URL gives {name!r} twice")
        options[name] = value
    return parts.scheme, options


def masked_url(url: str) -> str:
    """A URL, well-formed or not, without what may be a secret: user, password, query."""
    scheme, separator, rest = re.split(r"[?#]", url, maxsplit=1)[0].partition("://")
    host, slash, path = rest.partition("/")
    return f"{scheme}{separator}{host.rpartition('@')[2]}{slash}{path}"


def environment_url() -> str | None:
    """HICACHE_STORAGE_URL, or None."""
    return os.environ.get(ENVIRONMENT_PREFIX + "URL")


def build_config(cls: type | None, backend: str, given: Mapping[str, Any]) -> Any:
    """An instance of the backend's `Config` class; None for a backend without options.

    Precedence: `given`, then HICACHE_STORAGE_<BACKEND>_<OPTION>, then the default. Raises
    ConfigError for an unknown option (with the nearest name), a missing or a malformed one.
    `given` is not modified.
    """
    fields = {f.name: f for f in dataclasses.fields(cls)} if cls is not None else {}
    hints = typing.get_type_hints(cls) if cls is not None else {}
    by_url = {f.metadata.get("url"): name for name, f in fields.items() if f.metadata.get("url")}
    values: dict[str, Any] = {}
    for name, value in given.items():
        if name.startswith("url:"):
            target = by_url.get(name.removeprefix("url:"))
            if target is not None and value and target not in given:
                values[target] = value
            continue
        if name not in fields:
            near = difflib.get_close_matches(name, fields, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            known = ", ".join(sorted(fields)) or "none"
            raise ConfigError(f"backend {backend!r} has no option {name!r}{hint} (known: {known})")
        values[name] = value
    if given.get("url:location") and not by_url:
        raise ConfigError(f"backend {backend!r} takes no location in its URL")
    for name in fields:
        variable = f"{ENVIRONMENT_PREFIX}{backend}_{name}".upper().replace("-", "_")
        if name not in values and variable in os.environ:
            values[name] = os.environ[variable]
    for name, field in fields.items():
        if name in values:
            values[name] = _converted(backend, name, values[name], hints[name], field.metadata)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ConfigError(
                f"backend {backend!r} needs the option {name!r}: {field.metadata.get('doc', '')}"
            )
    if cls is None:
        return None
    return cls(**values)


def parse_size(text: str) -> int:
    """ "10GiB", "1.5 MB" or "4096" as bytes; raises ValueError for anything else."""
    match = _SIZE.fullmatch(text)
    count = Fraction(match[1]) * _UNITS[(match[2] or "").upper()] if match is not None else None
    if count is None or count.denominator != 1:
        raise ValueError(f"{text!r} is not a size; write bytes, or 10GiB, 500MB")
    return int(count)


def _converted(backend: str, name: str, value: Any, hint: Any, metadata: Mapping[str, Any]) -> Any:
    kinds = [hint]
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        kinds = list(typing.get_args(hint))
        if value is None and type(None) in kinds:
            return None
        kinds = [kind for kind in kinds if kind is not type(None)]
    kind = kinds[0]
    choices = metadata.get("choices") or ()
    try:
        if typing.get_origin(kind) is Literal:
            choices = choices or typing.get_args(kind)
            kind = str
        result = _as_kind(value, kind, metadata.get("unit", ""))
        if choices and result not in choices:
            raise ValueError(f"expected one of {', '.join(choices)}")
    except (ValueError, TypeError) as error:
        shown = "" if not metadata.get("doc") else f" ({metadata['doc']})"
        if metadata.get("secret"):
            kind_name = getattr(kind, "__name__", str(kind))
            raise ConfigError(
                f"backend {backend!r}, option {name!r}{shown}: not a valid {kind_name}; "
                "the value is not shown, since it is secret"
            ) from None
        raise ConfigError(f"backend {backend!r}, option {name!r}{shown}: {error}") from error
    return result


def _as_kind(value: Any, kind: Any, unit: str) -> Any:
    if kind is Any:
        return value
    if kind is bool:
        if isinstance(value, bool):
            return value
        lowered = str(value).lower()
        if lowered in _TRUE | _FALSE:
            return lowered in _TRUE
        raise ValueError(f"expected true or false, got {value!r}")
    if isinstance(value, bool):
        raise TypeError(f"expected {kind.__name__}, got {value!r}")
    if kind is int:
        if isinstance(value, str):
            return parse_size(value) if unit == "bytes" else int(value)
        if isinstance(value, float) and not value.is_integer():
            raise ValueError(f"expected a whole number, got {value!r}")
        return int(value)
    if kind is float:
        return float(value)
    if kind is str:
        if not isinstance(value, (str, os.PathLike)):
            raise TypeError(f"expected text, got {type(value).__name__}")
        return os.fspath(value)
    if isinstance(value, kind):
        return value
    raise TypeError(f"expected {kind}, got {type(value).__name__}")


def describe_options(cls: type | None) -> list[dict[str, Any]]:
    """Name, type, unit, default and doc of every option, for listings and docs."""
    if cls is None:
        return []
    hints = typing.get_type_hints(cls)
    return [
        {
            "name": f.name,
            "type": getattr(hints[f.name], "__name__", str(hints[f.name])),
            "unit": f.metadata.get("unit", ""),
            "default": None if f.default is dataclasses.MISSING else f.default,
            "required": f.default is dataclasses.MISSING
            and f.default_factory is dataclasses.MISSING,
            "doc": f.metadata.get("doc", ""),
        }
        for f in dataclasses.fields(cls)
    ]
