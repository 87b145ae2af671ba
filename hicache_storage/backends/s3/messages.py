"""An HTTP request and its response, as the parts of the data plane hand them on."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import TypeVar

from ...page import PageSpans

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
