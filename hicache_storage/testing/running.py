"""Runs clauses on a subject, each on a bench of its own and within a time limit."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from ..calling import Caller
from ..config import describe_options
from ..errors import HiCacheStorageError
from ..store import Store
from .bench import Bench
from .clause import NEEDS, Clause, ClauseFailed, NotSelected
from .clauses import CLAUSES
from .secrets import secret_values
from .subject import Subject

DEFAULT_TIMEOUT_S = 120.0

Result = Literal["passed", "failed", "deviates", "deviation gone", "not selected"]


@dataclass(frozen=True)
class Outcome:
    """What became of one clause."""

    clause: Clause
    result: Result
    seconds: float = 0.0
    reason: str = ""
    """Why it failed, deviates or wasn't selected."""
    trace: str = ""
    left_pages: int = 0
    """Pages that could not be removed afterwards, since the backend has no `delete`."""

    @property
    def good(self) -> bool:
        return self.result not in ("failed", "deviation gone")


def traits(store: Store, subject: Subject) -> frozenset[str]:
    """Which of NEEDS the open store and the subject meet."""
    found = set(store.capabilities & NEEDS.keys())
    if store.scope != "process":
        found.add("persistent")
    if store.scope == "shared":
        found.add("shared")
    config = getattr(type(innermost(store)), "Config", None)
    options = {option["name"]: option for option in describe_options(config)}
    if "usage" in found and options.get("capacity", {}).get("unit") == "bytes":
        found.add("capacity")
    private = subject.private or store.scope == "process"
    if private:
        found.add("private")
    if private or subject.empty:
        found.add("empty")
    if subject.opener == Subject.opener:
        found.add("named")
    if secret_values(subject):
        found.add("secrets")
    return frozenset(found)


def probe(subject: Subject) -> frozenset[str]:
    """Opens the subject to see its traits. Raises what opening raises."""
    store = subject.open()
    try:
        return traits(store, subject)
    finally:
        with contextlib.suppress(HiCacheStorageError):
            store.close()  # That it can be closed is a clause of its own.


def innermost(store: Store) -> object:
    """The store's backend without the middleware round it."""
    backend = store._caller.backend
    while isinstance(inner := getattr(backend, "inner", None), Caller):
        backend = inner.backend
    return backend


def unmet(clause: Clause, found: frozenset[str]) -> str:
    """Why the clause doesn't apply; "" if it does."""
    missing = [NEEDS[need] for need in clause.needs if need not in found]
    return f"needs {' and '.join(missing)}" if missing else ""


def run_clause(
    clause: Clause, subject: Subject, *, timeout_s: float = DEFAULT_TIMEOUT_S
) -> tuple[float, int]:
    """Tries one clause; seconds taken and pages left over.

    Raises ClauseFailed if the backend breaks it, whatever it raised itself, or doesn't return
    in time, and NotSelected if the clause finds that it can't be tried.
    """
    started_s = time.monotonic()
    bench = Bench(subject, clause.number)
    failure: list[BaseException] = []

    def attempt() -> None:
        try:
            clause.try_on(bench)
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=attempt, name=f"clause-{clause.number}", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if thread.is_alive():
        frame = sys._current_frames().get(thread.ident or 0)
        where = "".join(traceback.format_stack(frame)[-4:]) if frame else ""
        raise ClauseFailed(f"it did not return within {timeout_s:g} s; it stands at\n{where}")
    left = 0
    try:
        left = bench.clean()
    except Exception as error:
        failure.append(error)
    if failure:
        cause = failure[0]
        if isinstance(cause, (ClauseFailed, NotSelected)):
            raise cause
        raise ClauseFailed(
            f"the backend raised {type(cause).__name__}: {cause}{_place(cause)}"
        ) from cause
    return time.monotonic() - started_s, left


def _place(error: BaseException) -> str:
    """Where an error that isn't of this package was raised, as it is most likely a bug."""
    while error.__cause__ is not None:
        error = error.__cause__
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, HiCacheStorageError) or not frames:
        return ""
    return f" ({frames[-1].filename}:{frames[-1].lineno})"


def run_clauses(
    subject: Subject,
    *,
    deviations: Mapping[str, str] | None = None,
    clauses: Iterable[Clause] = CLAUSES,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    progress: Callable[[Outcome], None] = lambda outcome: None,
) -> list[Outcome]:
    """Runs every clause that applies. Raises what opening the store raises, and ValueError for a
    deviation of a clause that doesn't exist."""
    deviations = dict(deviations or {})
    check_deviations(deviations)
    found = probe(subject)
    outcomes = []
    for clause in clauses:
        reason = unmet(clause, found)
        if reason:
            outcome = Outcome(clause, "not selected", reason=reason)
        else:
            outcome = _outcome(clause, subject, deviations.get(clause.number), timeout_s)
        progress(outcome)
        outcomes.append(outcome)
    return outcomes


def check_deviations(deviations: Mapping[str, str]) -> None:
    """Raises ValueError unless each is of a clause that exists, and has a reason."""
    known = {clause.number for clause in CLAUSES}
    for number, reason in deviations.items():
        if number not in known:
            raise ValueError(f"deviation from clause {number!r}: there is no such clause")
        if not isinstance(reason, str) or not reason.strip():
            raise ValueError(f"deviation from clause {number}: give the reason as text")


def _outcome(clause: Clause, subject: Subject, deviation: str | None, timeout_s: float) -> Outcome:
    started_s = time.monotonic()
    try:
        seconds, left = run_clause(clause, subject, timeout_s=timeout_s)
    except NotSelected as error:
        return Outcome(clause, "not selected", reason=str(error))
    except ClauseFailed as error:
        seconds = time.monotonic() - started_s
        if deviation is not None:
            return Outcome(clause, "deviates", seconds, deviation)
        trace = "".join(traceback.format_exception(error))
        return Outcome(clause, "failed", seconds, str(error), trace)
    if deviation is not None:
        reason = f"it holds now; take the deviation out ({deviation})"
        return Outcome(clause, "deviation gone", seconds, reason, left_pages=left)
    return Outcome(clause, "passed", seconds, left_pages=left)
