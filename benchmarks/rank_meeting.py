"""Processes of one host, one a rank, that start what they measure at the same moment."""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import connection
from types import TracebackType
from typing import Any

PATIENCE_S = 120.0
"""How long one rank waits for another."""
LEAD_S = 0.002
"""From the agreement to the start: longer than it takes a process to wake up."""
Work = Callable[..., None]
"""work(rank, meeting, send, *arguments)."""


class RankFailed(RuntimeError):
    """A rank that raised, died or went silent; says which and how."""


class Meeting:
    """Where ranks wait for each other. `barrier` and `moment` are shared by all."""

    def __init__(self, barrier: Any, moment: Any) -> None:
        self._barrier = barrier
        self._moment = moment

    def start(self) -> float:
        """Returns on all ranks at the same moment, once all have come; that moment.

        Raises BrokenBarrierError if one doesn't come in PATIENCE_S.
        """
        if self._barrier.wait(PATIENCE_S) == 0:
            self._moment.value = time.perf_counter() + LEAD_S
        self._barrier.wait(PATIENCE_S)
        moment: float = self._moment.value
        while time.perf_counter() < moment:
            pass  # sleeping would add what it takes to wake up
        return moment


@dataclass(frozen=True)
class _Failure:
    text: str


class Ranks:
    """`count` processes that each do `work`. Ends them on leaving.

    `work`, its arguments and what it sends go through pickle.
    """

    def __init__(self, count: int, work: Work, *arguments: Any) -> None:
        # Spawned: CUDA doesn't survive a fork.
        context = multiprocessing.get_context("spawn")
        # Kept: a semaphore goes with its last owner here, maybe before a rank has it.
        self._meeting = Meeting(context.Barrier(count), context.RawValue("d", 0.0))
        self._pipes: list[Any] = []
        self._processes: list[Any] = []
        for rank in range(count):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_run, args=(work, rank, self._meeting, theirs, arguments), daemon=True
            )
            process.start()
            theirs.close()  # so that its end is seen here when the process ends
            self._pipes.append(ours)
            self._processes.append(process)

    def receive(self) -> list[Any]:
        """The next thing that each rank sends. Raises RankFailed if one can't."""
        got: dict[int, Any] = {}
        while len(got) < len(self._pipes):
            pending = {self._pipes[i]: i for i in range(len(self._pipes)) if i not in got}
            # Those that have sent may die meanwhile, and leave the others waiting.
            ends = [p.sentinel for p in self._processes if p.exitcode != 0]
            ready = connection.wait([*pending, *ends], PATIENCE_S)
            if not ready:
                raise RankFailed(f"ranks {[*pending.values()]} say nothing for {PATIENCE_S:.0f} s")
            for pipe, rank in pending.items():
                if pipe in ready:
                    got[rank] = self._next(rank)
            for rank, process in enumerate(self._processes):
                if process.sentinel in ready:
                    process.join()
                    if process.exitcode:
                        raise self._failed(rank)
        return [got[rank] for rank in range(len(self._pipes))]

    def _next(self, rank: int) -> Any:
        try:
            sent = self._pipes[rank].recv()
        except EOFError:
            raise self._failed(rank) from None
        if isinstance(sent, _Failure):
            raise self._failed(rank, sent)
        return sent

    def _failed(self, rank: int, failure: _Failure | None = None) -> RankFailed:
        """The fault behind what was seen of this rank: another's, if that one says so."""
        failures = {rank: failure} if failure is not None else {}
        for other, pipe in enumerate(self._pipes):
            try:
                while pipe.poll():
                    sent = pipe.recv()
                    if isinstance(sent, _Failure):
                        failures[other] = sent
            except (EOFError, OSError):
                continue
        for other, found in failures.items():
            return RankFailed(f"rank {other} failed:\n{found.text}")
        process = self._processes[rank]
        process.join(10)
        return RankFailed(f"rank {rank} ended with exit code {process.exitcode} and said nothing")

    def close(self) -> None:
        for process in self._processes:
            if process.is_alive():
                process.terminate()
                process.join(10)
            if process.is_alive():
                process.kill()
                process.join()
        for pipe in self._pipes:
            pipe.close()

    def finish(self) -> None:
        """Waits until all have ended. Raises RankFailed if one doesn't end well."""
        for rank, process in enumerate(self._processes):
            process.join(PATIENCE_S)
            if process.exitcode != 0:
                raise self._failed(rank)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _run(work: Work, rank: int, meeting: Meeting, pipe: Any, arguments: tuple[Any, ...]) -> None:
    try:
        work(rank, meeting, pipe.send, *arguments)
    except BaseException:
        pipe.send(_Failure(traceback.format_exc()))
        raise SystemExit(1) from None
