"""One connection to the store: a socket that never blocks, plain or TLS.

Every read and write returns None where it would have to wait; `wants` then says for what.
"""

from __future__ import annotations

import contextlib
import ctypes
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

_libc = ctypes.PyDLL(None, use_errno=True)
"""Its calls keep the interpreter lock. Python's own give it up, and beside a busy thread it takes
longer to get it back than to send or to receive a head."""
_libc.send.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int)
_libc.recv.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.send.restype = _libc.recv.restype = ctypes.c_ssize_t
_AT_ONCE = socket.MSG_DONTWAIT | getattr(socket, "MSG_NOSIGNAL", 0)
_NOT_NOW = (errno.EAGAIN, errno.EWOULDBLOCK, errno.EINTR)


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
        self.inbox_bytes = 0
        self._lay_inbox(bytearray(HEAD_BYTES))
        self._socket = socket.socket(address.family, socket.SOCK_STREAM)
        self._socket.setblocking(False)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

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
        head = parts[0]
        try:
            if len(parts) == 1 and type(head) is bytes:
                return _done(_libc.send(self.fileno(), head, len(head), _AT_ONCE))
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
            self._lay_inbox(larger)
        received = self._receive()
        self.inbox_bytes += received or 0
        return received

    def _receive(self) -> int | None:
        try:
            room = len(self.inbox) - self.inbox_bytes
            place = self._inbox_place + self.inbox_bytes
            return _done(_libc.recv(self.fileno(), place, room, _AT_ONCE))
        except (BlockingIOError, InterruptedError):
            self.wants = READ
            return None

    def _lay_inbox(self, inbox: bytearray) -> None:
        self.inbox, self.inbox_view = inbox, memoryview(inbox)
        # The view keeps it from being laid elsewhere.
        self._inbox_place = ctypes.addressof(ctypes.c_char.from_buffer(inbox))

    def take(self, count: int) -> None:
        """Drops the first `count` bytes of the inbox."""
        rest = self.inbox_bytes - count
        self.inbox[:rest] = self.inbox[count : self.inbox_bytes]
        self.inbox_bytes = rest

    def is_quiet(self) -> bool:
        """Whether nothing has come in: neither the end of the stream nor stray bytes."""
        if self.inbox_bytes:
            return False
        flags = _AT_ONCE | socket.MSG_PEEK
        return (
            _libc.recv(self.fileno(), self._inbox_place, 1, flags) < 0
            and ctypes.get_errno() in _NOT_NOW
        )

    def close(self) -> None:
        """Closes the socket, also while a response is under way."""
        self._socket.close()

    def interrupt(self) -> None:
        """Ends the stream, so that whoever waits for it wakes. From any thread."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)


def _done(count: int) -> int:
    """What a call of the system gave; raises its OSError."""
    if count < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return count


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

    def _receive(self) -> int | None:
        return self.read((self.inbox_view[self.inbox_bytes :],))

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
