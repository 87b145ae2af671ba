"""Plain text: tables, sizes, times; and what a command answers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError

_DURATIONS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


@dataclass(frozen=True)
class Answer:
    """What a command found: the same as text and as a JSON document."""

    good: bool
    document: Any
    text: str


def table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns aligned by blanks; numbers to the right."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(headers, *cells, strict=True)]
    right = [
        bool(rows) and all(isinstance(row[i], (int, float)) for row in rows)
        for i in range(len(headers))
    ]
    lines = []
    for row in [list(headers), *cells]:
        parts = [
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(row, widths, right, strict=True)
        ]
        lines.append("  ".join(parts).rstrip())
    return "\n".join(lines)


def size(count_bytes: int | None) -> str:
    """Bytes for people: "12.5 MiB"."""
    if count_bytes is None:
        return "?"
    amount = float(count_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"


def plural(count: int, noun: str) -> str:
    """ "1 page", "2 pages"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def ago(moment_s: float | None) -> str:
    """A time in the past for people: "3 h ago"."""
    if moment_s is None:
        return "?"
    passed = max(0.0, time.time() - moment_s)
    for unit, seconds in (("d", 86400), ("h", 3600), ("min", 60)):
        if passed >= seconds:
            return f"{passed / seconds:.0f} {unit} ago"
    return f"{passed:.0f} s ago"


def parse_duration(text: str) -> float:
    """ "90s", "15m", "36h", "7d", "2w" in seconds; raises ConfigError for anything else."""
    number, unit = text[:-1], text[-1:]
    if unit not in _DURATIONS_S or not number.replace(".", "", 1).isdigit():
        raise ConfigError(f"{text!r} is not a duration; write 90s, 15m, 36h, 7d or 2w")
    return float(number) * _DURATIONS_S[unit]
