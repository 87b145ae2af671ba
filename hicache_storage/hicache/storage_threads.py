"""StorageThreads: workers that run operations a batch at a time, in turn."""

from __future__ import annotations

import threading
import time
from collections import deque
from queue import SimpleQueue
from typing import Protocol

from ..failures import FailureLog

BATCH_PAGES = 128
"""Most pages in one call to storage."""


class Operation(Protocol):
    """Work in steps of one batch. `step` runs on one worker at a time; all else, and every page
    that the operation holds, is the scheduler thread's once it was confirmed."""

    stopped: bool
    """Set by the scheduler thread: no further step is wanted."""

    def step(self) -> bool:
        """Does one batch; whether another one is left."""
        ...


class StorageThreads:
    """`threads` daemon threads over one queue.

    Operations take turns, so a small one waits for a batch of a big one and never for all of
    it. Each submitted operation is confirmed exactly once, on `confirmed`, and no thread touches
    it afterwards; also if it was withdrawn, stopped, or a step raised.
    """

    def __init__(
        self, name: str, threads: int, confirmed: SimpleQueue[Operation], failures: FailureLog
    ) -> None:
        self._waiting: deque[Operation] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._confirmed = confirmed
        self._failures = failures
        self._threads = [
            threading.Thread(target=self._work, name=f"hicache-{name}-{i}", daemon=True)
            for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def alive(self) -> int:
        """Threads that have not ended."""
        return sum(thread.is_alive() for thread in self._threads)

    def submit(self, operation: Operation) -> None:
        """Queues an operation; after `close` it is confirmed at once, without a step."""
        with self._changed:
            if not self._closing:
                self._waiting.append(operation)
                self._changed.notify()
                return
        self._confirmed.put(operation)

    def stop(self, operation: Operation) -> None:
        """Ends an operation: at once if it waits, else after the step under way."""
        with self._changed:
            operation.stopped = True
            if operation not in self._waiting:
                return
            self._waiting.remove(operation)
        self._confirmed.put(operation)

    def close(self) -> None:
        """Lets threads end when nothing waits; stop the operations first, or they are done."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    def join(self, deadline_s: float) -> bool:
        """Waits for the threads until `deadline_s` of `time.monotonic`; whether all ended."""
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        return not self.alive

    def _work(self) -> None:
        while (operation := self._next()) is not None:
            left = False
            try:
                left = not operation.stopped and operation.step()
            except BaseException as error:
                # Whatever it was, the thread and everyone's later operations must live on.
                self._failures.note("storage thread", error)
            if left:
                with self._changed:
                    left = not operation.stopped
                    if left:
                        self._waiting.append(operation)
                        self._changed.notify()
            if not left:
                self._confirmed.put(operation)
            del operation

    def _next(self) -> Operation | None:
        with self._changed:
            while not self._waiting:
                if self._closing:
                    return None
                self._changed.wait()
            return self._waiting.popleft()
