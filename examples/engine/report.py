"""What the demo prints: a table and bars of accept lengths for people, JSON for machines."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from stages import Stages

BAR_WIDTH = 40
MOST_TOKENS_A_STEP = 8  # one known token and seven guesses
MEANING = """\
restored    a new process gets the pages from the store in pairs: as good as computed
draft lost  the draft's pages were deleted from the store: the same tokens, but fewer a step
required    two draft pages were deleted: the hit ends before the first, the rest is computed"""


def _drafts(result: Mapping[str, Any]) -> str:
    if not result["storage_tokens"]:
        return "-"
    lost = f", {result['lost_drafts']} lost" if result["lost_drafts"] else ""
    return f"{result['draft_hits']} hit{lost}"


def _output(result: Mapping[str, Any]) -> str:
    if result["stage"] == "cold":
        return f"{result['new_tokens']} tokens"
    return "equal" if result["output_equal"] else "DIFFERS"


COLUMNS: tuple[tuple[str, Callable[[Mapping[str, Any]], str]], ...] = (
    ("accept length", lambda r: f"{r['accept_length']:.2f}"),
    ("from storage", lambda r: f"{r['storage_tokens']:,} tokens"),
    ("draft pages", _drafts),
    ("first token", lambda r: f"{1000 * r['time_to_first_token_s']:,.0f} ms"),
    ("tokens/s", lambda r: f"{r['tokens_per_s']:,.0f}"),
    ("output", _output),
)


def table(results: Sequence[Mapping[str, Any]]) -> str:
    """One row a stage, one column a figure."""
    rows = [["", *(heading for heading, _ in COLUMNS)]]
    rows += [[r["label"], *(fill(r) for _, fill in COLUMNS)] for r in results]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    lines.insert(1, "-" * max(map(len, lines)))
    return "\n".join(lines)


def bars(results: Sequence[Mapping[str, Any]], most: int, *, ascii_only: bool = False) -> str:
    """Accept lengths as horizontal bars; `most` tokens a step fill the width."""
    full, half = ("#", "") if ascii_only else ("█", "▌")
    width = max(len(r["label"]) for r in results)
    lines = [f"{'':{width}}  accept length, of at most {most} tokens a step"]
    for r in results:
        halves = round(2 * BAR_WIDTH * r["accept_length"] / most)
        bar = full * (halves // 2) + half * (halves % 2)
        lines.append(f"{r['label']:{width}}  {bar} {r['accept_length']:.2f}")
    return "\n".join(lines)


def as_json(stages: Stages) -> dict[str, Any]:
    """All figures, for machines."""
    private = ("output", "text", "hashes", "namespaces", "label", "torch", "event")
    figures = {
        name: {key: value for key, value in result.items() if key not in private}
        for name, result in stages.results.items()
    }
    cold = stages.results["cold"]
    settings = asdict(stages.settings) | {"store": shown_url(stages.settings.store)}
    for name in ("fresh", "pairing"):
        del settings[name]
    return {
        **figures,
        "rewritten_drafts": stages.rewritten["written_drafts"],
        "text": cold["text"],
        "settings": settings,
        "machine": {
            "cpus": os.cpu_count(),
            "cpu": cpu_name(),
            "system": platform.platform(),
            "python": platform.python_version(),
            "torch": cold["torch"],
        },
    }


def for_people(stages: Stages) -> str:
    """Table, bars and a word on what they mean."""
    results = list(stages.results.values())
    cold, settings = stages.results["cold"], stages.settings
    snippet = " ".join(cold["text"].split())[:60]
    plain = not (sys.stdout.encoding or "").lower().startswith("utf")
    return "\n".join(
        (
            f"{settings.pair} target with its draft head, {cold['prompt_tokens']:,} prompt tokens "
            f'in pages of {settings.page_size}, continued by "{snippet}..."',
            "",
            table(results),
            "",
            bars(results, MOST_TOKENS_A_STEP, ascii_only=plain),
            "",
            MEANING,
        )
    )


def shown_url(url: str) -> str:
    """The URL without what may be a secret: user, password, query."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def cpu_name() -> str:
    """The processor's name, if the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
