"""The report of a run, as text, Markdown or JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .clause import NEEDS
from .clauses import CLAUSES, SECTIONS
from .running import Outcome

_MARKS = {
    "passed": "ok",
    "failed": "FAILED",
    "deviates": "deviates",
    "deviation gone": "DEVIATION GONE",
    "not selected": "-",
}


@dataclass(frozen=True)
class Report:
    """What the kit found about one store."""

    backend: str
    distribution: str
    """Name and version of the package that offers the backend."""
    kit: str
    """Version of this package."""
    store: str
    """The location, without secrets."""
    scope: str
    capabilities: tuple[str, ...]
    outcomes: Sequence[Outcome]

    @property
    def passed(self) -> bool:
        """Whether every clause that applies holds, or deviates as declared."""
        return all(outcome.good for outcome in self.outcomes)

    @property
    def left_pages(self) -> int:
        return sum(outcome.left_pages for outcome in self.outcomes)

    @property
    def counts(self) -> dict[str, int]:
        counted = Counter(str(outcome.result) for outcome in self.outcomes)
        return {result: counted[result] for result in _MARKS if counted[result]}

    def summary(self) -> str:
        """One sentence."""
        counts = ", ".join(f"{count} {result}" for result, count in self.counts.items())
        verdict = "keeps" if self.passed else "BREAKS"
        return f"{self.backend} ({self.distribution}) {verdict} the backend contract: {counts}."

    def notes(self) -> list[str]:
        lines = []
        if self.left_pages:
            lines.append(
                f"{self.left_pages} pages that the kit wrote are left in the store: the backend "
                "has no `delete`."
            )
        return lines

    def as_json(self) -> dict[str, Any]:
        return {
            "backend": self.backend,
            "distribution": self.distribution,
            "kit": self.kit,
            "store": self.store,
            "scope": self.scope,
            "capabilities": list(self.capabilities),
            "passed": self.passed,
            "counts": self.counts,
            "left_pages": self.left_pages,
            "clauses": [
                {
                    "clause": outcome.clause.number,
                    "title": outcome.clause.title,
                    "result": outcome.result,
                    "seconds": round(outcome.seconds, 3),
                    "reason": outcome.reason,
                }
                for outcome in self.outcomes
            ],
        }

    def as_text(self, *, clauses: bool = True) -> str:
        lines = [text_line(outcome) for outcome in self.outcomes] if clauses else []
        return "\n".join([*lines, "", self.summary(), *self.notes()])

    def as_markdown(self) -> str:
        lines = [
            f"# Conformance of `{self.backend}`",
            "",
            self.summary(),
            "",
            f"- package: {self.distribution}",
            f"- kit: hicache-storage {self.kit}",
            f"- scope: {self.scope}; optional hooks: {', '.join(self.capabilities) or 'none'}",
            *(f"- {note}" for note in self.notes()),
            "",
            "| clause | rule | result | seconds | reason |",
            "| --- | --- | --- | ---: | --- |",
        ]
        for outcome in self.outcomes:
            cells = (
                outcome.clause.number,
                outcome.clause.title,
                outcome.result,
                f"{outcome.seconds:.2f}" if outcome.result != "not selected" else "",
                outcome.reason,
            )
            lines.append("| " + " | ".join(_cell(cell) for cell in cells) + " |")
        return "\n".join(lines) + "\n"

    def as_json_text(self) -> str:
        return json.dumps(self.as_json(), indent=2)


def text_line(outcome: Outcome) -> str:
    """One clause as a line of the text report."""
    seconds = "" if outcome.result == "not selected" else f"{outcome.seconds:6.2f} s"
    line = f"{outcome.clause.number:>5}  {_MARKS[outcome.result]:<9} {seconds:>9}  "
    line += outcome.clause.title
    if outcome.reason:
        line += f"\n{'':>18}{outcome.reason}" if not outcome.good else f"  ({outcome.reason})"
    return line


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def clauses_markdown() -> str:
    """The list of clauses as the docs give it."""
    lines = ["## The clauses", ""]
    section = None
    for clause in CLAUSES:
        if clause.order[0] != section:
            section = clause.order[0]
            lines += [f"### {section}. {SECTIONS[section]}", ""]
        lines += [f"**{clause.number} {clause.title}.** {' '.join(clause.prose.split())}"]
        if clause.needs:
            lines[-1] += f" *Needs {', '.join(NEEDS[need] for need in clause.needs)}.*"
        lines += [""]
    return "\n".join(lines).rstrip() + "\n"
