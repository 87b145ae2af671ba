"""Parts: a batch that any threads work on in parts, and that is over when its call is."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Generic, TypeVar

from .errors import ContractViolation

T = TypeVar("T")


class PartOf(threading.local, Generic[T]):
    """The `batch` of which this thread is at work on a part, or None."""

    batch: T | None = None

    def of(self, batch: T, work: Callable[[slice], None]) -> Callable[[slice], None]:
        """`work`, with parts of `batch`."""

        def part(pages: slice) -> None:
            before, self.batch = self.batch, batch
            try:
                work(pages)
            finally:
                self.batch = before

        return part


class Parts:
    """Calls `work` with parts of a batch of `count` pages, from any thread, each page once.

    A context. At its end no part is under way, none can begin any more, also not by an interrupt
    that comes meanwhile, and nothing of the caller's is held. What a part raised first is raised
    there, whatever became of it on its thread. `who` names in errors whoever makes the parts.
    """

    def __init__(self, count: int, work: Callable[[slice], None], who: str = "spread") -> None:
        self._count = count
        self._work: Callable[[slice], None] | None = work
        self._who = who
        self._taken = bytearray(count)
        self._at_work: list[int] = []
        """The threads that are, by identifier."""
        self._error: BaseException | None = None
        self._changed = threading.Condition()

    def __call__(self, part: slice) -> None:
        """Raises what `work` raises, and ContractViolation for what is no part of the batch, or
        one that was given before, or comes too late."""
        thread = threading.get_ident()
        work: Callable[[slice], None] | None = None
        try:
            with self._changed:
                work = self._work
                if work is None:
                    raise ContractViolation(
                        f"{self._who} called `work` after it had returned; the batch is over"
                    )
                self._at_work.append(thread)
                part = self._claimed(part)
            if part.start < part.stop:
                work(part)
        except BaseException as error:
            if work is not None:
                with self._changed:
                    self._error = self._error or error
            raise
        finally:
            # Before the batch can be over: the pages are the caller's again then.
            was_at_work, work = work is not None, None
            if was_at_work:
                with self._changed:
                    self._at_work.remove(thread)
                    self._changed.notify_all()

    def _claimed(self, part: slice) -> slice:
        start, stop, step = part.indices(self._count) if type(part) is slice else (0, 0, 0)
        if step != 1:
            raise ContractViolation(
                f"{self._who} called `work` with {part!r:.200}; expected a slice of pages in a "
                f"row, of the batch's {self._count}"
            )
        if any(self._taken[start:stop]):
            raise ContractViolation(
                f"{self._who} called `work` a second time with some of pages {start} to {stop}"
            )
        self._taken[start:stop] = b"\1" * max(stop - start, 0)
        return slice(start, stop)

    def __enter__(self) -> Parts:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        own, interrupt = threading.get_ident(), None
        while True:
            try:
                with self._changed:
                    self._work = None
                    # What this thread was at has ended, however it did.
                    self._changed.wait_for(lambda: all(one == own for one in self._at_work))
                break
            except BaseException as raised:
                interrupt = raised
        first, self._error = self._error, None
        if interrupt is not None:
            raise interrupt
        if first is not None and first is not error and isinstance(error, Exception | None):
            raise first
