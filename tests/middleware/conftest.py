"""What the tests of middleware share: a watched store, a middleware round it, a clock to move."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Collection
from types import FrameType
from typing import Any

import pytest
from recording import RecordingBackend

from hicache_storage import BackendUnavailable
from hicache_storage.calling import Caller
from hicache_storage.config import build_config

KEY = "0f" * 16 + "/" + "0a" * 32
OTHER = "0f" * 16 + "/" + "0b" * 32


def down(operation: str = "exists", **options: Any) -> BackendUnavailable:
    return BackendUnavailable("down", backend="memory", operation=operation, **options)


def around(backend: object, cls: type[Any], **options: Any) -> tuple[Any, Caller]:
    """The middleware round the backend, and a caller of it."""
    layer = cls(Caller(backend, name="memory"), build_config(cls.Config, cls.__name__, options))
    return layer, Caller(layer, name="memory")


class Interrupts:
    """Raises KeyboardInterrupt the `left`-th time that Python looks for signals, as a function
    begins ("call") and when a call has returned."""

    def __init__(self, left: int, events: Collection[str] = ("call", "return", "c_return")) -> None:
        self.left = left
        self._events = events

    def during(self, call: Callable[[], object]) -> None:
        """Makes the call, interrupted if it is long enough."""
        gc.disable()  # callbacks of the collector would be interrupted too
        sys.setprofile(self._profile)
        try:
            call()
        except KeyboardInterrupt:
            pass
        finally:
            sys.setprofile(None)
            gc.enable()

    def _profile(self, frame: FrameType, event: str, argument: Any) -> None:
        if event not in self._events or argument is sys.setprofile:
            return
        self.left -= 1
        if self.left == 0:
            sys.setprofile(None)
            raise KeyboardInterrupt


@pytest.fixture
def backend() -> RecordingBackend:
    return RecordingBackend()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Moves the middleware's clock; sleeping moves it too."""
    now = [1000.0]

    def forward(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr("time.sleep", forward)
    return forward
