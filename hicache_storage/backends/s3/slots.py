"""The requests of a call, and the runs of each on a connection."""

from __future__ import annotations

from .connection import Connection
from .messages import Request, Response, Steps
from .signing import Keys


class Slot:
    """One request of the batch and how it fares."""

    __slots__ = ("attempts", "connects", "index", "keys_renewed", "request", "runs", "stales")

    def __init__(self, index: int, request: Request) -> None:
        self.index = index
        self.request = request
        self.attempts = self.connects = self.stales = 0
        self.keys_renewed = False
        self.runs: list[Run] = []
        """Exchanges under way: one, or two while a hedge runs."""


class Run:
    """One try of a slot, on one connection."""

    __slots__ = (
        "connected", "connection", "descriptor", "keys", "mask", "progress_s", "reused", "slot",
        "steps", "wake_s",
    )  # fmt: skip

    def __init__(self, slot: Slot, connection: Connection, now: float, *, reused: bool) -> None:
        self.slot = slot
        self.connection = connection
        self.descriptor = connection.fileno()
        self.reused = self.connected = reused
        self.keys: Keys | None = None
        self.mask = 0
        self.progress_s = now
        self.wake_s = float("inf")
        self.steps: Steps[Response]
