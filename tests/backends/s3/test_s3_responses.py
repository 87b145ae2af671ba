"""Whatever a server answers: a hit is the right page, and no foreign error comes out."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from backends.s3.misbehaving_server import (
    MisbehavingServer,
    Misbehaviour,
    Seen,
    Sometimes,
    answer_and_hang_up,
    continue_first,
    error,
    garbage,
    half_body,
    hang_up,
    in_pieces,
    refuse_early,
    reset,
    stray_bytes,
    success_with_error,
    until_close,
    wrong_length,
)
from backends.s3.rig import KEYS, NAMESPACE, PAGE_BYTES, Opened, page

from hicache_storage import BackendError, BackendUnavailable

Open = Callable[..., Opened]


def a_page(number: int, verb: str = "GET") -> Callable[[Seen], bool]:
    """Picks requests for one page."""
    return lambda seen: seen.verb == verb and seen.path.endswith(KEYS[number])


SAME_PAGE: dict[str, Misbehaviour] = {
    "in pieces": in_pieces(),
    "in one piece": in_pieces((10**6,)),
    "in pieces of one byte": in_pieces((1,)),
    "until the connection closes": until_close(),
    "after interim answers": continue_first,
    "and closes a connection it promised to keep": answer_and_hang_up,
    "and stray bytes follow": stray_bytes,
}


@pytest.mark.parametrize("misbehave", SAME_PAGE.values(), ids=SAME_PAGE)
def test_a_page_arrives_however_http_carries_it(
    server: MisbehavingServer, opened: Open, misbehave: Misbehaviour
) -> None:
    store = opened(server)
    store.fill(8)
    server.behave = Sometimes(misbehave, lambda seen: seen.verb == "GET")
    for _ in range(2):
        assert store.get(list(range(8))) == [True] * 8
        assert store.get([3]) == [True]


MISSES: dict[str, Misbehaviour] = {
    "a byte short": wrong_length(-1),
    "a byte long": wrong_length(1),
    "empty": wrong_length(-64 - PAGE_BYTES),
    "far too long": wrong_length(500_000),
    "short in pieces": in_pieces(change=-1),
    "long in pieces": in_pieces(change=1),
    "short until the end": until_close(-1),
    "long until the end": until_close(1),
    "of other bytes": wrong_length(0),
    "the page and a byte more": lambda talk, seen: talk.respond(
        200, talk.server.objects[seen.path.split("/", 2)[2]] + b"x"
    ),
    "no such key": error(404, "NoSuchKey"),
    "404 without a reason": error(404),
    "404 in HTML": error(404, "", "<html>"),
    "forbidden": error(403, "AccessDenied"),
    "not a page but an error": success_with_error("NoSuchKey"),
    "compressed": lambda talk, seen: talk.respond(
        200, b"x" * (PAGE_BYTES + 64), "Content-Encoding: gzip\r\n"
    ),
    "partial": lambda talk, seen: talk.respond(206, b"x" * (PAGE_BYTES + 64)),
}
FAILURES: dict[str, Misbehaviour] = {
    "hangs up": hang_up,
    "resets": reset,
    "half a body": half_body(by_reset=False),
    "half a body and a reset": half_body(by_reset=True),
    "no HTTP": garbage,
    "internal error": error(500, "InternalError"),
    "bad gateway": error(502),
    "success with an error": success_with_error("InternalError"),
    "bad length": lambda talk, seen: talk.send(b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n"),
    "two lengths": lambda talk, seen: talk.send(
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nx"
    ),
    "endless head": lambda talk, seen: talk.send(b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 30_000),
    "endless line": lambda talk, seen: talk.send(b"HTTP/1.1 200 OK\r\nA: " + b"b" * 200_000),
    "unknown coding": lambda talk, seen: talk.respond(
        200, b"x", "Transfer-Encoding: gzip, chunked\r\n"
    ),
    "bad piece": lambda talk, seen: talk.send(
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nxx\r\n"
    ),
    "status 999": error(999),
}


BAD = MISSES | FAILURES


@pytest.mark.parametrize("misbehave", BAD.values(), ids=BAD)
def test_a_bad_answer_is_a_miss_of_that_page_alone(
    server: MisbehavingServer, opened: Open, misbehave: Misbehaviour
) -> None:
    store = opened(server, attempts=2)
    store.fill(6)
    server.behave = Sometimes(misbehave, a_page(2))
    assert store.get([0, 1, 2, 3, 4, 5]) == [True, True, False, True, True, True]
    server.behave = lambda seen: None
    assert store.get([0, 1, 3, 4, 5]) == [True] * 5


@pytest.mark.parametrize("misbehave", MISSES.values(), ids=MISSES)
def test_a_miss_is_no_error_even_alone(
    server: MisbehavingServer, opened: Open, misbehave: Misbehaviour
) -> None:
    store = opened(server)
    store.fill(1)
    server.behave = Sometimes(misbehave, lambda seen: seen.verb == "GET")
    assert store.get([0]) == [False]


@pytest.mark.parametrize("misbehave", FAILURES.values(), ids=FAILURES)
def test_a_store_that_answers_nothing_right_is_unavailable(
    server: MisbehavingServer, opened: Open, misbehave: Misbehaviour
) -> None:
    store = opened(server, attempts=2)
    store.fill(3)
    server.behave = Sometimes(misbehave)
    with pytest.raises(BackendUnavailable) as caught:
        store.get([0, 1, 2])
    assert caught.value.retryable
    with pytest.raises(BackendError):
        store.store.batch_set(NAMESPACE, KEYS[:2], [page(0), page(1)])


@pytest.mark.parametrize("misbehave", FAILURES.values(), ids=FAILURES)
def test_a_failure_that_passes_costs_no_page(
    server: MisbehavingServer, opened: Open, misbehave: Misbehaviour
) -> None:
    store = opened(server)
    server.behave = Sometimes(misbehave, a_page(2, "PUT"), times=1)
    store.fill(6)
    server.behave = Sometimes(misbehave, a_page(3), times=1)
    assert store.get(list(range(6))) == [True] * 6
    assert store.backend.counts.retries >= 2


def test_a_write_that_the_store_calls_good_with_an_error_inside_is_not_stored(
    server: MisbehavingServer, opened: Open
) -> None:
    store = opened(server, attempts=2)
    store.fill(1)  # also the namespace's record
    server.behave = Sometimes(success_with_error("InternalError"), a_page(2, "PUT"))
    stored = store.store.batch_set(NAMESPACE, KEYS[1:4], [page(1), page(2), page(3)])
    assert stored == [True, False, True]


def test_an_answer_before_the_body_was_read_is_understood(
    server: MisbehavingServer, opened: Open
) -> None:
    store = opened(server)
    store.fill(1)
    server.behave = Sometimes(refuse_early, lambda seen: seen.verb == "PUT", times=2)
    store.fill(4)
    assert store.backend.counts.throttles + store.backend.counts.retries >= 2


FULL = [(507, ""), (403, "QuotaExceeded"), (400, "EntityTooLarge"), (413, "")]


@pytest.mark.parametrize(("status", "code"), FULL)
def test_a_full_store_refuses_pages_and_raises_nothing(
    server: MisbehavingServer, opened: Open, status: int, code: str
) -> None:
    store = opened(server)
    store.fill(1)
    server.behave = Sometimes(error(status, code), lambda seen: seen.verb == "PUT")
    assert store.store.batch_set(NAMESPACE, KEYS[:2], [page(0), page(1)]) == [False, False]
