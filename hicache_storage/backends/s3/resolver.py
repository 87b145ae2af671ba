"""Names to addresses, without letting a slow name server hold up a call."""

from __future__ import annotations

import itertools
import socket
import threading
import time

from .connection import Address

KEEP_S = 30.0
"""How long an answer of the name server is used."""


class Resolver:
    """Addresses of one host and port, each in turn. Thread-safe.

    A lookup runs in a thread of its own, so that a caller waits no longer than it wants to; an
    address in digits needs none.
    """

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._port = port
        self._turn = itertools.count()
        self._found: list[Address] = []
        self._found_s = float("-inf")
        self._lookup: threading.Thread | None = None
        self._error: OSError | None = None
        self._lock = threading.Lock()
        try:
            self._found = _look_up(host, port, socket.AI_NUMERICHOST)
            self._found_s = float("inf")
        except OSError:
            pass

    def next_address(self, until_s: float) -> Address:
        """The next address to try; raises OSError if there is none by `until_s`."""
        if time.monotonic() - self._found_s > KEEP_S:
            self._refresh(until_s)
        return self._found[next(self._turn) % len(self._found)]

    def _refresh(self, until_s: float) -> None:
        with self._lock:
            lookup = self._lookup
            if lookup is None or not lookup.is_alive():
                self._error = None
                lookup = self._lookup = threading.Thread(
                    target=self._run, name="hicache-s3-resolve", daemon=True
                )
                lookup.start()
        if self._found:
            return
        lookup.join(max(0.0, until_s - time.monotonic()))
        if not self._found:
            raise self._error or TimeoutError(f"no answer yet for the name {self._host!r}")

    def _run(self) -> None:
        try:
            self._found = _look_up(self._host, self._port, 0)
            self._found_s = time.monotonic()
        except OSError as error:
            self._error = error


def _look_up(host: str, port: int, flags: int) -> list[Address]:
    found = socket.getaddrinfo(host, port, 0, socket.SOCK_STREAM, socket.IPPROTO_TCP, flags)
    return list(dict.fromkeys(Address(family, target) for family, _, _, _, target in found))
