"""Backends by name, from the entry-point group `hicache_storage.backends`.

Built-in backends come in by the same door as everyone's. Only the chosen one is loaded.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

from .errors import ConfigError, ContractViolation, UnknownBackendError

GROUP = "hicache_storage.backends"
OWN_DISTRIBUTION = "hicache-storage"
EXTRAS = {"lmdb": "lmdb", "s3": "boto3"}
"""Built-in backends that need a client library: the extra's name is the backend's."""
_NAME = re.compile(r"[a-z][a-z0-9+.-]*")
PLUGINS = {"fsspec": "hicache-storage-fsspec", "redis": "hicache-storage-redis"}


@dataclass(frozen=True)
class Found:
    """One name of the group, and who offers it."""

    name: str
    entry_point: metadata.EntryPoint
    distribution: str
    version: str
    rivals: tuple[str, ...] = field(default=())
    """Other distributions that claim the same name and are not used."""

    @property
    def built_in(self) -> bool:
        return self.distribution == OWN_DISTRIBUTION


def find_backends(entry_points: Iterable[metadata.EntryPoint] | None = None) -> dict[str, Found]:
    """Every backend by name; loads nothing.

    The same entry point met twice (an editable install beside a wheel) counts once. Where
    two distributions claim a name, a built-in wins, else the name stays unusable and
    `load_backend` says who claims it.
    """
    if entry_points is None:
        entry_points = metadata.entry_points(group=GROUP)
    claims: dict[str, dict[tuple[str, str], metadata.EntryPoint]] = {}
    for entry_point in entry_points:
        owner = entry_point.dist.name if entry_point.dist is not None else "unknown"
        claims.setdefault(entry_point.name, {}).setdefault((owner, entry_point.value), entry_point)
    found: dict[str, Found] = {}
    for name, claimed in sorted(claims.items()):
        ordered = sorted(claimed, key=lambda claim: (claim[0] != OWN_DISTRIBUTION, claim))
        owner, value = ordered[0]
        entry_point = claimed[owner, value]
        version = entry_point.dist.version if entry_point.dist is not None else "?"
        rivals = tuple(f"{o} ({v})" for o, v in ordered[1:])
        found[name] = Found(name, entry_point, owner, version, rivals)
    return found


def offers_one_backend(found: Found) -> bool:
    """Whether the name can be used: it fits a URL, and one distribution offers it, or this one."""
    return bool(_NAME.fullmatch(found.name)) and (found.built_in or not found.rivals)


def load_backend(name: str, found: dict[str, Found] | None = None) -> type[Any]:
    """The backend's class.

    Raises UnknownBackendError for a name that nobody offers, ConfigError if its client library
    is missing or several distributions claim it, ContractViolation if it isn't a class. Any
    other error of the plugin's import is raised as it is, with its own traceback.
    """
    found = find_backends() if found is None else found
    if name not in found:
        raise UnknownBackendError(_unknown(name, found))
    chosen = found[name]
    if not _NAME.fullmatch(name):
        raise ContractViolation(
            f"entry point {name!r} of {chosen.distribution}: a backend's name must be usable in a "
            "URL: lower-case letters, digits, '+', '-' and '.', a letter first"
        )
    if chosen.rivals and not chosen.built_in:
        raise ConfigError(
            f"backend {name!r} is offered by {chosen.distribution} "
            f"({chosen.entry_point.value}) and by {', '.join(chosen.rivals)}; uninstall all but one"
        )
    try:
        backend = chosen.entry_point.load()
    except ModuleNotFoundError as error:
        if chosen.built_in and (hint := missing_extra(name, error)):
            raise ConfigError(hint) from error
        raise
    if not isinstance(backend, type):
        raise ContractViolation(
            f"entry point {name!r} of {chosen.distribution} ({chosen.entry_point.value}) must "
            f"be a class, got {type(backend).__name__}"
        )
    config = getattr(backend, "Config", None)
    if config is not None and not dataclasses.is_dataclass(config):
        raise ContractViolation(
            f"backend {name!r}: {backend.__qualname__}.Config must be a dataclass with a field "
            f"for each option (config.option), got {config!r:.100}"
        )
    return backend


def missing_extra(name: str, error: BaseException | None) -> str:
    """How to get the client library of a built-in backend, if that it isn't installed is what
    `error` says; "" for any other error, also for a client library that is there and broken."""
    client = EXTRAS.get(name)
    if client is None or not isinstance(error, ModuleNotFoundError) or error.name != client:
        return ""
    return f"backend {name!r} needs {client}: pip install '{OWN_DISTRIBUTION}[{name}]'"


def build_backend(name: str, cls: type[Any], config: Any) -> object:
    """An instance of the backend's class: `cls(config)` if it has a `Config`, else `cls()`."""
    takes_config = getattr(cls, "Config", None) is not None
    try:
        return cls(config) if takes_config else cls()
    except TypeError as error:
        expected = "(self, config)" if takes_config else "(self), since it has no Config"
        if error.__traceback__ is not None and error.__traceback__.tb_next is not None:
            raise
        raise ContractViolation(
            f"backend {name!r}: {cls.__qualname__}.__init__ must take {expected}; {error}"
        ) from error


def _unknown(name: str, found: dict[str, Found]) -> str:
    listing = ", ".join(f"{f.name} ({f.distribution} {f.version})" for f in found.values())
    near = difflib.get_close_matches(name.lower(), found, 1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    if name in PLUGINS:
        hint = f" To get it: pip install {PLUGINS[name]}."
    return (
        f"no backend is called {name!r}.{hint} Installed: {listing or 'none'}. "
        f"A plugin package offers one in its entry-point group {GROUP!r}; if yours is "
        "installed and not listed, reinstall it (stale metadata of an older install hides it)"
    )
