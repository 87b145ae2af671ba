"""What a lane keeps between copies."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from hicache_storage.pools import lanes
from hicache_storage.pools.lanes import Lane


def kept(done: bool | None, room: int = 4096) -> Any:
    read = None if done is None else SimpleNamespace(query=lambda: done)
    return SimpleNamespace(slots=range(room), read=read)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Slots of the pinned lists that were made anew."""
    found: list[int] = []

    def make(slots: int) -> Any:
        found.append(slots)
        return kept(False, slots)

    monkeypatch.setattr(lanes, "_Pinned", make)
    return found


def lane_of(*lists: Any) -> Lane:
    lane = Lane.__new__(Lane)
    lane._lists = deque(lists)
    return lane


def test_pinned_lists_are_used_again_in_turn(made: list[int]) -> None:
    first, second = kept(None), kept(True)
    lane = lane_of(first, second)
    assert [lane._pinned(4096) for _ in range(3)] == [first, second, first]
    assert not made


def test_a_pinned_list_that_is_still_read_is_left_alone(made: list[int]) -> None:
    read = kept(True)
    lane = lane_of(kept(False), read)
    assert [lane._pinned(5) for _ in range(2)] == [read, read]
    read.read = kept(False).read
    lane._pinned(5)
    lane._pinned(5)
    assert made == [4096, 4096]
    assert len(lane._lists) == 4


def test_a_longer_list_gets_memory_that_is_used_again(made: list[int]) -> None:
    lane = lane_of(kept(None))
    longer = lane._pinned(4097)
    longer.read = None
    assert lane._pinned(8192) is longer
    assert lane._pinned(8193) is not longer
    assert made == [8192, 16384]
