"""One HTTP/1.1 request and its response on a connection.

Written as generators that yield what they wait for, so that one thread can drive many of them.
"""

from __future__ import annotations

from collections.abc import Callable

from .bodies import receive_body
from .connection import MOST_SPANS, READ, WRITE, Connection
from .messages import MOST_HEAD_BYTES, BrokenExchange, Request, Response, Steps


def exchange(
    connection: Connection,
    request: Request,
    head: bytes,
    before_body: Callable[[], None],
) -> Steps[Response]:
    """Sends `head` and the request's body, and receives the response.

    `before_body` is called once the response's head is there and before anything is written
    to the request's spans. Raises OSError and BrokenExchange.
    """
    complete = yield from _send(connection, request, head)
    response = yield from _receive_head(connection)
    connection.answers += 1
    before_body()
    if not complete:
        response.reusable = False
    if request.verb == "HEAD" or response.status in (204, 304):
        return response
    yield from receive_body(connection, request, response)
    return response


def _send(connection: Connection, request: Request, head: bytes) -> Steps[bool]:
    """True if all was sent, False if the server answered before."""
    parts: list[memoryview | bytes] = [head, *request.body]
    if request.expect_continue:
        yield from _send_parts(connection, [head])
        if not (yield from _await_leave(connection)):
            return False
        parts = list(request.body)
    return (yield from _send_parts(connection, parts))


def _send_parts(connection: Connection, parts: list[memoryview | bytes]) -> Steps[bool]:
    at = 0
    while at < len(parts):
        try:
            sent = connection.write(parts[at : at + MOST_SPANS])
        except OSError:
            # A server that refuses a request may close before it has read all of it.
            if connection.receive():
                return False
            raise
        if sent is None:
            come = yield connection.wants | READ
            if come & ~WRITE:
                received = connection.receive()
                if received == 0:
                    raise BrokenExchange("the store closed the connection during the request")
                if received:
                    return False
            continue
        while at < len(parts) and sent >= len(parts[at]):
            sent -= len(parts[at])
            at += 1
        if sent:
            parts[at] = memoryview(parts[at])[sent:]
    return True


def _await_leave(connection: Connection) -> Steps[bool]:
    """True to send the body: the server asks for it, or says nothing for a second (the
    driver then resumes with 0)."""
    while b"\r\n\r\n" not in connection.inbox[: connection.inbox_bytes]:
        if not (yield READ):
            return True
        if connection.receive() == 0:
            raise BrokenExchange("the store closed the connection during the request")
    status, head_bytes = _status(connection)
    if status == 100:
        connection.take(head_bytes)
        return True
    return False


def _status(connection: Connection) -> tuple[int, int]:
    """Status and length of the head at the start of the inbox."""
    inbox = connection.inbox
    if not inbox.startswith((b"HTTP/1.1 ", b"HTTP/1.0 ")) or not inbox[9:12].isdigit():
        raise BrokenExchange(f"the answer is not HTTP/1.1: {bytes(inbox[:40])!r}")
    return int(inbox[9:12]), inbox.find(b"\r\n\r\n", 0, connection.inbox_bytes) + 4


def _receive_head(connection: Connection) -> Steps[Response]:
    if not connection.inbox_bytes:
        yield READ  # to look before would be a call of the system for nothing
    while True:
        while connection.inbox.find(b"\r\n\r\n", 0, connection.inbox_bytes) < 0:
            if connection.inbox_bytes > MOST_HEAD_BYTES:
                raise BrokenExchange(f"the answer's head is over {MOST_HEAD_BYTES} bytes")
            received = connection.receive()
            if received is None:
                yield connection.wants
            elif received == 0:
                raise BrokenExchange("the store closed the connection without an answer")
        status, head_bytes = _status(connection)
        head = bytes(connection.inbox_view[: head_bytes - 4]).lower()
        connection.take(head_bytes)
        if not 100 <= status < 200:
            break
    response = Response(status, head)
    response.reusable = head.startswith(b"http/1.1") and b"\r\nconnection: close" not in head
    lengths = head.count(b"\r\ncontent-length:")
    if lengths:
        given = response.header("content-length")
        if lengths > 1 or not given.isdigit():
            raise BrokenExchange("the answer has no single valid content-length")
        response.length = int(given)
    return response
