"""Rates of copies that several ranks make at once, from each rank's clock.

One host has one monotonic clock, so that what ranks read off it can be compared. The rate of many
is all their bytes over the time from the earliest start to the latest arrival.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

Row = dict[str, Any]
WAYS = ("ceiling", "ours")


class Copy(NamedTuple):
    """One copy by one rank, in seconds of the host's clock."""

    verb: str
    asked: float
    called: float
    """When the call had returned."""
    arrived: float
    """When the bytes were seen to have arrived."""
    size_bytes: int


@dataclass(frozen=True)
class Case:
    """What moves at once, and on which ranks. The others are idle."""

    ranks: tuple[int, ...]
    verbs: tuple[str, ...]

    @property
    def moves(self) -> str:
        return " + ".join(self.verbs)

    @property
    def when(self) -> str:
        return "alone" if len(self.ranks) == 1 else "at once"


Found = dict[tuple[Case, str], list[list[Copy]]]
"""A rank's copies by case and way, for each round."""


def cases(ranks: int) -> list[Case]:
    """Each rank alone, then all at once; each way by itself, then both."""
    alone = [(rank,) for rank in range(ranks)]
    at_once = [tuple(range(ranks))] if ranks > 1 else []
    return [
        Case(some, verbs)
        for some in (*alone, *at_once)
        for verbs in (("backup",), ("load",), ("backup", "load"))
    ]


def rate(copies: Iterable[Copy]) -> float:
    """GB/s of these copies together."""
    copies = list(copies)
    seconds = max(copy.arrived for copy in copies) - min(copy.asked for copy in copies)
    return sum(copy.size_bytes for copy in copies) / seconds / 1e9


def overlap_percent(by_rank: Sequence[Sequence[Copy]]) -> float:
    """For how much of the time from the first start to the last arrival every rank was moving."""
    starts = [min(copy.asked for copy in copies) for copies in by_rank]
    ends = [max(copy.arrived for copy in copies) for copies in by_rank]
    return 100 * max(0.0, min(ends) - max(starts)) / (max(ends) - min(starts))


def rows(found: Sequence[Found], several: Sequence[Case]) -> list[tuple[Case, Row]]:
    """For each case a row for each of its ranks and, where they are many, one for them together.

    `found` is by rank. Rates are medians over the rounds. `percent` is of the ceiling's in the same
    rounds; `of_alone_percent` is of what ours had on the same ranks, each alone, in sum. Where both
    ways move, `ours_backup_GBps` and the like are one way's bytes over that way's own time.
    """
    alone: dict[tuple[int, tuple[str, ...]], float] = {}
    table: list[tuple[Case, Row]] = []
    for case in several:
        ours, ceiling = (_turns(found, case, way) for way in ("ours", "ceiling"))
        for place, rank in enumerate(case.ranks):
            mine = [turn[place] for turn in ours]
            row = {"moves": case.moves, "rank": rank}
            row |= _rates(mine, [turn[place] for turn in ceiling])
            if len(case.ranks) == 1:
                alone[rank, case.verbs] = _middle(rate, mine)
            else:
                row |= _beside_alone(mine, alone, case, [rank])
            row["call_ms"] = round(_middle(_call_ms, mine), 2)
            table.append((case, row))
        if len(case.ranks) > 1:
            every = [list(itertools.chain(*turn)) for turn in ours]
            row = {"moves": case.moves, "rank": "together"}
            row |= _rates(every, [list(itertools.chain(*turn)) for turn in ceiling])
            row |= _beside_alone(every, alone, case, case.ranks)
            row["overlap_percent"] = round(_middle(overlap_percent, ours), 1)
            row["ceiling_overlap_percent"] = round(_middle(overlap_percent, ceiling), 1)
            table.append((case, row))
    return table


def _turns(found: Sequence[Found], case: Case, way: str) -> list[list[list[Copy]]]:
    """Copies by round, rank of the case, and order."""
    by_rank = [found[rank][case, way] for rank in case.ranks]
    return [list(turn) for turn in zip(*by_rank, strict=True)]


def _rates(ours: list[list[Copy]], ceiling: list[list[Copy]]) -> Row:
    """Copies by round, of one rank or of all."""
    row: Row = {
        "ours_GBps": round(_middle(rate, ours), 2),
        "ceiling_GBps": round(_middle(rate, ceiling), 2),
        "percent": _percent(_middle(rate, ours), _middle(rate, ceiling)),
        "spread": spread_percent([rate(turn) for turn in ours]),
        "ceiling_spread": spread_percent([rate(turn) for turn in ceiling]),
    }
    verbs = list(dict.fromkeys(copy.verb for copy in ours[0]))
    for verb in verbs if len(verbs) > 1 else ():
        for way, turns in (("ours", ours), ("ceiling", ceiling)):
            only = [[copy for copy in turn if copy.verb == verb] for turn in turns]
            row[f"{way}_{verb}_GBps"] = round(_middle(rate, only), 2)
    return row


def _beside_alone(
    ours: list[list[Copy]],
    alone: dict[tuple[int, tuple[str, ...]], float],
    case: Case,
    ranks: Sequence[int],
) -> Row:
    each = sum(alone[rank, case.verbs] for rank in ranks)
    return {"of_alone_percent": _percent(_middle(rate, ours), each)}


def spread_percent(rates: Sequence[float]) -> float:
    """The range of the middle half, of the median."""
    ordered = sorted(rates)
    quarter = len(ordered) // 4
    return _percent(ordered[-1 - quarter] - ordered[quarter], statistics.median(ordered))


def _call_ms(copies: Sequence[Copy]) -> float:
    return 1e3 * sum(copy.called - copy.asked for copy in copies)


def _middle(measure: Callable[[Any], float], turns: Sequence[Any]) -> float:
    return statistics.median(measure(turn) for turn in turns)


def _percent(part: float, whole: float) -> float:
    return round(100 * part / whole, 1)
