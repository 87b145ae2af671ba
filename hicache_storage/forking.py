"""Locks after a fork: whoever held one did not come along, so the child gets new ones."""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any

_OWNERS: weakref.WeakSet[Any] = weakref.WeakSet()


def renew_lock_in_child(owner: Any) -> None:
    """Gives `owner` a new `_lock` in every child that is forked from now on.

    For locks that are held for moments and guard what may be left half changed, like counts.
    """
    _OWNERS.add(owner)


def _renew() -> None:
    for owner in list(_OWNERS):
        owner._lock = threading.Lock()


os.register_at_fork(after_in_child=_renew)
