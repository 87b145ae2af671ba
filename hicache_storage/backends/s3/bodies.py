"""The body of a response: a page into the caller's spans, anything else into a few kept bytes.

A page is received straight into its spans: only what came in together with the response's head
is copied.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...page import PageSpans, spans_bytes
from .connection import MOST_SPANS, READ, Connection
from .messages import (
    MOST_BODY_BYTES,
    MOST_HEAD_BYTES,
    BrokenExchange,
    Request,
    Response,
    Steps,
)


def receive_body(connection: Connection, request: Request, response: Response) -> Steps[None]:
    """Receives the body that follows the head; sets `filled`, `body` and `length` of the response.

    Raises OSError and BrokenExchange. The spans of a page that isn't `filled` are undefined.
    """
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
