"""A small S3 server in threads that does on demand what real ones do on a bad day.

It keeps objects in memory and answers GET, PUT, HEAD, DELETE, listings and bulk deletes. `behave`
is asked before each request is answered: it returns None for the usual answer, or one of the
misbehaviours below.
"""

from __future__ import annotations

import contextlib
import html
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, unquote, urlsplit

BUCKET = "bucket"


@dataclass
class Seen:
    """A request as it arrived."""

    verb: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    connection: int
    body: bytes = b""
    number: int = 0
    """How many requests came before it."""
    time_s: float = 0.0


Misbehaviour = Callable[["Talk", Seen], None]


class Talk:
    """One connection, for misbehaviours to use. Raise Hangup to end it."""

    def __init__(self, server: MisbehavingServer, sock: socket.socket) -> None:
        self.server = server
        self.socket = sock
        self.stream = sock.makefile("rb")

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def respond(
        self, status: int, body: bytes = b"", headers: str = "", *, length: int | None = None
    ) -> None:
        size = len(body) if length is None else length
        self.send(f"HTTP/1.1 {status} X\r\nContent-Length: {size}\r\n{headers}\r\n".encode() + body)

    def reset(self) -> None:
        """Closes with RST, as a dying peer does."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        raise Hangup


class Hangup(Exception):
    """Ends the connection."""


class MisbehavingServer:
    """Listens on loopback until `stop`. `delay_s` is slept before every answer."""

    def __init__(
        self,
        behave: Callable[[Seen], Misbehaviour | None] | None = None,
        *,
        delay_s: float = 0.0,
        context: ssl.SSLContext | None = None,
        most_at_once: int | None = None,
    ) -> None:
        self.behave = behave or (lambda seen: None)
        self.delay_s = delay_s
        self.never_continues = False
        """Reads the body without asking for it."""
        self.objects: dict[str, bytes] = {}
        self.seen: list[Seen] = []
        self.connects = 0
        self.at_once = self.most_at_once = 0
        """Requests being answered now, and the most there were."""
        self._places = threading.Semaphore(most_at_once) if most_at_once else None
        self._context = context
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.port = self._listener.getsockname()[1]
        self._stopped = threading.Event()
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    @property
    def url(self) -> str:
        return f"{'https' if self._context else 'http'}://127.0.0.1:{self.port}"

    def verbs(self, verb: str) -> list[Seen]:
        return [seen for seen in self.seen if seen.verb == verb]

    def forget(self) -> None:
        """Forgets the requests and connections seen so far."""
        with self._lock:
            self.seen.clear()
            self.connects = 0
            self.most_at_once = 0

    def stop(self) -> None:
        self._stopped.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.hang_up()
        for thread in self._threads:
            thread.join(10)

    def sleep(self, seconds: float) -> None:
        """Sleeps, unless the server stops."""
        self._stopped.wait(seconds)

    def hang_up(self) -> None:
        """Closes every connection."""
        with self._lock:
            sockets = list(self._open)
        for sock in sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> MisbehavingServer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                self.connects += 1
                number = self.connects
                self._open.add(sock)
                thread = threading.Thread(target=self._serve, args=(sock, number), daemon=True)
                self._threads.append(thread)
            thread.start()

    def _serve(self, raw: socket.socket, number: int) -> None:
        sock = raw
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._context is not None:
                sock = self._context.wrap_socket(raw, server_side=True)
                with self._lock:
                    self._open.add(sock)
            talk = Talk(self, sock)
            while not self._stopped.is_set() and self._one(talk, number):
                pass
            talk.stream.close()
        except (Hangup, OSError, ValueError):
            pass
        finally:
            with self._lock:
                self._open.discard(raw)
                self._open.discard(sock)
            with contextlib.suppress(UnboundLocalError):
                talk.stream.close()
            sock.close()

    def _one(self, talk: Talk, number: int) -> bool:
        line = talk.stream.readline().decode().split()
        if len(line) != 3:
            return False
        parts = urlsplit(line[1])
        headers = {}
        while (header := talk.stream.readline().strip()) != b"":
            name, _, value = header.decode().partition(":")
            headers[name.lower()] = value.strip()
        seen = Seen(
            line[0],
            unquote(parts.path),
            dict(parse_qsl(parts.query, keep_blank_values=True)),
            headers,
            number,
            time_s=time.monotonic(),
        )
        with self._lock:
            seen.number = len(self.seen)
            self.seen.append(seen)
        misbehave = self.behave(seen)
        if misbehave is not None and getattr(misbehave, "before_body", False):
            misbehave(talk, seen)
            return True
        if headers.get("expect") == "100-continue" and self._refuses(talk, seen, misbehave):
            return True
        if headers.get("expect") == "100-continue" and not self.never_continues:
            talk.send(b"HTTP/1.1 100 Continue\r\n\r\n")
        seen.body = self._body(talk, headers)
        self._answer(talk, seen, misbehave)
        return headers.get("connection") != "close"

    def _refuses(self, talk: Talk, seen: Seen, misbehave: Misbehaviour | None) -> bool:
        """Answers 412 before the body is sent, as a server may that was asked to wait."""
        there = seen.path.split("/", 2)[2] in self.objects
        if misbehave is not None or not there or "if-none-match" not in seen.headers:
            return False
        error(412, "PreconditionFailed")(talk, seen)
        return True

    def _body(self, talk: Talk, headers: dict[str, str]) -> bytes:
        return talk.stream.read(int(headers.get("content-length", 0)))

    def _answer(self, talk: Talk, seen: Seen, misbehave: Misbehaviour | None) -> None:
        if self._places is not None:
            self._places.acquire()
        with self._lock:
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            if self.delay_s:
                time.sleep(self.delay_s)
            if misbehave is not None:
                misbehave(talk, seen)
            else:
                self.usual(talk, seen)
        finally:
            with self._lock:
                self.at_once -= 1
            if self._places is not None:
                self._places.release()

    # the usual answers

    def usual(self, talk: Talk, seen: Seen) -> None:
        hosted = seen.headers.get("host", "").startswith(f"{BUCKET}.")
        path = f"/{BUCKET}{seen.path}" if hosted else seen.path
        _, bucket, name = [*path.split("/", 2), "", ""][:3]
        if bucket != BUCKET:
            error(404, "NoSuchBucket")(talk, seen)
        elif seen.verb == "GET" and "list-type" in seen.query:
            self._list(talk, seen)
        elif seen.verb == "POST" and "delete" in seen.query:
            self._bulk_delete(talk, seen)
        elif seen.verb == "PUT":
            self._put(talk, seen, name)
        elif seen.verb == "DELETE":
            self.objects.pop(name, None)
            talk.send(b"HTTP/1.1 204 No Content\r\n\r\n")
        elif name not in self.objects:
            error(404, "NoSuchKey")(talk, seen)
        else:
            self._get(talk, seen, self.objects[name])

    def _put(self, talk: Talk, seen: Seen, name: str) -> None:
        if seen.headers.get("if-none-match") == "*" and name in self.objects:
            error(412, "PreconditionFailed")(talk, seen)
            return
        self.objects[name] = seen.body
        talk.respond(200, headers='ETag: "x"\r\n')

    def _get(self, talk: Talk, seen: Seen, body: bytes) -> None:
        if seen.verb == "HEAD":
            talk.respond(200, length=len(body))
        elif "range" in seen.headers:
            first, last = map(int, seen.headers["range"].removeprefix("bytes=").split("-"))
            part = body[first : last + 1]
            if not part:
                error(416, "InvalidRange")(talk, seen)
                return
            place = f"Content-Range: bytes {first}-{first + len(part) - 1}/{len(body)}\r\n"
            talk.respond(206, part, place)
        else:
            talk.respond(200, body)

    def _list(self, talk: Talk, seen: Seen) -> None:
        start = seen.query.get("continuation-token", "")
        names = sorted(n for n in self.objects if n.startswith(seen.query.get("prefix", "")))
        names = [name for name in names if name > start]
        most = int(seen.query.get("max-keys", 1000))
        entries = "".join(
            f"<Contents><Key>{html.escape(name)}</Key><Size>{len(self.objects[name])}</Size>"
            "<LastModified>2026-01-02T03:04:05.000Z</LastModified></Contents>"
            for name in names[:most]
        )
        more = len(names) > most
        token = f"<NextContinuationToken>{names[most - 1]}</NextContinuationToken>" if more else ""
        xml = (
            '<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
            f"<IsTruncated>{str(more).lower()}</IsTruncated>{token}{entries}</ListBucketResult>"
        )
        talk.respond(200, xml.encode(), "Content-Type: application/xml\r\n")

    def _bulk_delete(self, talk: Talk, seen: Seen) -> None:
        for part in seen.body.decode().split("<Key>")[1:]:
            self.objects.pop(html.unescape(part.partition("</Key>")[0]), None)
        talk.respond(200, b"<DeleteResult></DeleteResult>")


@dataclass
class Sometimes:
    """Applies a misbehaviour to the requests that `when` picks, `times` times at most."""

    misbehave: Misbehaviour
    when: Callable[[Seen], bool] = lambda seen: True
    times: int | None = None
    done: int = field(default=0)

    def __call__(self, seen: Seen) -> Misbehaviour | None:
        if (self.times is not None and self.done >= self.times) or not self.when(seen):
            return None
        self.done += 1
        return self.misbehave


# misbehaviours


def error(status: int, code: str = "", message: str = "", headers: str = "") -> Misbehaviour:
    """An error answer, as XML if it has a code."""

    def misbehave(talk: Talk, seen: Seen) -> None:
        body = b""
        if code:
            body = (
                f'<?xml version="1.0"?>\n<Error><Code>{code}</Code>'
                f"<Message>{message}</Message></Error>"
            ).encode()
        if seen.verb == "HEAD":
            talk.respond(status, headers=headers, length=len(body))
        else:
            talk.respond(status, body, f"Content-Type: application/xml\r\n{headers}")

    return misbehave


def stall(seconds: float) -> Misbehaviour:
    """Says nothing for a while, then hangs up."""

    def misbehave(talk: Talk, seen: Seen) -> None:
        talk.server.sleep(seconds)
        raise Hangup

    return misbehave


def slowly(seconds: float) -> Misbehaviour:
    """The usual answer, later."""

    def misbehave(talk: Talk, seen: Seen) -> None:
        talk.server.sleep(seconds)
        talk.server.usual(talk, seen)

    return misbehave


def drip(count: int, pause_s: float) -> Misbehaviour:
    """The usual body, `count` bytes at a time with pauses."""

    def misbehave(talk: Talk, seen: Seen) -> None:
        body = talk.server.objects[seen.path.split("/", 2)[2]]
        talk.send(f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n".encode())
        for start in range(0, len(body), count):
            talk.send(body[start : start + count])
            time.sleep(pause_s)

    return misbehave


def hang_up(talk: Talk, seen: Seen) -> None:
    """Closes without an answer."""
    raise Hangup


def reset(talk: Talk, seen: Seen) -> None:
    """Resets the connection without an answer."""
    talk.reset()


def answer_and_hang_up(talk: Talk, seen: Seen) -> None:
    """The usual answer, promising to keep the connection and then closing it."""
    talk.server.usual(talk, seen)
    raise Hangup


def half_body(*, by_reset: bool) -> Misbehaviour:
    """Half of the body that the header announces, of wrong bytes."""

    def misbehave(talk: Talk, seen: Seen) -> None:
        size = len(talk.server.objects.get(seen.path.split("/", 2)[2], b"x" * 100))
        talk.respond(200, b"\xee" * (size // 2), length=size)
        if by_reset:
            time.sleep(0.02)
            talk.reset()
        raise Hangup

    return misbehave


def wrong_length(change: int) -> Misbehaviour:
    """A whole body, longer or shorter than the object is."""

    def misbehave(talk: Talk, seen: Seen) -> None:
        size = len(talk.server.objects.get(seen.path.split("/", 2)[2], b"")) + change
        talk.respond(200, b"\xee" * size)

    return misbehave


def success_with_error(code: str) -> Misbehaviour:
    """Status 200 and an error document."""

    def misbehave(talk: Talk, seen: Seen) -> None:
        talk.respond(200, f"<?xml?><Error><Code>{code}</Code></Error>".encode())

    return misbehave


def in_pieces(sizes: tuple[int, ...] = (1, 63, 1000), change: int = 0) -> Misbehaviour:
    """The body in chunked transfer coding, its pieces of these sizes in turn."""

    def misbehave(talk: Talk, seen: Seen) -> None:
        body = talk.server.objects[seen.path.split("/", 2)[2]]
        body = body + b"\xee" * change if change >= 0 else body[:change]
        talk.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        start = turn = 0
        while start < len(body):
            piece = body[start : start + sizes[turn % len(sizes)]]
            talk.send(b"%x;ext=1\r\n%b\r\n" % (len(piece), piece))
            start += len(piece)
            turn += 1
        talk.send(b"0\r\nx-trailer: 1\r\n\r\n")

    return misbehave


def until_close(change: int = 0) -> Misbehaviour:
    """A body without a length, which ends with the connection."""

    def misbehave(talk: Talk, seen: Seen) -> None:
        body = talk.server.objects[seen.path.split("/", 2)[2]]
        body = body + b"\xee" * change if change >= 0 else body[:change]
        talk.send(b"HTTP/1.1 200 OK\r\n\r\n" + body)
        raise Hangup

    return misbehave


def continue_first(talk: Talk, seen: Seen) -> None:
    """Two interim answers before the usual one."""
    talk.send(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n")
    talk.server.usual(talk, seen)


def garbage(talk: Talk, seen: Seen) -> None:
    """No HTTP at all."""
    talk.send(b"\x16\x03\x01 SSH-2.0-OpenSSH_9.2\r\n\r\n")
    raise Hangup


def stray_bytes(talk: Talk, seen: Seen) -> None:
    """The usual page, and bytes right after it that belong to nothing."""
    body = talk.server.objects[seen.path.split("/", 2)[2]]
    stray = b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nbad"
    talk.respond(200, body + stray, length=len(body))


def refuse_early(talk: Talk, seen: Seen) -> None:
    """503 before the body was read, then closes."""
    talk.respond(503, b"<Error><Code>SlowDown</Code></Error>", "Connection: close\r\n")
    time.sleep(0.05)
    raise Hangup


refuse_early.before_body = True  # type: ignore[attr-defined]
