"""One call: a batch of requests, driven by the calling thread alone.

The thread starts requests as the gate admits them, waits for all their sockets at once and takes
each a step further when it is ready. Retries, hedges and the deadline are times that it waits
for. No other thread touches the caller's spans, and nothing is left running when it returns.
"""

from __future__ import annotations

import contextlib
import heapq
import random
import select
import ssl
import time
from collections import Counter, deque
from collections.abc import Sequence

from ...errors import BackendError, BackendTimeout, BackendUnavailable
from .answers import Answer, Meaning, judge
from .exchange import exchange
from .messages import BrokenExchange, Request, Response, Steps
from .plane import Plane
from .signing import Keys
from .slots import Run, Slot

CONNECT_ATTEMPTS = 3
"""Tries to connect before a call on which nothing was answered yet is given up."""
STALE_ATTEMPTS = 3
"""Kept connections found closed by the store that don't count as failed tries."""
BACKOFF_S = 0.05
MOST_BACKOFF_S = 2.0
LEAVE_S = 1.0
"""How long a write waits for the server's leave to send the body."""
GRACE_S = 0.05
"""How long requests whose answers no longer matter may finish, to keep their connections."""
GATE_POLL_S = 0.01
"""How often a call that waits at the gate looks whether there is room."""
LOOK_S = 0.1
"""How often a call looks whether it is still wanted."""
FORBIDDEN_S = 60.0
"""How long 403 to a HEAD, once looked into, is taken to mean the same."""

_FAILED = (Meaning.AGAIN, Meaning.SLOWER)
Result = Answer | BackendError


class Batch:
    """What the calls of one batch have in common: one, or with `in_parts` several that read parts
    of it, maybe on several threads. Only ever changes one way, so that it needs no lock."""

    __slots__ = (
        "answered", "complaint", "failure", "given_up", "in_parts", "unread", "until_s",
    )  # fmt: skip

    def __init__(self, until_s: float, *, in_parts: bool = False) -> None:
        self.until_s = until_s
        """The deadline, on the monotonic clock."""
        self.in_parts = in_parts
        self.answered = False
        """Whether the store has answered any of its requests."""
        self.complaint: Answer | None = None
        """An answer that asked for fewer requests."""
        self.failure: BackendError | None = None
        """Why a part had no answer while none of the others had one: the batch's, if none gets
        one."""
        self.unread: list[tuple[list[str], list[Result]]] = []
        """Keys and results of such parts."""
        self.given_up = False
        """Whether a part has raised: the others are in vain."""


class Call:
    """Runs `requests`, all of a batch or a part, to their ends. For one thread and one use.

    `leading` asks for the leading run of found objects only: what comes after one that isn't
    found is not asked for, or not waited for.
    """

    def __init__(
        self,
        plane: Plane,
        requests: Sequence[Request],
        operation: str,
        batch: Batch,
        *,
        leading: bool = False,
    ) -> None:
        self._plane = plane
        self._operation = operation
        self._leading = leading
        self._started_s = time.monotonic()
        self._batch = batch
        self._until_s = self._clock_s = batch.until_s
        self._fresh = deque(Slot(i, request) for i, request in enumerate(requests))
        self._delayed: list[tuple[float, int, Slot]] = []
        self._results: list[Result | None] = [None] * len(requests)
        self._cut = self._open = len(requests)
        self._known = 0
        self._runs: dict[int, Run] = {}
        self._poll = select.poll()
        self._ticket = plane.gate.register()
        self._verbs: Counter[str] = Counter()
        self._changes: Counter[str] = Counter()

    def run(self) -> list[Result]:
        """An answer or an error for each request, in order; with `leading`, up to the first
        that wasn't found.

        Raises BackendError where the store as a whole is at fault: no request can succeed, or
        none of the batch was answered and not only because the store asks for less. If other parts
        of it may yet be answered, that is left as `Batch.failure`.
        """
        try:
            self._begin()
            while self._open:
                self._start()
                self._wait()
            until_s = min(self._until_s, time.monotonic() + GRACE_S)
            while self._runs and time.monotonic() < until_s:
                self._step(until_s)
        finally:
            for run in list(self._runs.values()):
                self._end(run, keep=False)
            self._plane.gate.leave(self._ticket)
            self._plane.count(self._changes, self._verbs)
        results = [result for result in self._results[: self._cut + 1] if result is not None]
        if not self._batch.answered:
            self._unanswered(results)
        return results

    def _unanswered(self, results: list[Result]) -> None:
        for result in results:
            if isinstance(result, BackendError):
                failure = result
            elif result.meaning is Meaning.AGAIN:
                failure = self._unavailable(result.reason)
            else:
                continue
            if not self._batch.in_parts or time.monotonic() >= self._until_s:
                raise failure
            self._batch.failure = self._batch.failure or failure
            return

    # starting

    def _start(self) -> None:
        now = time.monotonic()
        gate = self._plane.gate
        while self._open:
            while self._delayed and self._delayed[0][0] <= now:
                self._fresh.appendleft(heapq.heappop(self._delayed)[2])
            if not self._fresh:
                self._ticket.waiting = False
                return
            index = self._fresh[0].index
            if index >= self._cut:
                self._fresh.popleft()
                continue
            if self._leading and index >= self._first_unknown() + 2 * gate.most:
                self._ticket.waiting = False
                return
            if not gate.enter(self._ticket):
                if self._runs or not self._admitted():
                    return
                now = time.monotonic()
            self._try(self._fresh.popleft(), now)

    def _admitted(self) -> bool:
        """Waits at the gate, until the deadline at most."""
        while True:
            until_s = min(self._until_s, time.monotonic() + LOOK_S)
            if self._plane.gate.wait(self._ticket, until_s):
                return True
            if until_s == self._until_s:
                return False
            self._check_wanted()

    def _first_unknown(self) -> int:
        """The first request without a result. A lookup asks only so far beyond it, since what
        comes after a missing page is asked for in vain."""
        while self._known < self._cut and self._results[self._known] is not None:
            self._known += 1
        return self._known

    def _try(self, slot: Slot, now: float) -> None:
        """Starts an exchange for the slot; the gate has admitted it."""
        config, connections = self._plane.config, self._plane.connections
        connection = connections.take()
        reused = connection is not None
        if connection is None:
            try:
                connection = connections.new(min(self._until_s, now + config.connect_timeout_s))
            except OSError as error:
                self._plane.gate.done(self._ticket)
                if not slot.runs:
                    self._unconnected(slot, error)
                return
        run = Run(slot, connection, now, reused=reused)
        run.steps = self._steps(run)
        slot.runs.append(run)
        self._runs[run.descriptor] = run
        self._due(now + config.stall_timeout_s)
        self._resume(run, None)

    def _steps(self, run: Run) -> Steps[Response]:
        """All of one try, as what it waits for."""
        config, request = self._plane.config, run.slot.request
        if not run.connected:
            self._changes["connects"] += 1
            self._wake_in(run, config.connect_timeout_s)
            yield from run.connection.connect()
            run.connected = True
            run.wake_s = float("inf")
        self._verbs[request.verb] += 1
        if request.expect_continue:
            self._wake_in(run, LEAVE_S)
        elif config.hedge_after_s and request.into is not None and len(run.slot.runs) == 1:
            self._wake_in(run, config.hedge_after_s)
        run.keys = self._plane.credentials.keys()
        head = self._plane.head(request)
        return (yield from exchange(run.connection, request, head, lambda: self._only(run)))

    def _only(self, run: Run) -> None:
        """Keeps `run` alone on its slot, before it writes to the slot's spans."""
        run.wake_s = float("inf")
        for other in list(run.slot.runs):
            if other is not run:
                self._end(other, keep=False)

    # waiting

    def _due(self, at_s: float) -> None:
        self._clock_s = min(self._clock_s, at_s)

    def _wake_in(self, run: Run, seconds: float) -> None:
        run.wake_s = time.monotonic() + seconds
        self._due(run.wake_s)

    def _wait(self) -> None:
        if not self._open:
            return
        look_s = GATE_POLL_S if self._ticket.waiting else LOOK_S
        self._step(min(self._clock_s, time.monotonic() + look_s))
        self._check_wanted()

    def _begin(self) -> None:
        """Before anything is sent: a part may begin when the batch's time is over."""
        self._check_wanted()
        if (now := time.monotonic()) >= self._until_s:
            self._look_at_clock(now)

    def _check_wanted(self) -> None:
        """Raises if the answers are of no use any more."""
        if self._open and self._plane.closed:
            raise self._unavailable("the store is closed", retryable=False)
        if self._open and self._batch.given_up:
            raise self._unavailable("another part of the batch has failed")

    def _step(self, until_s: float) -> None:
        """Waits for sockets until `until_s`, and goes on with those that are ready."""
        timeout_s = max(0.0, until_s - time.monotonic())
        if not self._runs:
            time.sleep(timeout_s)
        ready = self._poll.poll(timeout_s * 1000) if self._runs else ()
        now = time.monotonic()
        for run, come in [(self._runs[descriptor], come) for descriptor, come in ready]:
            # One that ended meanwhile may have left its descriptor to a new one.
            if self._runs.get(run.descriptor) is run:
                run.progress_s = now
                self._resume(run, come)
        if now >= self._clock_s:
            self._look_at_clock(now)

    def _look_at_clock(self, now: float) -> None:
        if now >= self._until_s:
            limit = f"{self._plane.config.deadline_s:g} s"
            late = self._timeout(f"no answer within the deadline of {limit}")
            self._fail_rest(self._batch.complaint or late)
            return
        stall_s = self._plane.config.stall_timeout_s
        for run in list(self._runs.values()):
            if self._runs.get(run.descriptor) is not run:
                continue
            if now >= run.wake_s:
                self._wake(run, now)
            elif now >= run.progress_s + stall_s:
                self._lost(run, TimeoutError(f"silent for {stall_s:g} s"))
        self._clock_s = self._until_s
        if self._delayed:
            self._due(self._delayed[0][0])
        for run in self._runs.values():
            self._due(min(run.wake_s, run.progress_s + stall_s))

    def _wake(self, run: Run, now: float) -> None:
        run.wake_s = float("inf")
        if not run.connected:
            limit = f"{self._plane.config.connect_timeout_s:g} s"
            self._lost(run, TimeoutError(f"no connection within {limit}"))
        elif run.slot.request.expect_continue:
            self._resume(run, 0)
        elif len(run.slot.runs) == 1 and self._plane.gate.enter(self._ticket):
            self._changes["hedges"] += 1
            self._try(run.slot, now)

    def _resume(self, run: Run, come: int | None) -> None:
        try:
            mask = run.steps.send(come)  # type: ignore[arg-type]
        except StopIteration as stop:
            self._came(run, stop.value)
        except (OSError, BrokenExchange) as error:
            self._lost(run, error)
        else:
            if mask != run.mask:
                run.mask = mask
                self._poll.register(run.descriptor, mask)

    # ends of a try

    def _end(self, run: Run, *, keep: bool) -> None:
        del self._runs[run.descriptor]
        run.slot.runs.remove(run)
        with contextlib.suppress(KeyError):
            self._poll.unregister(run.descriptor)
        run.steps.close()
        if keep:
            self._plane.connections.give(run.connection)
        else:
            self._plane.connections.drop(run.connection)
        self._plane.gate.done(self._ticket)

    def _came(self, run: Run, response: Response) -> None:
        """A response is there, whole."""
        slot = run.slot
        self._end(run, keep=response.reusable)
        answer = judge(slot.request, response)
        meaning = answer.meaning
        if response.filled:
            self._changes["received_bytes"] += response.length or 0
        if meaning is Meaning.SLOWER:
            self._batch.complaint = answer
            self._changes["throttles"] += 1
            self._plane.gate.lower_bound()
        else:
            self._plane.gate.raise_bound()
        if slot.request.verb == "HEAD" and meaning in (Meaning.FORBIDDEN, Meaning.FATAL):
            self._look_into(slot, answer)
            return
        if meaning is Meaning.FATAL:
            raise self._unavailable(answer.reason, retryable=False)
        if meaning is Meaning.KEYS:
            self._renew_keys(slot, run.keys, answer)
        elif meaning in _FAILED:
            self._again(slot, answer)
        else:
            if meaning is Meaning.DONE:
                self._changes["sent_bytes"] += sum(map(len, slot.request.body))
            self._settle(slot, answer)

    def _look_into(self, slot: Slot, answer: Answer) -> None:
        """The answer to a HEAD has no body that says why it failed; that to a GET of one byte
        has."""
        known = time.monotonic() < self._plane.forbidden_until_s
        if answer.meaning is Meaning.FORBIDDEN and known:
            self._settle(slot, answer)
            return
        slot.request = Request("GET", slot.request.path, extra=(("range", "bytes=0-0"),))
        self._fresh.appendleft(slot)

    def _renew_keys(self, slot: Slot, keys: Keys | None, answer: Answer) -> None:
        if slot.keys_renewed or not self._plane.credentials.rejected(keys, self._until_s):
            raise self._unavailable(answer.reason, retryable=False)
        slot.keys_renewed = True
        self._changes["retries"] += 1
        self._fresh.appendleft(slot)

    def _lost(self, run: Run, error: Exception) -> None:
        """The connection failed, or the response broke off."""
        slot = run.slot
        fresh_answer = run.connection.inbox_bytes == 0
        self._end(run, keep=False)
        if slot.runs or self._results[slot.index] is not None:
            return
        if self._plane.closed:
            raise self._unavailable("the store is closed", retryable=False)
        if not run.connected:
            self._unconnected(slot, error)
        elif isinstance(error, TimeoutError):
            self._again(slot, self._timeout(str(error)))
        elif run.reused and fresh_answer and slot.stales < STALE_ATTEMPTS:
            slot.stales += 1
            self._changes["retries"] += 1
            self._plane.connections.drop_idle()
            self._fresh.appendleft(slot)
        else:
            self._again(slot, self._unavailable(f"{type(error).__name__}: {error}"))

    def _unconnected(self, slot: Slot, error: Exception) -> None:
        if self._plane.closed:
            raise self._unavailable("the store is closed", retryable=False)
        reason = f"can't connect: {error}"
        if isinstance(error, ssl.SSLError):
            reason = f"TLS failed: {error}; set ca_file to the store's CA, or check the endpoint"
            if isinstance(error, ssl.SSLCertVerificationError):
                raise self._unavailable(reason, retryable=False) from error
        slot.connects += 1
        failure = self._unavailable(reason)
        # Its traceback leads to this call, and to the caller's memory.
        failure.__cause__ = error.with_traceback(None)
        waited_s = time.monotonic() - self._started_s
        hopeless = slot.connects >= CONNECT_ATTEMPTS
        hopeless |= waited_s >= self._plane.config.connect_timeout_s
        if hopeless and not self._batch.answered:
            raise failure
        self._again(slot, failure)

    # ends of a slot

    def _again(self, slot: Slot, failure: Result) -> None:
        """Tries the slot again after a while, if there are tries and time left."""
        slot.attempts += 1
        if self._results[slot.index] is not None or slot.index >= self._cut:
            return
        batch = self._batch
        # Once a part had all its tries in vain, another has one for each of its pages.
        vain = batch.failure is not None and not batch.answered
        if slot.attempts >= self._plane.config.attempts or vain:
            if batch.answered or vain:
                self._settle(slot, failure)
            else:
                self._fail_rest(failure)
            return
        most_s = min(MOST_BACKOFF_S, BACKOFF_S * 2 ** (slot.attempts - 1))
        at_s = time.monotonic() + random.uniform(0, most_s)
        if at_s >= self._until_s:
            self._settle(slot, failure)
            return
        self._changes["retries"] += 1
        heapq.heappush(self._delayed, (at_s, slot.index, slot))
        self._due(at_s)

    def _settle(self, slot: Slot, result: Result) -> None:
        if self._results[slot.index] is not None:
            return
        if isinstance(result, Answer) and result.meaning not in _FAILED:
            self._batch.answered = True
        self._results[slot.index] = result
        if slot.index < self._cut:
            self._open -= 1
            found = isinstance(result, Answer) and result.meaning is Meaning.DONE
            if self._leading and not found:
                self._cut = slot.index
                self._open = self._results[: self._cut].count(None)

    def _fail_rest(self, failure: Result) -> None:
        for index, result in enumerate(self._results):
            if result is None:
                self._results[index] = failure
        self._open = 0

    def _unavailable(self, reason: str, *, retryable: bool = True) -> BackendError:
        return BackendUnavailable(
            f"{self._plane.endpoint.shown}: {reason}",
            backend="s3",
            operation=self._operation,
            retryable=retryable,
        )

    def _timeout(self, reason: str) -> BackendError:
        return BackendTimeout(
            f"{self._plane.endpoint.shown}: {reason}", backend="s3", operation=self._operation
        )
