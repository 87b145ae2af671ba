"""`hicache-storage check`: the conformance kit on one store, without pytest."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from .. import __version__
from ..config import environment_url
from ..discovery import find_backends
from ..errors import ConfigError, HiCacheStorageError
from ..opening import _backend_and_options
from ..store import Store
from ..testing.clause import Clause
from ..testing.clauses import CLAUSES
from ..testing.report import Report, text_line
from ..testing.running import Outcome, check_deviations, run_clauses
from ..testing.subject import Subject
from .arguments import option_pairs
from .output import Answer, size
from .stores import shown_url

ROOM_BYTES = 256 << 20
"""Most that the kit has in the store at a time."""


def run_check(arguments: argparse.Namespace) -> Answer:
    """Writes under namespaces of its own, and deletes what it wrote."""
    url = arguments.url or environment_url()
    if url is None:
        raise ConfigError("no store is named: give a URL or set HICACHE_STORAGE_URL")
    deviations = option_pairs(arguments.deviation, "--deviation")
    try:
        check_deviations(deviations)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    clauses = _chosen(arguments.clause)
    destructive = arguments.destructive
    store = Subject(url).open()
    try:
        empty = _is_empty(store)
        if not destructive and not empty:
            _check_room(store)
    finally:
        with suppress(HiCacheStorageError):
            store.close()  # that it can be closed is a clause
    form = "json" if arguments.json else arguments.report
    with _quiet():
        outcomes = run_clauses(
            Subject(url, private=destructive, empty=destructive or empty),
            deviations=deviations,
            clauses=clauses,
            timeout_s=arguments.timeout_s,
            progress=partial(_show, live=form == "text", traces=arguments.debug),
        )
    report = _report(url, store, outcomes)
    whole = {"text": report.as_text, "markdown": report.as_markdown, "json": report.as_json_text}
    if arguments.output:
        Path(arguments.output).write_text(whole[form]().strip("\n") + "\n")
    text = report.as_text(clauses=False) if form == "text" else whole[form]()
    return Answer(report.passed, report.as_json(), text.rstrip("\n"))


def _show(outcome: Outcome, live: bool, traces: bool) -> None:
    """While it runs: on standard output if that is the report, else only for who looks on."""
    if live:
        print(text_line(outcome), flush=True)
    elif sys.stderr.isatty():
        print(text_line(outcome), file=sys.stderr, flush=True)
    if traces and outcome.trace:
        print(outcome.trace, file=sys.stderr, flush=True)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps this package's log silent: it would tell of what the clauses provoke."""
    logger = logging.getLogger("hicache_storage")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


def _report(url: str, store: Store, outcomes: list[Outcome]) -> Report:
    name, _ = _backend_and_options(url)
    found = find_backends()[name]
    return Report(
        backend=name,
        distribution=f"{found.distribution} {found.version}",
        kit=__version__,
        store=shown_url(url),
        scope=store.scope,
        capabilities=tuple(sorted(store.capabilities)),
        outcomes=outcomes,
    )


def _chosen(numbers: list[str]) -> tuple[Clause, ...]:
    if not numbers:
        return CLAUSES
    chosen = []
    for number in numbers:
        fitting = [
            one for one in CLAUSES if one.number == number or one.number.startswith(f"{number}.")
        ]
        if not fitting:
            known = ", ".join(one.number for one in CLAUSES)
            raise ConfigError(f"there is no clause or section {number!r}; there are {known}")
        chosen += fitting
    return tuple(sorted(set(chosen), key=lambda one: one.order))


def _is_empty(store: Store) -> bool:
    if store.scope == "process":
        return True
    if "scan" in store.capabilities:
        return next(iter(store._caller.scan("")), None) is None
    return False


def _check_room(store: Store) -> None:
    """Refuses a store that might push out pages of others to make room for the kit's."""
    if "usage" not in store.capabilities:
        return
    usage = store.usage()
    if usage.capacity_bytes is None:
        return
    free = usage.capacity_bytes - usage.stored_bytes
    if free < ROOM_BYTES:
        raise ConfigError(
            f"the store holds {usage.pages} pages and has {size(max(free, 0))} left of its "
            f"capacity of {size(usage.capacity_bytes)}; the check needs {size(ROOM_BYTES)}, and "
            "might push pages out. Check an empty location, or say --destructive"
        )
