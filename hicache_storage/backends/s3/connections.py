"""Persistent connections to one store, shared by all calls of a process."""

from __future__ import annotations

import ssl
import threading

from .connection import Connection, TlsConnection
from .endpoint import Endpoint
from .resolver import Resolver


class Connections:
    """Idle connections, the last used first. Thread-safe.

    The gate bounds how many are in use, and so how many there are.
    """

    def __init__(self, endpoint: Endpoint, tls: ssl.SSLContext | None) -> None:
        self._endpoint = endpoint
        self._tls = tls
        self._resolver = Resolver(endpoint.host, endpoint.port)
        self._idle: list[Connection] = []
        self._all: set[Connection] = set()
        self._closed = False
        self._lock = threading.Lock()

    def take(self) -> Connection | None:
        """An idle connection on which nothing has come in; None if there is none, or no more."""
        while True:
            with self._lock:
                if self._closed or not self._idle:
                    return None
                connection = self._idle.pop()
            if connection.is_quiet():
                return connection
            self.drop(connection)

    def new(self, until_s: float) -> Connection:
        """A connection that is yet to connect; raises OSError."""
        address = self._resolver.next_address(until_s)
        connection = (
            Connection(address)
            if self._tls is None
            else TlsConnection(address, self._tls, self._endpoint.host)
        )
        with self._lock:
            closed = self._closed
            self._all.add(connection)
        if closed:
            self.drop(connection)
            raise OSError("the store is closed")
        return connection

    def give(self, connection: Connection) -> None:
        """Keeps a connection for the next request."""
        with self._lock:
            if not self._closed:
                self._idle.append(connection)
                return
        self.drop(connection)

    def drop(self, connection: Connection) -> None:
        """Closes a connection."""
        with self._lock:
            self._all.discard(connection)
        connection.close()

    def drop_idle(self) -> None:
        """Closes all idle connections: the store has closed one, so it may have closed others."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            self.drop(connection)

    def abandon(self) -> None:
        """Closes this process's copies of its parent's sockets, after a fork. Takes no lock,
        since a thread of the parent may hold it for ever."""
        for connection in self._all:
            connection.close()

    def close(self) -> None:
        """Closes the idle connections and breaks off those in use."""
        with self._lock:
            self._closed = True
            in_use = self._all.difference(self._idle)
        self.drop_idle()
        for connection in in_use:
            connection.interrupt()
