"""Opening the store that a command names."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..config import environment_url, masked_url, split_url
from ..discovery import load_backend
from ..errors import ConfigError
from ..opening import open_store
from ..store import Store


@contextmanager
def opened(arguments: argparse.Namespace, *needs: str, writes: bool = False) -> Iterator[Store]:
    """The store, closed afterwards. Only for reading unless the command `writes`, where the backend
    can be told so: that makes no store at a mistyped path. Raises ConfigError if the backend lacks
    one of `needs`."""
    options = {} if writes else _only_reading(arguments.url)
    with open_store(arguments.url, **options) as store:
        missing = sorted(set(needs) - store.capabilities)
        if missing:
            raise ConfigError(
                f"{arguments.command} needs a backend with {' and '.join(missing)}; "
                f"{store.name!r} has {', '.join(sorted(store.capabilities)) or 'no optional hook'}"
            )
        yield store


def shown_url(url: str | None) -> str:
    """The URL without what may be a secret: user, password and query."""
    return masked_url(url or environment_url() or "")


def _only_reading(url: str | None) -> dict[str, Any]:
    """The option that says so, if the backend has it and the URL doesn't say otherwise."""
    named = url or environment_url()
    if named is None:
        return {}
    name, given = split_url(named)
    config = getattr(load_backend(name), "Config", None)
    fields = dataclasses.fields(config) if dataclasses.is_dataclass(config) else ()
    has_it = any(field.name == "read_only" for field in fields)
    return {"read_only": True} if has_it and "read_only" not in given else {}
