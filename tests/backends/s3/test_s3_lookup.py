"""Lookups: many requests at a time, and no more than the leading run needs."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable

import pytest
from backends.s3.misbehaving_server import (
    MisbehavingServer,
    Seen,
    Sometimes,
    error,
    reset,
    slowly,
    stall,
    wrong_length,
)
from backends.s3.rig import KEYS, NAMESPACE, PAGE_BYTES, Opened, page
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from s3_servers import Server

from hicache_storage import BackendTimeout, BackendUnavailable, open_store
from hicache_storage.backends.s3 import doubts

Open = Callable[..., Opened]


@pytest.mark.parametrize("missing", [None, 0, 1, 63, 127])
def test_a_lookup_takes_few_rounds_and_stops_early(opened: Open, missing: int | None) -> None:
    with MisbehavingServer(delay_s=0.02) as server:
        store = opened(server, concurrency=32)
        store.fill(128)
        if missing is not None:
            store.store.delete(NAMESPACE, [KEYS[missing]])
        server.forget()
        before = store.backend.counts.requests["HEAD"]
        expected = 128 if missing is None else missing
        assert store.exists(list(range(128))) == expected
        asked = len(server.verbs("HEAD"))
        assert asked <= min(128, expected + 2 * 32)
        assert store.backend.counts.requests["HEAD"] - before == asked
        assert server.most_at_once > 8 or expected < 8


def test_a_lookup_asks_only_so_far_beyond_a_slow_answer(
    server: MisbehavingServer, opened: Open
) -> None:
    store = opened(server, concurrency=8)
    store.fill(128)
    server.forget()
    server.behave = Sometimes(slowly(0.5), lambda seen: seen.path.endswith(KEYS[0]))
    asked = []
    timer = threading.Timer(0.3, lambda: asked.append(len(server.seen)))
    timer.start()
    assert store.exists(list(range(128))) == 128
    timer.join()
    assert asked[0] <= 16


@given(st.lists(st.booleans(), min_size=1, max_size=60), st.integers(0, 10**6))
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
def test_answers_out_of_order_give_the_right_leading_run(
    server: MisbehavingServer, opened: Open, stored: list[bool], seed: int
) -> None:
    store = opened(server, concurrency=16)
    store.fill(len(stored))
    store.store.delete(NAMESPACE, [KEYS[i] for i, there in enumerate(stored) if not there])
    delays = random.Random(seed)
    server.behave = lambda seen: slowly(delays.uniform(0, 0.01)) if seen.verb == "HEAD" else None
    run = stored.index(False) if False in stored else len(stored)
    assert store.exists(list(range(len(stored)))) == run


def test_a_slow_answer_beyond_the_run_is_not_waited_for(
    server: MisbehavingServer, opened: Open
) -> None:
    store = opened(server)
    store.fill(10)
    store.store.delete(NAMESPACE, [KEYS[3]])
    server.behave = Sometimes(stall(30), lambda seen: seen.path.endswith(KEYS[7]))
    started = time.monotonic()
    assert store.exists(list(range(10))) == 3
    assert time.monotonic() - started < 3
    server.behave = lambda seen: None
    assert store.exists([0, 1, 2]) == 3


def test_a_page_that_cannot_be_looked_up_ends_the_run(
    server: MisbehavingServer, opened: Open
) -> None:
    store = opened(server, attempts=2)
    store.fill(10)
    server.behave = Sometimes(error(500), lambda seen: seen.path.endswith(KEYS[4]))
    assert store.exists(list(range(10))) == 4
    server.behave = Sometimes(reset)
    with pytest.raises(BackendUnavailable):
        store.exists(list(range(10)))


# 403 for what is missing


def forbidding(server: MisbehavingServer, code: str = "AccessDenied") -> None:
    """403 instead of 404, as a store says to those who may not list the bucket."""

    def behave(seen: Seen) -> object:
        if seen.verb in ("GET", "HEAD") and seen.path.split("/", 2)[2] not in server.objects:
            return error(403, code, "Access Denied")
        return None

    server.behave = behave  # type: ignore[assignment]


def test_403_is_a_miss_and_is_warned_of_once(
    server: MisbehavingServer, opened: Open, caplog: pytest.LogCaptureFixture
) -> None:
    forbidding(server)
    store = opened(server)
    store.fill(3)
    for _ in range(3):
        assert store.get([0, 1, 5]) == [True, True, False]
        assert store.exists([0, 1, 2, 5, 6]) == 3
    warnings = [r.getMessage() for r in caplog.records if "s3:ListBucket" in r.getMessage()]
    assert len(warnings) == 1


def test_403_to_a_lookup_is_looked_into_once_in_a_while(
    server: MisbehavingServer, opened: Open
) -> None:
    forbidding(server)
    store = opened(server)
    store.fill(1)
    server.forget()
    for i in range(5, 10):
        assert store.exists([i]) == 0
    assert len(server.verbs("HEAD")) == 5
    assert len(server.verbs("GET")) <= 1


@pytest.mark.parametrize("code", ["InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken"])
def test_403_for_bad_credentials_is_no_miss(
    server: MisbehavingServer, opened: Open, code: str
) -> None:
    store = opened(server)
    store.fill(1)
    server.behave = Sometimes(error(403, code))
    for call in (lambda: store.exists([0]), lambda: store.get([0])):
        with pytest.raises(BackendUnavailable, match=code) as caught:
            call()
        assert not caught.value.retryable


# pages that are listed and can't be read


def test_a_page_of_the_wrong_length_is_found_once_at_most(
    server: MisbehavingServer, opened: Open
) -> None:
    store = opened(server)
    store.fill(3)
    name = next(name for name in server.objects if name.endswith(KEYS[1]))
    server.objects[name] = server.objects[name][:-1]
    found = []
    for _ in range(5):
        found.append(store.exists([0, 1, 2]))
        assert store.get([0, 1, 2]) == [True, False, True]
    assert found == [3, 1, 1, 1, 1]
    store.fill(3)
    assert store.exists([0, 1, 2]) == 3
    assert store.get([0, 1, 2]) == [True] * 3


def test_a_page_that_does_not_come_is_not_found_for_a_while(
    server: MisbehavingServer, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(server, deadline_s=0.5)
    store.fill(3)
    server.behave = Sometimes(stall(30), lambda s: s.verb == "GET" and s.path.endswith(KEYS[0]))
    with pytest.raises(BackendTimeout):
        store.get([0])
    assert store.exists([0, 1]) == 0
    server.forget()
    for _ in range(20):
        assert store.exists([0]) == 0
    assert server.seen == []
    server.behave = lambda seen: None
    assert store.get([0]) == [True]
    assert store.exists([0, 1]) == 2
    server.behave = Sometimes(wrong_length(-1), lambda seen: seen.verb == "GET")
    assert store.get([0]) == [False]
    assert store.exists([0]) == 0
    monkeypatch.setattr(doubts.time, "monotonic", lambda: 1e12)
    assert doubts.Doubts().run_before([KEYS[0]]) == 1
    assert store.backend._here.now().doubts.run_before(["x"]) == 1


def test_doubts_end_and_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(doubts.time, "monotonic", lambda: now[0])
    kept = doubts.Doubts()
    kept.add("a")
    assert kept.run_before(["b", "a"]) == 1
    now[0] += doubts.KEEP_S + 1
    assert kept.run_before(["b", "a"]) == 2
    for i in range(doubts.MOST_KEYS + 10):
        kept.add(str(i))
    assert kept.run_before(["0"]) == 1
    assert kept.run_before([str(doubts.MOST_KEYS)]) == 0


def test_throttled_reads_leave_no_doubt(server: MisbehavingServer, opened: Open) -> None:
    store = opened(server, attempts=2)
    store.fill(2)
    server.behave = Sometimes(error(503, "SlowDown"), lambda seen: seen.verb == "GET")
    assert store.get([0, 1]) == [False, False]
    assert store.exists([0, 1]) == 2


def test_a_rewritten_page_is_trusted_again(server: MisbehavingServer, opened: Open) -> None:
    store = opened(server)
    store.fill(1)
    name = next(name for name in server.objects if name.endswith(KEYS[0]))
    server.objects[name] = b"x" * (PAGE_BYTES + 63)
    assert store.get([0]) == [False]
    assert store.store.batch_set(NAMESPACE, [KEYS[0]], [page(0)]) == [True]
    assert store.exists([0]) == 1


@pytest.mark.servers
def test_a_busy_thread_of_the_process_is_waited_for_seldom(seaweedfs: Server) -> None:
    """An LLM server's scheduler polls in the same interpreter. Whoever gives its lock up waits for
    the switch interval here, so that a wait for every page would take PAGES intervals."""
    pages, interval_s = 16, 0.05
    numbers = list(range(pages))
    with open_store(seaweedfs.store_url()) as store:
        opened = Opened(store)
        opened.fill(pages)
        took: dict[str, float] = {}
        ended: list[bool] = []

        def work() -> None:
            try:
                measure()
            finally:
                ended.append(True)

        def measure() -> None:
            calls = {"lookup": lambda: opened.exists(numbers), "read": lambda: opened.get(numbers)}
            for name, call in calls.items():
                for _ in range(3):
                    started = time.perf_counter()
                    assert call() in (pages, [True] * pages)
                    seconds = time.perf_counter() - started
                    took[name] = min(seconds, took.get(name, seconds))

        before = sys.getswitchinterval()
        sys.setswitchinterval(interval_s)
        try:
            worker = threading.Thread(target=work)
            worker.start()
            while not ended:
                pass
        finally:
            sys.setswitchinterval(before)
        worker.join()
    assert took
    assert all(seconds < pages * interval_s / 2 for seconds in took.values()), took
