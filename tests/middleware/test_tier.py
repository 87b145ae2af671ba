"""tier://: read-through with promotion, write-back with an honest queue, either tier may fail."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from recording import RecordingBackend

from hicache_storage import BackendError, BackendUnavailable, Namespace, Store, hookimpl, open_store
from hicache_storage.calling import Caller
from hicache_storage.middleware.copying import CopyQueue
from hicache_storage.middleware.tier import TierBackend

Hashes = Callable[[int], list[str]]
DOWN = BackendUnavailable("down", backend="memory", operation="x")


class Tier:
    """A tier of two recording backends, behind a Store."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
        self.upper, self.lower = RecordingBackend(), RecordingBackend()
        backends = {"upper://": self.upper, "lower://": self.lower}
        monkeypatch.setattr(
            "hicache_storage.middleware.tier.build_from", lambda url: (backends[url], "memory")
        )
        options = {"write": "through", "queue": 1 << 20, "drain_s": 5.0} | options
        self.backend = TierBackend(TierBackend.Config("upper://", "lower://", **options))
        self.store = Store(self.backend, name="tier")
        self.store.open()

    def settle(self) -> None:
        for queue in (self.backend.promotions, self.backend.write_back):
            queue.drain(5)

    def keys(self, backend: RecordingBackend) -> set[str]:
        return {p.key.partition("/")[2] for p in backend.scan("") if "/n:" not in p.key}


@pytest.fixture
def tier(monkeypatch: pytest.MonkeyPatch) -> Iterator[Tier]:
    made = Tier(monkeypatch)
    yield made
    made.store.close()


@pytest.fixture
def back(monkeypatch: pytest.MonkeyPatch) -> Iterator[Tier]:
    made = Tier(monkeypatch, write="back", drain_s=0.05)
    yield made
    made.store.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("hicache-storage-")]


def pages(count: int) -> list[bytes]:
    return [bytes([i + 1]) * 512 for i in range(count)]


def read(store: Store, namespace: Namespace, keys: list[str]) -> list[int]:
    """The byte that fills each page; -1 for a miss."""
    got = [bytearray(512) for _ in keys]
    hits = store.batch_get(namespace, keys, got)
    return [buffer[0] if hit else -1 for hit, buffer in zip(hits, got, strict=True)]


def test_pages_found_below_are_promoted(
    tier: Tier, target_namespace: Namespace, hashes: Hashes
) -> None:
    keys = hashes(3)
    tier.store.batch_set(target_namespace, keys, pages(3))
    tier.upper.clear()
    assert read(tier.store, target_namespace, keys) == [1, 2, 3]
    tier.settle()
    assert tier.keys(tier.upper) == set(keys)
    tier.lower.calls.clear()
    assert read(tier.store, target_namespace, keys) == [1, 2, 3]
    assert tier.lower.requests("batch_get") == [], "the upper tier serves them now"


def test_a_page_on_its_way_up_never_replaces_one_that_was_set_meanwhile(
    tier: Tier, target_namespace: Namespace, hashes: Hashes
) -> None:
    keys = hashes(1)
    tier.store.batch_set(target_namespace, keys, pages(1))
    tier.upper.clear()
    tier.upper.fail["batch_set"] = DOWN  # the promotion is tried again and again
    assert read(tier.store, target_namespace, keys) == [1]
    assert tier.backend.promotions.queued_pages == 1
    tier.upper.fail.clear()
    tier.store.batch_set(target_namespace, keys, [bytes([9]) * 512])
    tier.settle()
    assert read(tier.store, target_namespace, keys) == [9]


def test_only_what_the_upper_tier_lacks_is_asked_of_the_lower_one(
    tier: Tier, target_namespace: Namespace, hashes: Hashes
) -> None:
    keys = hashes(4)
    tier.store.batch_set(target_namespace, keys, pages(4))
    tier.upper.delete([f"{target_namespace.digest}/{key}" for key in keys[1:3]])
    tier.lower.calls.clear()
    assert read(tier.store, target_namespace, keys) == [1, 2, 3, 4]
    assert tier.lower.requests("batch_get") == [keys[1:3]]


def test_a_page_that_is_bad_above_comes_from_below_and_is_mended(
    tier: Tier, target_namespace: Namespace, hashes: Hashes
) -> None:
    keys = hashes(2)
    tier.store.batch_set(target_namespace, keys, pages(2))
    good = tier.upper.page(keys[0])
    tier.upper.replace(keys[0], good[:-1] + b"\xff")
    assert read(tier.store, target_namespace, keys) == [1, 2]
    assert tier.store.counts.corrupt_pages == 0
    tier.settle()
    assert tier.upper.page(keys[0]) == good
    assert tier.keys(tier.lower) == set(keys), "nothing below was deleted"


def test_the_leading_run_may_lie_in_both_tiers(
    tier: Tier, target_namespace: Namespace, hashes: Hashes
) -> None:
    keys = hashes(8)
    tier.store.batch_set(target_namespace, keys, pages(8))

    def names(indices: list[int]) -> list[str]:
        return [f"{target_namespace.digest}/{keys[i]}" for i in indices]

    tier.upper.delete(names([2, 3, 5]))
    tier.lower.delete(names([0, 4, 6]))
    assert tier.store.exists(target_namespace, keys) == 8
    tier.lower.delete(names([5]))
    assert tier.store.exists(target_namespace, keys) == 5
    assert tier.store.exists(target_namespace, hashes(9)[8:]) == 0


@pytest.mark.parametrize("failing", ["upper", "lower"])
def test_one_tier_may_fail_without_taking_the_other_down(
    tier: Tier, target_namespace: Namespace, hashes: Hashes, failing: str
) -> None:
    keys = hashes(3)
    tier.store.batch_set(target_namespace, keys, pages(3))
    getattr(tier, failing).fail = dict.fromkeys(("batch_set", "batch_get", "exists"), DOWN)
    assert tier.store.exists(target_namespace, keys) == 3
    assert read(tier.store, target_namespace, keys) == [1, 2, 3]
    if failing == "upper":
        assert tier.store.batch_set(target_namespace, hashes(4)[3:], pages(1)) == [True]
    else:  # through: only what the lower tier has is acknowledged
        with pytest.raises(BackendUnavailable):
            tier.store.batch_set(target_namespace, hashes(4)[3:], pages(1))


def test_a_partial_hit_above_survives_a_failure_below(
    tier: Tier, target_namespace: Namespace, hashes: Hashes
) -> None:
    keys = hashes(3)
    tier.store.batch_set(target_namespace, keys, pages(3))
    tier.upper.delete([f"{target_namespace.digest}/{keys[2]}"])
    tier.lower.fail["batch_get"] = DOWN
    assert read(tier.store, target_namespace, keys) == [1, 2, -1]


def test_both_tiers_failing_is_an_error(
    tier: Tier, target_namespace: Namespace, hashes: Hashes
) -> None:
    for backend in (tier.upper, tier.lower):
        backend.fail = dict.fromkeys(("batch_get", "exists"), DOWN)
    with pytest.raises(BackendUnavailable):
        tier.store.exists(target_namespace, hashes(1))
    with pytest.raises(BackendUnavailable):
        read(tier.store, target_namespace, hashes(1))


def test_through_acknowledges_what_the_lower_tier_has(
    tier: Tier, target_namespace: Namespace, hashes: Hashes
) -> None:
    tier.lower.refuse = {hashes(2)[1]}
    assert tier.store.batch_set(target_namespace, hashes(3), pages(3)) == [True, False, True]


def test_back_acknowledges_above_and_flush_waits_for_below(
    back: Tier, target_namespace: Namespace, hashes: Hashes
) -> None:
    keys = hashes(200)
    assert back.store.batch_set(target_namespace, keys, [bytes(512)] * 200) == [True] * 200
    back.store.flush()
    assert back.keys(back.lower) == set(keys)


def test_back_keeps_trying_while_the_lower_tier_is_down_and_flush_says_so(
    back: Tier, target_namespace: Namespace, hashes: Hashes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hicache_storage.middleware.copying.RETRY_S", 0.01)
    back.lower.fail["batch_set"] = DOWN
    assert back.store.batch_set(target_namespace, hashes(2), pages(2)) == [True] * 2
    with pytest.raises(BackendError, match="pages could not be copied to the lower tier"):
        back.store.flush()
    assert read(back.store, target_namespace, hashes(2)) == [1, 2]
    back.lower.fail.clear()
    assert back.backend.write_back.drain(30) == 0
    assert back.keys(back.lower) == set(hashes(2))


def test_a_page_that_waits_is_found_although_the_upper_tier_dropped_it(
    back: Tier, target_namespace: Namespace, hashes: Hashes
) -> None:
    back.lower.fail["batch_set"] = DOWN
    assert back.store.batch_set(target_namespace, hashes(1), pages(1)) == [True]
    back.upper.clear()
    assert read(back.store, target_namespace, hashes(1)) == [1]


def test_a_full_queue_writes_through(
    monkeypatch: pytest.MonkeyPatch, target_namespace: Namespace, hashes: Hashes
) -> None:
    small = Tier(monkeypatch, write="back", queue=10, drain_s=0.05)
    assert small.store.batch_set(target_namespace, hashes(2), pages(2)) == [True] * 2
    assert small.keys(small.lower) == set(hashes(2))
    small.lower.refuse = set(hashes(3)[2:])
    assert small.store.batch_set(target_namespace, hashes(3)[2:], pages(1)) == [False]
    small.store.close()


def test_closing_reports_what_it_could_not_copy_and_ends_in_time(
    back: Tier, target_namespace: Namespace, hashes: Hashes, caplog: pytest.LogCaptureFixture
) -> None:
    back.lower.fail["batch_set"] = DOWN
    back.store.batch_set(target_namespace, hashes(2), pages(2))
    back.store.close()
    assert "pages were not copied to the lower tier" in caplog.text


def test_a_deleted_page_does_not_come_back_from_the_queue(
    back: Tier, target_namespace: Namespace, hashes: Hashes
) -> None:
    entered, leave = threading.Event(), threading.Event()
    write = back.lower.batch_set

    def slow(keys: list[str], pages: list[Any], prefix_keys: list[str] | None) -> list[bool]:
        if threading.current_thread().name.startswith("hicache-storage-"):
            entered.set()
            assert leave.wait(30)
        return write(keys, pages, prefix_keys)

    back.backend.lower = Caller(Patched(back.lower, slow), name="lower")
    back.store.batch_set(target_namespace, hashes(1), pages(1))
    assert entered.wait(30)
    deleter = threading.Thread(target=back.store.delete, args=(target_namespace, hashes(1)))
    deleter.start()
    leave.set()
    deleter.join(30)
    back.settle()
    assert back.store.exists(target_namespace, hashes(1)) == 0


class Patched:
    """A backend with another batch_set."""

    def __init__(self, backend: RecordingBackend, batch_set: Callable[..., list[bool]]) -> None:
        self.backend, self.write = backend, batch_set

    @hookimpl
    def batch_set(
        self, keys: list[str], pages: list[Any], prefix_keys: list[str] | None
    ) -> list[bool]:
        return self.write(keys, pages, prefix_keys)

    @hookimpl
    def batch_get(
        self, keys: list[str], buffers: list[Any], prefix_keys: list[str] | None
    ) -> list[bool]:
        return self.backend.batch_get(keys, buffers, prefix_keys)

    @hookimpl
    def exists(self, keys: list[str], prefix_keys: list[str] | None) -> int:
        return self.backend.exists(keys, prefix_keys)

    @hookimpl
    def delete(self, keys: list[str]) -> list[bool]:
        return self.backend.delete(keys)


def test_the_store_of_a_url_with_two_tiers(target_namespace: Namespace, hashes: Hashes) -> None:
    url = "tier://?upper=memory%3A%2F%2F%3Fcapacity%3D1MiB&lower=memory%3A%2F%2F&write=back"
    with open_store(url) as store:
        assert store.batch_set(target_namespace, hashes(1), pages(1)) == [True]
        assert read(store, target_namespace, hashes(1)) == [1]
        assert store.capabilities >= {"delete", "scan", "usage", "clear", "flush"}


def test_capabilities_are_those_of_both_tiers(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoScan(RecordingBackend):
        scan = None  # type: ignore[assignment]

    monkeypatch.setattr(
        "hicache_storage.middleware.tier.build_from",
        lambda url: (NoScan() if url == "lower://" else RecordingBackend(), "memory"),
    )
    store = Store(TierBackend(TierBackend.Config("upper://", "lower://")))
    assert "scan" not in store.capabilities
    assert "delete" in store.capabilities


def test_a_queue_is_empty_in_a_forked_child_and_whole_in_the_parent() -> None:
    leave = threading.Event()

    def write(keys: list[str], pages: list[Any]) -> list[bool]:
        assert leave.wait(30)
        return [True] * len(keys)

    queue = CopyQueue("test", 1 << 20, write)
    page = (memoryview(b"head"), memoryview(b"body"))
    assert queue.put("a", page)
    child = os.fork()
    if child == 0:
        leave.set()
        os._exit(0 if queue.put("b", page) and queue.drain(10) == 0 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert queue.queued_pages == 1
    leave.set()
    assert queue.drain(30) == 0
    queue.stop()
