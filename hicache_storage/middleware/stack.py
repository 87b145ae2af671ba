"""Named middleware: from the options `retry.attempts=5` or {"retry": {...}} to a stack.

The order is fixed, since other orders make no sense: outermost the existence cache, which saves
calls; then the breaker, which sees what retries could not mend; retries; the deadline of each
attempt; and innermost the limit of calls at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..calling import Caller
from ..config import build_config
from .around import Around
from .breaker import Breaker
from .deadline import Deadline
from .existence import ExistenceCache
from .limit import Limit
from .retry import Retry

INNERMOST_FIRST: dict[str, type[Any]] = {
    "limit": Limit,
    "deadline": Deadline,
    "retry": Retry,
    "breaker": Breaker,
    "existence": ExistenceCache,
}


def split_middleware(
    given: Mapping[str, Any],
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Options as (the backend's own, each middleware's).

    A middleware is asked for by one of its options, "retry.attempts": 5, by a mapping
    {"retry": {"attempts": 5}}, or with its defaults by {"retry": True}.
    """
    own: dict[str, Any] = {}
    asked: dict[str, dict[str, Any]] = {}
    for name, value in given.items():
        middleware, dot, option_name = name.partition(".")
        if middleware not in INNERMOST_FIRST:
            own[name] = value
        elif dot:
            asked.setdefault(middleware, {})[option_name] = value
        elif isinstance(value, Mapping):
            asked.setdefault(middleware, {}).update(value)
        elif str(value).lower() in {"true", "1", "yes", "on"}:
            asked.setdefault(middleware, {})
        elif str(value).lower() not in {"false", "0", "no", "off"}:
            asked.setdefault(middleware, {})[""] = value  # refused below, with the known options
    return own, asked


def stack(backend: object, name: str, asked: Mapping[str, Mapping[str, Any]]) -> object:
    """`backend` with the named middleware round it, in the fixed order."""
    for middleware, cls in INNERMOST_FIRST.items():
        if middleware in asked:
            config = build_config(cls.Config, middleware, asked[middleware])
            layer: Around = cls(Caller(backend, name=name), config)
            backend = layer
    return backend
