"""What opening finds out, and what it says."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Callable
from typing import Any

import pytest
from backends.s3.misbehaving_server import (
    MisbehavingServer,
    Misbehaviour,
    Seen,
    Sometimes,
    error,
    hang_up,
    stall,
)
from backends.s3.rig import KEYS, NAMESPACE, Opened, page, url_of

from hicache_storage import BackendError, BackendUnavailable, ConfigError, StoreClosed, open_store

Open = Callable[..., Opened]

WRONG: dict[str, tuple[Misbehaviour, str]] = {
    "no such bucket": (error(404, "NoSuchBucket"), "bucket doesn't exist.*NoSuchBucket"),
    "unknown key": (error(403, "InvalidAccessKeyId"), "doesn't know the access key"),
    "wrong secret": (error(403, "SignatureDoesNotMatch"), "secret key is wrong"),
    "clock": (error(403, "RequestTimeTooSkewed"), "clock: it differs too much"),
    "clock, by how much": (
        error(403, "RequestTimeTooSkewed", headers="Date: Mon, 01 Jan 2024 00:00:00 GMT\r\n"),
        r"clock: it differs from the store's by \d{6,} s",
    ),
    "another region": (
        error(301, "PermanentRedirect", headers="x-amz-bucket-region: eu-far-1\r\n"),
        "region=eu-far-1",
    ),
    "another region, by 400": (
        lambda talk, seen: talk.respond(
            400,
            b"<Error><Code>AuthorizationHeaderMalformed</Code><Region>eu-far-2</Region></Error>",
        ),
        "region=eu-far-2",
    ),
    "another endpoint": (
        lambda talk, seen: talk.respond(
            307, b"<Error><Code>TemporaryRedirect</Code><Endpoint>far.example</Endpoint></Error>"
        ),
        "far.example",
    ),
    "a redirect to a login page": (
        error(302, headers="Location: https://login.example/\r\n"),
        "login.example.*set endpoint",
    ),
    "no rights at all": (error(401), "credentials"),
    "bad request": (error(400, "InvalidRequest", "because"), "InvalidRequest because"),
}


@pytest.mark.parametrize(("misbehave", "message"), WRONG.values(), ids=WRONG)
def test_wrong_options_are_told_apart_when_opening(
    server: MisbehavingServer, misbehave: Misbehaviour, message: str
) -> None:
    server.behave = Sometimes(misbehave)
    with pytest.raises(ConfigError, match=message) as caught:
        open_store(url_of(server))
    assert "s3cr3t" not in str(caught.value)
    assert "AKID" not in str(caught.value)


def test_an_unreachable_store_costs_little_and_may_be_tried_again() -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
    started = time.monotonic()
    with pytest.raises(BackendUnavailable, match=r"can't connect.*refused") as caught:
        open_store(f"s3://b/p?endpoint=http://127.0.0.1:{port}&access_key=a&secret_key=b")
    assert caught.value.retryable
    assert time.monotonic() - started < 5


def test_a_store_that_does_not_answer_a_connection_costs_the_connect_timeout() -> None:
    """A full accept queue drops connections as an unreachable host does."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        fillers = []
        for _ in range(4):
            filler = socket.socket()
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())
            fillers.append(filler)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        started = time.monotonic()
        with pytest.raises(BackendUnavailable, match=r"no connection within 0\.5 s") as caught:
            open_store(f"s3://b/p?endpoint={url}&access_key=a&secret_key=b&connect_timeout_s=0.5")
        assert caught.value.retryable
        assert time.monotonic() - started < 5
        for filler in fillers:
            filler.close()


def test_a_name_that_is_not_found_is_unavailable() -> None:
    with pytest.raises(BackendUnavailable, match="can't connect"):
        open_store("s3://b/p?endpoint=http://nowhere.invalid&access_key=a&secret_key=b")


@pytest.mark.parametrize("misbehave", [hang_up, stall(30), error(500), error(503, "SlowDown")])
def test_a_store_that_is_ill_when_opened_may_be_tried_again(
    server: MisbehavingServer, misbehave: Misbehaviour
) -> None:
    server.behave = Sometimes(misbehave)
    with pytest.raises(BackendError) as caught:
        open_store(url_of(server, deadline_s=1, attempts=2))
    assert caught.value.retryable


def test_a_store_that_dies_while_open_raises_and_comes_back(opened: Open) -> None:
    with MisbehavingServer() as server:
        store = opened(server)
        store.fill(5)
    started = time.monotonic()
    for _ in range(3):
        with pytest.raises(BackendUnavailable):
            store.get([0, 1, 2, 3, 4])
        with pytest.raises(BackendUnavailable):
            store.exists([0, 1])
    assert time.monotonic() - started < 20


def test_a_restarted_store_costs_no_page(server: MisbehavingServer, opened: Open) -> None:
    store = opened(server)
    store.fill(64)
    for _ in range(3):
        server.hang_up()
        assert store.get(list(range(64))) == [True] * 64


def test_connections_that_the_store_gave_up_cost_one_try_together(
    server: MisbehavingServer, opened: Open
) -> None:
    """A load balancer may drop kept connections without a sign until the next request."""
    store = opened(server)
    store.fill(64)
    old = max(seen.connection for seen in server.seen)
    server.forget()
    server.behave = Sometimes(hang_up, lambda seen: seen.connection <= old)
    server.connects = old
    assert store.get([0]) == [True]
    assert len(server.seen) == 2
    assert store.get(list(range(64))) == [True] * 64


@pytest.mark.parametrize(
    ("verbs", "match"), [(("PUT",), "don't allow PUT"), (("DELETE",), "don't allow DELETE")]
)
def test_a_forbidden_change_says_what_is_not_allowed(
    server: MisbehavingServer, opened: Open, verbs: tuple[str, ...], match: str
) -> None:
    store = opened(server)
    server.behave = Sometimes(error(403, "AccessDenied"), lambda seen: seen.verb in verbs)
    calls: dict[str, Callable[[], Any]] = {
        "PUT": lambda: store.store.batch_set(NAMESPACE, [KEYS[0]], [page(0)]),
        "DELETE": lambda: store.store.delete(NAMESPACE, [KEYS[0]]),
    }
    with pytest.raises(BackendUnavailable, match=match) as caught:
        calls[verbs[0]]()
    assert not caught.value.retryable


def test_opening_asks_one_question(server: MisbehavingServer, opened: Open) -> None:
    opened(server)
    assert [(seen.verb, seen.path) for seen in server.seen] == [("GET", "/bucket/kv/.probe")]


def test_closing_ends_a_call_under_way(server: MisbehavingServer, opened: Open) -> None:
    import threading

    store = opened(server, deadline_s=30, stall_timeout_s=30)
    store.fill(2)
    arrived = threading.Event()

    def behave(seen: Seen) -> Misbehaviour:
        arrived.set()
        return stall(30)

    server.behave = behave
    caught: list[Exception] = []

    def read() -> None:
        try:
            store.get([0, 1])
        except Exception as failure:
            caught.append(failure)

    thread = threading.Thread(target=read)
    thread.start()
    assert arrived.wait(10)
    store.store.close()
    thread.join(10)
    assert not thread.is_alive()
    assert isinstance(caught[0], (BackendUnavailable, StoreClosed))
    assert re.search("closed", str(caught[0]))


def test_nothing_is_left_after_closing(server: MisbehavingServer, opened: Open) -> None:
    import threading

    before = set(threading.enumerate()) - set(server._threads)
    store = opened(server)
    store.fill(40)
    store.get(list(range(40)))
    store.store.close()
    left = {t for t in threading.enumerate() if t.name.startswith("hicache")} - before
    assert left == set()
    assert not store.backend._here._live
