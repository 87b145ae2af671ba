"""Rigs that are closed after the test, which must leave no thread behind."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hicache.rig import SOON_S, Gate, Rig


@pytest.fixture
def rig() -> Iterator[Callable[..., Rig]]:
    """`rig(**options)` makes a Rig."""
    before = set(threading.enumerate())
    made: list[Rig] = []

    def make(**options: Any) -> Rig:
        made.append(Rig(**options))
        return made[-1]

    yield make
    for one in made:
        if isinstance(one.backend.on, Gate):
            one.backend.on.open()
        one.backend.on = lambda hook, keys: None
        one.cache.close(SOON_S)
    for thread in set(threading.enumerate()) - before:
        thread.join(SOON_S)
        assert not thread.is_alive(), f"{thread.name} is still there"
