"""Writes: whole or not at all, and equal pages left alone where that is asked for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from backends.s3 import rig
from backends.s3.misbehaving_server import (
    MisbehavingServer,
    Sometimes,
    drip,
    error,
    half_body,
    hang_up,
    slowly,
)
from backends.s3.rig import KEYS, NAMESPACE, PAGE_BYTES, Opened, backend_of, page, split
from s3_servers import Server

from hicache_storage import BackendUnavailable, Namespace, open_store
from hicache_storage.backends.s3 import writing

Open = Callable[..., Opened]


def put(store: Opened, numbers: list[int], pages: list[Any] | None = None) -> list[bool]:
    pages = pages or [page(i) for i in numbers]
    return store.store.batch_set(NAMESPACE, [KEYS[i] for i in numbers], pages)


def test_a_page_of_many_spans_is_sent_as_one_object(
    server: MisbehavingServer, opened: Open
) -> None:
    store = opened(server)
    spans = [split(memoryview(page(i)), i) for i in range(9)]
    thousand = tuple(memoryview(page(9))[i : i + 2] for i in range(0, PAGE_BYTES, 2))
    assert put(store, list(range(10)), [*spans, thousand]) == [True] * 10
    assert store.get(list(range(10))) == [True] * 10


def test_the_last_of_equal_keys_in_a_batch_is_what_is_stored(
    server: MisbehavingServer, opened: Open
) -> None:
    store = opened(server)
    keys = [KEYS[0], KEYS[1], KEYS[0]]
    assert store.store.batch_set(NAMESPACE, keys, [page(7), page(1), page(0)]) == [True] * 3
    assert store.get([0, 1]) == [True, True]


def test_a_page_over_the_limit_of_one_write_is_refused(
    server: MisbehavingServer,
    opened: Open,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = opened(server)
    store.fill(1)
    server.forget()
    monkeypatch.setattr(writing, "MOST_PAGE_BYTES", PAGE_BYTES)
    assert put(store, [0, 1]) == [False, False]
    assert server.seen == []
    assert f"a page of {PAGE_BYTES + 64} bytes is over S3's {PAGE_BYTES}" in caplog.text


def test_an_equal_page_is_left_alone(server: MisbehavingServer, opened: Open) -> None:
    store = opened(server, conditional_writes=True)
    assert put(store, [0, 1, 2]) == [True] * 3
    sent = store.backend.counts.sent_bytes
    server.forget()
    assert put(store, [0, 1, 2, 3]) == [True] * 4
    assert [len(seen.body) for seen in server.verbs("PUT") if seen.path.endswith(KEYS[1])] == [0]
    assert store.backend.counts.sent_bytes == sent + PAGE_BYTES + 64
    assert store.get([0, 1, 2, 3]) == [True] * 4


def test_a_page_that_differs_is_replaced(server: MisbehavingServer, opened: Open) -> None:
    store = opened(server, conditional_writes=True)
    assert put(store, [0, 1, 2, 3]) == [True] * 4
    names = sorted(server.objects, key=lambda name: [name.endswith(key) for key in KEYS[:4]])
    damaged = bytearray(server.objects[names[-1]])
    damaged[50] ^= 1
    server.objects[names[-1]] = bytes(damaged)
    server.objects[names[-2]] = server.objects[names[-2]][:-1]
    server.objects[names[-3]] = b""
    assert put(store, [0, 1, 2, 3]) == [True] * 4
    assert store.get([0, 1, 2, 3]) == [True] * 4


@pytest.mark.parametrize(
    "answer", [error(501, "NotImplemented"), error(501), error(400, "NotImplemented")]
)
def test_a_store_without_conditional_writes_is_written_plainly(
    server: MisbehavingServer, opened: Open, caplog: pytest.LogCaptureFixture, answer: Any
) -> None:
    server.behave = Sometimes(answer, lambda seen: "if-none-match" in seen.headers)
    store = opened(server, conditional_writes=True)
    for _ in range(2):
        assert put(store, [0, 1, 2]) == [True] * 3
    assert caplog.text.count("written plainly") == 1
    assert store.get([0, 1, 2]) == [True] * 3


def test_a_store_that_ignores_the_condition_is_right_all_the_same(
    server: MisbehavingServer, opened: Open
) -> None:
    def ignoring(talk: Any, seen: Any) -> None:
        seen.headers.pop("if-none-match")
        talk.server.usual(talk, seen)

    server.behave = Sometimes(ignoring, lambda seen: "if-none-match" in seen.headers)
    store = opened(server, conditional_writes=True)
    for _ in range(2):
        assert put(store, [0, 1, 2]) == [True] * 3
    assert store.get([0, 1, 2]) == [True] * 3


def test_a_conditional_write_whose_answer_is_lost_is_stored(
    server: MisbehavingServer, opened: Open
) -> None:
    def lose(talk: Any, seen: Any) -> None:
        talk.server.objects[seen.path.split("/", 2)[2]] = seen.body
        hang_up(talk, seen)

    store = opened(server, conditional_writes=True)
    put(store, [9])
    server.behave = Sometimes(lose, lambda seen: seen.verb == "PUT", times=2)
    assert put(store, [0, 1, 2]) == [True] * 3
    assert store.get([0, 1, 2]) == [True] * 3


def test_a_server_that_never_asks_for_the_body_gets_it(
    server: MisbehavingServer, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not every server answers an Expect header; the body is then sent after a while."""
    from hicache_storage.backends.s3 import call

    monkeypatch.setattr(call, "LEAVE_S", 0.2)
    store = opened(server, conditional_writes=True)
    server.never_continues = True
    assert put(store, [0, 1]) == [True, True]
    assert store.get([0, 1]) == [True, True]


# a hedge


def test_a_slow_read_is_asked_for_again_and_the_first_answer_is_taken(
    server: MisbehavingServer, opened: Open
) -> None:
    store = opened(server, hedge_after_s=0.1)
    store.fill(10)
    server.behave = Sometimes(slowly(5), lambda seen: seen.verb == "GET", times=3)
    started = time.monotonic()
    assert store.get(list(range(10))) == [True] * 10
    assert time.monotonic() - started < 4
    assert store.backend.counts.hedges == 3


def test_the_loser_of_a_hedge_never_touches_the_page(
    server: MisbehavingServer, opened: Open
) -> None:
    """The first request answers with other bytes long after the second one has filled the page,
    while the call still waits for another page."""
    store = opened(server, hedge_after_s=0.1)
    store.fill(2)

    def late_and_wrong(talk: Any, seen: Any) -> None:
        talk.server.sleep(0.4)
        half_body(by_reset=False)(talk, seen)

    first = Sometimes(late_and_wrong, lambda seen: seen.path.endswith(KEYS[0]), times=1)
    other = Sometimes(drip(1000, 0.2), lambda seen: seen.path.endswith(KEYS[1]))
    server.behave = lambda seen: first(seen) or other(seen)
    assert store.get([0, 1]) == [True, True]
    assert store.backend.counts.hedges >= 1
    assert store.backend.counts.retries == 0


def test_a_hedge_and_its_read_may_both_fail(server: MisbehavingServer, opened: Open) -> None:
    store = opened(server, hedge_after_s=0.05, attempts=3)
    store.fill(4)

    def late_and_gone(talk: Any, seen: Any) -> None:
        time.sleep(0.2)
        hang_up(talk, seen)

    server.behave = Sometimes(late_and_gone, lambda seen: seen.verb == "GET", times=8)
    assert store.get([0, 1, 2, 3]) == [True] * 4
    server.behave = Sometimes(late_and_gone, lambda seen: seen.verb == "GET")
    with pytest.raises(BackendUnavailable):
        store.get([0, 1, 2, 3])
    assert store.backend._here.now().plane.gate.running == 0


def test_a_hedge_needs_a_place_of_its_own(server: MisbehavingServer, opened: Open) -> None:
    store = opened(server, hedge_after_s=0.05, concurrency=1)
    store.fill(2)
    server.behave = Sometimes(slowly(0.3), lambda seen: seen.verb == "GET", times=1)
    assert store.get([0, 1]) == [True, True]
    assert store.backend.counts.hedges == 0
    assert server.most_at_once == 1


# readers and writers at the same time


@pytest.mark.servers
@pytest.mark.parametrize("options", [{}, {"conditional_writes": True}])
def test_a_reader_sees_one_page_or_the_other_never_a_mixture(
    seaweedfs: Server, options: dict[str, Any]
) -> None:
    size = 1 << 20
    fields = {name: getattr(NAMESPACE, name) for name in Namespace.__dataclass_fields__}
    namespace = Namespace(**fields | {"page_bytes": size})
    kinds = [bytes(size), b"\xff" * size]
    with open_store(seaweedfs.store_url(**options)) as store:
        store.batch_set(namespace, [KEYS[0]], [kinds[0]])
        stop = threading.Event()
        seen: list[bytearray] = []

        def write() -> None:
            turn = 0
            while not stop.is_set():
                turn += 1
                store.batch_set(namespace, [KEYS[0]], [kinds[turn % 2]])

        def read() -> None:
            buffer = bytearray(size)
            while not stop.is_set():
                if store.batch_get(namespace, [KEYS[0]], [buffer]) == [True]:
                    seen.append(buffer[:1] if buffer in kinds else buffer[:100])

        with ThreadPoolExecutor(5) as pool:
            works = [pool.submit(work) for work in (write, read, read, read, read)]
            time.sleep(3)
            stop.set()
            for work in works:
                work.result(60)
        assert {bytes(one) for one in seen} <= {b"\0", b"\xff"}
        assert len(seen) > 10
        assert store.counts.corrupt_pages == 0


@pytest.mark.servers
def test_a_real_store_checks_what_we_sign(seaweedfs: Server) -> None:
    """Signatures of pages, of signed payloads, of checksums and of odd prefixes are accepted;
    one with another secret is not."""
    for options in (
        {},
        {"sign_payload": True},
        {"checksums": "when_supported"},
        {"sign_payload": True, "checksums": "when_supported", "conditional_writes": True},
    ):
        url = seaweedfs.store_url(**options).replace("/kv-", "/a%20b/%C3%BC=+~/kv-")
        with open_store(url) as store:
            keys = KEYS[:8]
            pages = [page(i) for i in range(8)]
            assert store.batch_set(NAMESPACE, keys, pages) == [True] * 8
            assert store.batch_set(NAMESPACE, keys, pages) == [True] * 8
            buffers = [bytearray(rig.PAGE_BYTES) for _ in keys]
            assert store.batch_get(NAMESPACE, keys, buffers) == [True] * 8
            assert [bytes(b) for b in buffers] == pages
            assert store.exists(NAMESPACE, [*keys, KEYS[99]]) == 8
            assert len(list(store.scan())) == 8
            assert store.delete(NAMESPACE, keys[:2]) == [True, True]
            store.clear()
            assert store.usage().pages == 0
            assert backend_of(store).failures.counts == {}
    from hicache_storage import ConfigError

    url = seaweedfs.store_url().replace("sk-test", "wrong").replace("create_bucket=true", "")
    with pytest.raises(ConfigError, match="secret key is wrong"):
        open_store(url.replace("?endpoint", "?region=us-east-1&endpoint").replace("&&", "&"))
