"""What a backend has open in this process, made anew after a fork."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ...errors import StoreClosed
from .doubts import Doubts
from .plane import Plane

if TYPE_CHECKING:
    from .control import Control


@dataclass
class Live:
    """Connections, SDK client and short-lived knowledge of one process."""

    plane: Plane
    control: Control
    doubts: Doubts = field(default_factory=Doubts)
    process: int = field(default_factory=os.getpid)


class LiveHere:
    """The Live of the process that asks. Thread-safe.

    Sockets, TLS states and SDK clients must not be shared between processes: a child closes its
    copies (which the parent doesn't notice) and makes its own on its first call.
    """

    def __init__(self, make: Callable[[], Live]) -> None:
        self._make = make
        self._live: Live | None = None
        self._inherited: list[Live] = []
        self._lock = threading.Lock()
        self._closed = False
        _all.add(self)

    def now(self) -> Live:
        """This process's Live; raises StoreClosed after `close`, and what making it raises."""
        live = self._live
        if live is not None and live.process == os.getpid():
            return live
        with self._lock:
            if self._closed:
                raise StoreClosed("the s3 backend is closed; open the store again")
            if self._live is None or self._live.process != os.getpid():
                self._live = self._make()
            return self._live

    def close(self) -> None:
        """Closes it. A second call does nothing."""
        with self._lock:
            live, self._live = self._live, None
            self._closed = True
        if live is not None and live.process == os.getpid():
            live.plane.close()
            live.control.close()

    def _after_fork(self) -> None:
        self._lock = threading.Lock()
        live, self._live = self._live, None
        if live is not None:
            # Kept, so that nothing in it is finalised while a lock of the parent's is held.
            self._inherited.append(live)
            live.plane.connections.abandon()


_all: weakref.WeakSet[LiveHere] = weakref.WeakSet()


def _after_fork() -> None:
    for here in list(_all):
        here._after_fork()


os.register_at_fork(after_in_child=_after_fork)
