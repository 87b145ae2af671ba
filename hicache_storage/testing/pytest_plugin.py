"""The kit's part in pytest: no mark may soften a clause, and the summary shows each suite."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

import pytest


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuses marks that would let a single clause fail or be left out unseen."""
    for item in items:
        number = getattr(getattr(item, "function", None), "hicache_clause", None)
        if number is None:
            continue
        softened = {mark.name for mark in item.own_markers} & {"skip", "skipif", "xfail"}
        softened |= {mark.name for mark in item.iter_markers("xfail")}
        if softened:
            raise pytest.UsageError(
                f"{item.nodeid}: clause {number} is marked {', '.join(sorted(softened))}. What a "
                f'backend does otherwise is declared: deviations = {{"{number}": "the reason"}}'
            )


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """One line a suite, then its deviations with their reasons."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    deviations: dict[str, list[str]] = defaultdict(list)
    names = {
        "passed": "passed",
        "failed": "failed",
        "error": "failed",
        "xfailed": "deviate as declared",
        "skipped": "not selected",
    }
    for category, name in names.items():
        for report in terminalreporter.stats.get(category, ()):
            properties = dict(getattr(report, "user_properties", ()))
            number = properties.get("hicache_clause")
            if number is None:
                continue
            suite = report.nodeid.rpartition("::")[0]
            counts[suite][name] += 1
            if category == "xfailed":
                deviations[suite].append(f"{number}: {report.wasxfail.removeprefix('reason: ')}")
    if not counts:
        return
    terminalreporter.section("backend contract")
    for suite, count in sorted(counts.items()):
        shown = ", ".join(f"{count[name]} {name}" for name in dict.fromkeys(names.values()))
        terminalreporter.write_line(f"{suite}: {shown}")
        for line in deviations[suite]:
            terminalreporter.write_line(f"  deviates from {line}")
