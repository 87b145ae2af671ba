"""open_store: from a URL, a mapping or the environment to an open Store."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from .config import build_config, environment_url, split_url
from .discovery import build_backend, load_backend, missing_extra
from .errors import BackendError, ConfigError
from .middleware.stack import split_middleware, stack
from .store import Store

logger = logging.getLogger("hicache_storage")


def open_store(
    url: str | Mapping[str, Any] | None = None,
    *,
    wrappers: Sequence[object] = (),
    **options: Any,
) -> Store:
    """Opens the store that `url` names.

    `url` is "file:///var/cache/kv?capacity=100GiB", or a mapping {"backend": "file", "path":
    ...}, or None for the environment's HICACHE_STORAGE_URL. `options` override it;
    HICACHE_STORAGE_<BACKEND>_<OPTION> fills in what both leave open. Options like
    "retry.attempts" or "breaker" put that middleware round the backend (`middleware.stack`).
    `wrappers` are pluggy wrappers round all of it, the last one outermost.

    Raises UnknownBackendError, ConfigError, or the backend's error if it can't open.
    """
    backend, name = build_from(url, **options)
    store = Store(backend, name=name, wrappers=wrappers)
    try:
        store.open()
    except BackendError as error:
        if hint := missing_extra(error.backend, error.__cause__):
            raise ConfigError(hint) from error
        raise
    return store


def build_from(url: str | Mapping[str, Any] | None, **options: Any) -> tuple[object, str]:
    """The backend that `url` names, with its middleware round it, not opened; and its name."""
    name, given = _backend_and_options(url)
    given |= options
    cls = load_backend(name)
    own, middleware = split_middleware(given)
    config = build_config(getattr(cls, "Config", None), name, own)
    logger.info("store %r: %s", name, config if config is not None else "no options")
    return stack(build_backend(name, cls, config), name, middleware), name


def _backend_and_options(url: str | Mapping[str, Any] | None) -> tuple[str, dict[str, Any]]:
    if url is None:
        url = environment_url()
        if url is None:
            raise ConfigError("no store is named: give a URL or set HICACHE_STORAGE_URL")
    if isinstance(url, str):
        name, given = split_url(url)
        return name, dict(given)
    given = dict(url)
    name = given.pop("backend", "")
    if not isinstance(name, str) or not name:
        raise ConfigError('a store mapping needs "backend", the name of one')
    return name, given
