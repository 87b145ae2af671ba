"""`hicache-storage check`: the conformance kit on one store, without pytest."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from .. import __version__
from ..config import environment_url
from ..discovery import find_backends
from ..errors import ConfigError
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
    subject = Subject(url, private=arguments.destructive, empty=arguments.destructive)
    with subject.open() as store:
        empty = _is_empty(store)
        if not arguments.destructive and not empty:
            _check_room(store)
        scope, capabilities = store.scope, tuple(sorted(store.capabilities))
    subject = Subject(url, private=arguments.destructive, empty=arguments.destructive or empty)

    form = "json" if arguments.json else arguments.report
    live = form == "text"

    def show(outcome: Outcome) -> None:
        if live:
            print(text_line(outcome), flush=True)
        elif sys.stderr.isatty():
            print(text_line(outcome), file=sys.stderr, flush=True)

    outcomes = run_clauses(
        subject,
        deviations=deviations,
        clauses=clauses,
        timeout_s=arguments.timeout_s,
        progress=show,
    )
    name, _ = _backend_and_options(url)
    found = find_backends()[name]
    report = Report(
        backend=name,
        distribution=f"{found.distribution} {found.version}",
        kit=__version__,
        store=shown_url(url),
        scope=scope,
        capabilities=capabilities,
        outcomes=outcomes,
    )
    whole = {
        "text": report.as_text,
        "markdown": report.as_markdown,
        "json": report.as_json_text,
    }[form]()
    if arguments.output:
        Path(arguments.output).write_text(whole.rstrip("\n") + "\n")
    text = report.as_text(clauses=False) if live else whole.rstrip("\n")
    return Answer(report.passed, report.as_json(), text)


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
