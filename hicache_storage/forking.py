"""What threads hold as a process forks: they did not come along, so the child gets new ones."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

Owner = TypeVar("Owner")
_OWNERS: weakref.WeakKeyDictionary[Any, Callable[[Any], None]] = weakref.WeakKeyDictionary()


def renew_in_child(owner: Owner, renew: Callable[[Owner], None]) -> None:
    """Has `renew` called with `owner` in every child that is forked from now on. `renew` must not
    refer to it."""
    _OWNERS[owner] = renew


def renew_lock_in_child(owner: Any) -> None:
    """Gives `owner` a new `_lock` in every child that is forked from now on.

    For locks that are held for moments and guard what may be left half changed, like counts.
    """
    renew_in_child(owner, _renew_lock)


def _renew_lock(owner: Any) -> None:
    owner._lock = threading.Lock()


def _renew() -> None:
    for owner, renew in list(_OWNERS.items()):
        renew(owner)


os.register_at_fork(after_in_child=_renew)
