"""One connection to the store: a socket that never blocks, plain or TLS.

Every read and write returns None where it would have to wait; `wants` then says for what.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import ssl
from collections.abc import Generator, Sequence
from typing import Any, NamedTuple

READ, WRITE = select.POLLIN, select.POLLOUT
HEAD_BYTES = 4096
MOST_SPANS = 256
"""Spans given to one system call."""

Waits = Generator[int, int, None]
"""Yields what to wait for (READ, WRITE or both) and is sent what has come."""


class Address(NamedTuple):
    """Where to connect: what getaddrinfo found."""

    family: int
    target: tuple[Any, ...]


class Connection:
    """A plain TCP connection. Belongs to one thread at a time.

    `inbox[:inbox_bytes]` are received bytes that nobody has taken yet.
    """

    def __init__(self, address: Address) -> None:
        self.address = address
        self.wants = WRITE
        self.answers = 0
        """Responses received; above 0 for a connection that was used before."""
        self.inbox = bytearray(HEAD_BYTES)
        self.inbox_view = memoryview(self.inbox)
        self.inbox_bytes = 0
        self._socket = socket.socket(address.family, socket.SOCK_STREAM)
        self._socket.setblocking(False)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._idle = select.poll()
        self._idle.register(self._socket, READ)

    def fileno(self) -> int:
        return self._socket.fileno()

    def connect(self) -> Waits:
        """Connects. Raises OSError."""
        result = self._socket.connect_ex(self.address.target)
        if result == errno.EINPROGRESS:
            yield WRITE
            result = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if result:
            raise OSError(result, os.strerror(result))

    def write(self, parts: Sequence[memoryview | bytes]) -> int | None:
        """Sends from the start of `parts` what goes without waiting; the number of bytes."""
        try:
            return self._socket.sendmsg(parts)
        except (BlockingIOError, InterruptedError):
            self.wants = WRITE
            return None

    def read(self, spans: Sequence[memoryview]) -> int | None:
        """Receives into `spans`, in order, what is there; the number of bytes, 0 at the end."""
        try:
            if len(spans) == 1:
                return self._socket.recv_into(spans[0])
            return self._socket.recvmsg_into(spans)[0]
        except (BlockingIOError, InterruptedError):
            self.wants = READ
            return None

    def receive(self) -> int | None:
        """Receives into the inbox; the number of bytes, 0 at the end of the stream."""
        if self.inbox_bytes == len(self.inbox):
            larger = bytearray(2 * len(self.inbox))
            larger[: self.inbox_bytes] = self.inbox
            self.inbox, self.inbox_view = larger, memoryview(larger)
        received = self.read((self.inbox_view[self.inbox_bytes :],))
        self.inbox_bytes += received or 0
        return received

    def take(self, count: int) -> None:
        """Drops the first `count` bytes of the inbox."""
        rest = self.inbox_bytes - count
        self.inbox[:rest] = self.inbox[count : self.inbox_bytes]
        self.inbox_bytes = rest

    def is_quiet(self) -> bool:
        """Whether nothing has come in: neither the end of the stream nor stray bytes."""
        return self.inbox_bytes == 0 and not self._idle.poll(0)

    def close(self) -> None:
        """Closes the socket, also while a response is under way."""
        self._socket.close()

    def interrupt(self) -> None:
        """Ends the stream, so that whoever waits for it wakes. From any thread."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)


class TlsConnection(Connection):
    """A TLS connection, verified as `context` says."""

    def __init__(self, address: Address, context: ssl.SSLContext, host: str) -> None:
        super().__init__(address)
        self._context = context
        self._host = host
        self._tls: ssl.SSLSocket

    def connect(self) -> Waits:
        """Connects and shakes hands. Raises OSError, of which ssl.SSLError is one."""
        yield from super().connect()
        self._tls = self._context.wrap_socket(
            self._socket, server_hostname=self._host, do_handshake_on_connect=False
        )
        self._socket = self._tls
        while (wants := self._shake_hands()) is not None:
            yield wants

    def _shake_hands(self) -> int | None:
        """A step of the handshake: what it waits for, None once it is through."""
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return READ
        except ssl.SSLWantWriteError:
            return WRITE
        return None

    def write(self, parts: Sequence[memoryview | bytes]) -> int | None:
        first: memoryview | bytes | bytearray = parts[0]
        if len(first) < HEAD_BYTES and len(parts) > 1:
            # A record of its own for a few bytes costs more than joining them with the next.
            joined = bytearray()
            for part in parts:
                joined += part[: 4 * HEAD_BYTES - len(joined)]
                if len(joined) == 4 * HEAD_BYTES:
                    break
            first = joined
        try:
            return self._tls.send(first)
        except ssl.SSLWantWriteError:
            self.wants = WRITE
        except ssl.SSLWantReadError:
            self.wants = READ
        return None

    def read(self, spans: Sequence[memoryview]) -> int | None:
        total = 0
        try:
            for span in spans:
                got = 0
                while got < len(span):
                    count = self._tls.recv_into(span[got:] if got else span)
                    if count == 0:
                        return total
                    got += count
                    total += count
            return total
        except ssl.SSLWantReadError:
            self.wants = READ
        except ssl.SSLWantWriteError:
            self.wants = WRITE
        return total or None
