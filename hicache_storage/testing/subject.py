"""Subject: the store under test, named so that any process can open it."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..store import Store

Where = str | Mapping[str, Any]
"""A store URL, or a mapping with "backend" and options, as `open_store` takes it."""

Tamper = Callable[[Store, str, bytes], None]
"""Puts bytes in the place of what is stored under a stored key, behind the backend's back."""


@dataclass(frozen=True)
class Subject:
    """One store under test.

    `where` must name the same store each time that it is opened, in this process and in
    others; unless the backend's scope is "process", what one wrote another then finds.
    """

    where: Where = field(repr=False)
    """May hold secrets."""
    opener: str = "hicache_storage:open_store"
    """`module:function` that opens `where`; called as `opener(where, wrappers=..., **options)`."""
    tamper: Tamper | None = None
    """None: damage is done through the backend's own `batch_set`."""
    private: bool = False
    """Whether the store may be filled up: nobody else uses it and it holds nothing of value."""
    empty: bool = False
    """Whether the store may be cleared: it held nothing when the run began."""

    def open(self, *, wrappers: Sequence[object] = (), **options: Any) -> Store:
        """Opens it; the caller closes it."""
        module, _, function = self.opener.partition(":")
        opener = getattr(importlib.import_module(module), function)
        store: Store = opener(self.where, wrappers=wrappers, **options)
        return store

    def to_json(self) -> str:
        """The subject for another process, which makes it with `from_json`."""
        return json.dumps({"where": self.where, "opener": self.opener}, default=_plain)

    @classmethod
    def from_json(cls, text: str) -> Subject:
        return cls(**json.loads(text))


def _plain(value: Any) -> Any:
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    raise TypeError(
        f"a store mapping must hold plain values, so that another process can open it; "
        f"got {type(value).__name__}"
    )
