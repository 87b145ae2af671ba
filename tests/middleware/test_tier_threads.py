"""Large pages of tier:// are read by several threads, as one batch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from backends.test_file_threads import Meeting, namespace_of
from middleware.test_tier import DOWN, Tier
from recording import RecordingBackend

from hicache_storage import BackendUnavailable
from hicache_storage.calling import Caller
from hicache_storage.middleware import tier as tier_module
from hicache_storage.middleware.breaker import Breaker, BreakerConfig

Hashes = Callable[[int], list[str]]
SIZE = 1 << 20
COUNT = 8
SPACE = namespace_of(SIZE)
EVERY = list(range(1, COUNT + 1))
"""The bytes that fill the pages."""


@pytest.fixture(params=[2, 4])
def tier(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tier]:
    monkeypatch.setattr(tier_module, "THREADS", request.param)
    made = Tier(monkeypatch, queue=64 << 20)
    yield made
    made.store.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("hicache-tier")]


@pytest.fixture
def keys(tier: Tier, hashes: Hashes) -> list[str]:
    """Pages that both tiers have."""
    keys = hashes(COUNT)
    pages = [bytes([i + 1]) * SIZE for i in range(COUNT)]
    assert tier.store.batch_set(SPACE, keys, pages) == [True] * COUNT
    for backend in (tier.upper, tier.lower):
        backend.calls.clear()
    return keys


def read(tier: Tier, keys: list[str]) -> list[int]:
    """The byte that fills each page; -1 for a miss."""
    got = [bytearray(SIZE) for _ in keys]
    hits = tier.store.batch_get(SPACE, keys, got)
    for hit, page in zip(hits, got, strict=True):
        assert not hit or page == page[:1] * SIZE
    return [page[0] if hit else -1 for hit, page in zip(hits, got, strict=True)]


def drop(backend: RecordingBackend, keys: list[str]) -> None:
    backend.delete([f"{SPACE.digest}/{key}" for key in keys])


def held_up(backend: RecordingBackend, meeting: Meeting, monkeypatch: pytest.MonkeyPatch) -> None:
    note = backend._note

    def meet(hook: str, *arguments: Any) -> None:
        note(hook, *arguments)
        if hook == "batch_get":
            meeting.come()

    monkeypatch.setattr(backend, "_note", meet)


@pytest.mark.parametrize("where", ["upper", "lower"])
def test_the_threads_read_at_once_from_whichever_tier_has_the_pages(
    tier: Tier, keys: list[str], where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if where == "lower":
        drop(tier.upper, keys)
    meeting = Meeting(tier_module.THREADS)
    held_up(getattr(tier, where), meeting, monkeypatch)
    assert read(tier, keys) == EVERY
    assert len(meeting.threads) == tier_module.THREADS
    parts = getattr(tier, where).requests("batch_get")
    assert sorted(key for part in parts for key in part) == sorted(keys)


def test_writes_and_small_pages_are_one_call(tier: Tier, hashes: Hashes) -> None:
    space, keys = namespace_of(64 << 10), hashes(COUNT)
    tier.store.batch_set(space, keys, [bytes(64 << 10)] * COUNT)
    tier.store.batch_get(space, keys, [bytearray(64 << 10) for _ in keys])
    tier.store.batch_set(SPACE, keys, [bytes(SIZE)] * COUNT)
    assert tier.lower.requests("batch_set") == [keys, keys]
    assert tier.upper.requests("batch_get") == [keys]


def test_pages_of_both_tiers_arrive_and_those_from_below_are_promoted(
    tier: Tier, keys: list[str]
) -> None:
    drop(tier.upper, keys[1:6])
    drop(tier.lower, keys[3:4])
    assert read(tier, keys) == [1, 2, 3, -1, 5, 6, 7, 8]
    tier.settle()
    assert tier.keys(tier.upper) == {*keys[:3], *keys[4:]}


def test_a_page_above_in_any_part_survives_a_failure_below(tier: Tier, keys: list[str]) -> None:
    drop(tier.upper, keys[1:])
    tier.lower.fail["batch_get"] = DOWN
    assert read(tier, keys) == [1] + [-1] * 7
    assert tier.backend.failures.counts["lower read"] == 1


def test_a_failure_below_is_the_batchs_if_there_is_no_page_above(
    tier: Tier, keys: list[str]
) -> None:
    drop(tier.upper, keys)
    tier.lower.fail["batch_get"] = DOWN
    with pytest.raises(BackendUnavailable):
        read(tier, keys)
    tier.lower.fail.clear()
    assert read(tier, keys) == EVERY


def test_the_upper_tier_may_fail(tier: Tier, keys: list[str]) -> None:
    tier.upper.fail["batch_get"] = DOWN
    assert read(tier, keys) == EVERY


def test_a_breaker_round_a_tier_sees_its_failures(tier: Tier, keys: list[str]) -> None:
    breaker = Breaker(Caller(tier.upper, name="upper"), BreakerConfig(failures=2))
    tier.backend.upper = Caller(breaker, name="upper")
    tier.upper.fail["batch_get"] = DOWN
    assert read(tier, keys) == read(tier, keys) == EVERY
    assert breaker.state == "open"
    asked = len(tier.upper.requests("batch_get"))
    assert read(tier, keys) == EVERY
    assert len(tier.upper.requests("batch_get")) == asked
