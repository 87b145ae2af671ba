"""One HTTP/1.1 request and its response on a connection.

Written as generators that yield what they wait for, so that one thread can drive many of them.
A page is received straight into the caller's spans: only what came in together with the
response's head is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ...page import PageSpans, spans_bytes
from .connection import MOST_SPANS, READ, WRITE, Connection

T = TypeVar("T")
Steps = Generator[int, int, T]
"""Yields what to wait for, is sent what has come, and returns a T."""

MOST_HEAD_BYTES = 1 << 16
MOST_BODY_BYTES = 1 << 16
"""Longest body that is kept when it isn't a page: error documents."""


class BrokenExchange(Exception):
    """The response broke off, or isn't HTTP."""


@dataclass
class Request:
    """What to ask for one page."""

    verb: str
    path: str
    """Quoted, with the slash in front."""
    body: PageSpans = ()
    into: PageSpans | None = None
    """Where the body of a 200 goes, if it has exactly this length."""
    extra: tuple[tuple[str, str], ...] = ()
    """More (lower-case name, value) header pairs, all signed."""
    expect_continue: bool = False
    """Wait for the server's leave before the body is sent."""


@dataclass
class Response:
    """What came back."""

    status: int
    head: bytes
    """Status line and header lines, names in lower case."""
    body: bytes = b""
    """The first part of a body that isn't a page."""
    length: int | None = None
    """Length of the body as the header gives it; None if it doesn't."""
    filled: bool = False
    """The request's `into` holds the whole body."""
    reusable: bool = True
    """The connection can take another request."""

    def header(self, name: str) -> str:
        """A header's value; "" if it isn't there."""
        start = self.head.find(b"\r\n%b:" % name.encode())
        if start < 0:
            return ""
        start += len(name) + 3
        end = self.head.find(b"\r\n", start)
        return self.head[start : end if end >= 0 else None].strip().decode("latin-1")


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
    yield from _receive_body(connection, request, response)
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


def _receive_body(connection: Connection, request: Request, response: Response) -> Steps[None]:
    wanted = request.into if response.status == 200 else None
    if response.header("content-encoding") not in ("", "identity", "aws-chunked"):
        wanted = None
    if response.header("transfer-encoding"):
        yield from _receive_pieces(connection, wanted, response)
    elif response.length is None:
        yield from _receive_to_end(connection, wanted, response)
    elif wanted is not None and response.length == spans_bytes(wanted):
        yield from _fill(connection, wanted)
        response.filled = True
    else:
        kept = bytearray(min(response.length, MOST_BODY_BYTES))
        yield from _fill(connection, (memoryview(kept),))
        response.body = bytes(kept)
        if len(kept) < response.length:
            response.reusable = False
    if connection.inbox_bytes:
        response.reusable = False


def _fill(connection: Connection, spans: Sequence[memoryview]) -> Steps[None]:
    """Fills `spans` with the next bytes: first those in the inbox, then from the socket."""
    left = [span for span in spans if len(span)]
    at = used = 0
    while at < len(left) and used < connection.inbox_bytes:
        span = left[at]
        count = min(len(span), connection.inbox_bytes - used)
        span[:count] = connection.inbox_view[used : used + count]
        used += count
        if count < len(span):
            left[at] = span[count:]
        else:
            at += 1
    if used:
        connection.take(used)
    while at < len(left):
        received = connection.read(left[at : at + MOST_SPANS])
        if received is None:
            yield connection.wants
            continue
        if received == 0:
            raise BrokenExchange("the body broke off")
        while at < len(left) and received >= len(left[at]):
            received -= len(left[at])
            at += 1
        if received:
            left[at] = left[at][received:]
            yield READ


class _Sink:
    """Takes a body of unknown length: into the spans as far as they go, else its first part."""

    def __init__(self, spans: PageSpans | None) -> None:
        self._spans = None if spans is None else [span for span in spans if len(span)]
        self.most_bytes = MOST_BODY_BYTES if spans is None else spans_bytes(spans)
        self.total_bytes = 0
        self.kept = bytearray()

    def fits(self, count: int) -> bool:
        return self.total_bytes + count <= self.most_bytes

    def room(self, count: int) -> list[memoryview]:
        """Spans for the next `count` bytes, which must fit."""
        self.total_bytes += count
        if self._spans is None:
            self.kept = self.kept + bytes(count)
            return [memoryview(self.kept)[len(self.kept) - count :]]
        given = []
        while count:
            span = self._spans.pop(0)
            given.append(span[:count])
            if count < len(span):
                self._spans.insert(0, span[count:])
            count -= len(given[-1])
        return given

    def finish(self, response: Response, *, complete: bool) -> None:
        response.length = self.total_bytes if complete else None
        response.filled = (
            complete and self._spans is not None and self.total_bytes == self.most_bytes
        )
        response.body = bytes(self.kept)
        response.reusable &= complete


def _receive_pieces(
    connection: Connection, wanted: PageSpans | None, response: Response
) -> Steps[None]:
    """A body in chunked transfer coding."""
    if response.header("transfer-encoding") != "chunked" or response.length is not None:
        raise BrokenExchange("the answer's transfer coding is not understood")
    sink = _Sink(wanted)
    while True:
        line = yield from _receive_line(connection)
        try:
            size = int(line.partition(b";")[0], 16)
        except ValueError:
            raise BrokenExchange(f"bad size of a piece: {line[:40]!r}") from None
        if size == 0:
            break
        if size < 0 or not sink.fits(size):
            sink.finish(response, complete=False)
            return
        yield from _fill(connection, sink.room(size))
        if (yield from _receive_line(connection)):
            raise BrokenExchange("a piece is longer than its size says")
    while (yield from _receive_line(connection)):
        pass
    sink.finish(response, complete=True)


def _receive_to_end(
    connection: Connection, wanted: PageSpans | None, response: Response
) -> Steps[None]:
    """A body that ends with the connection; a page only if its length is the expected one."""
    response.reusable = False
    sink = _Sink(wanted)
    while True:
        if connection.inbox_bytes:
            if not sink.fits(connection.inbox_bytes):
                sink.finish(response, complete=False)
                return
            yield from _fill(connection, sink.room(connection.inbox_bytes))
        received = connection.receive()
        if received is None:
            yield connection.wants
        elif received == 0:
            break
    sink.finish(response, complete=True)


def _receive_line(connection: Connection) -> Steps[bytes]:
    while (end := connection.inbox.find(b"\r\n", 0, connection.inbox_bytes)) < 0:
        if connection.inbox_bytes > MOST_HEAD_BYTES:
            raise BrokenExchange("a line of the body's coding is too long")
        received = connection.receive()
        if received is None:
            yield connection.wants
        elif received == 0:
            raise BrokenExchange("the body broke off")
    line = bytes(connection.inbox_view[:end])
    connection.take(end + 2)
    return line
