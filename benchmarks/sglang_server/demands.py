"""What is demanded of the rows, and whether they show it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from .accept import BEST_EFFORT, COLD, HEALED, NEW_TOKENS, PROMPT_TOKENS, REQUIRED, RESTARTED
from .run import Row
from .stores import BUILT_IN
from .two_gpus import (
    ALL_DRAFTS_OF_ONE,
    BACK,
    DRAFTS_OF_ONE,
    LOST_FROM,
    MLA,
    MLA_BEST_EFFORT,
    OTHERS,
    RANKS,
    TARGETS_OF_ONE,
)

PAGE = 64
WHOLE = (PROMPT_TOKENS - 1) // PAGE * PAGE
KEPT, LOST = 0.98, 2.0
EAGLE3_COLD, EAGLE3_KEPT = 7.0, 0.9


@dataclass(frozen=True)
class Demand:
    """One demand, what was found, and whether that is what is demanded; None: not measured."""

    what: str
    where: str
    wanted: str
    found: str
    met: bool | None


Rows = dict[str, Row]


def of_one_gpu(rows: Iterable[Row], stores: Iterable[str], *, eagle3: bool) -> list[Demand]:
    """The demands on one GPU. `stores` are this package's."""
    given = list(rows)
    found: list[Demand] = []
    for store in stores:
        at = _stages(given, "STANDALONE", store)
        found += [
            _read(at, store, RESTARTED, WHOLE),
            _kept(at, store, RESTARTED, KEPT),
            _read(at, store, BEST_EFFORT, WHOLE),
            _number(
                at.get(BEST_EFFORT), store, BEST_EFFORT, f"at most {LOST:g}", lambda n: n <= LOST
            ),
            _read(at, store, REQUIRED, 0),
            _kept(at, store, REQUIRED, KEPT),
            _read(at, store, HEALED, WHOLE),
            _kept(at, store, HEALED, KEPT),
            _same_text(at, store, (RESTARTED, BEST_EFFORT, REQUIRED, HEALED)),
        ]
        found += _first_tokens(given, store)
    if eagle3:
        names = sorted({r["pair"] for r in given if r.get("pair", "").startswith("EAGLE3")})
        for name in names or ["EAGLE3"]:
            at = _stages(given, name)
            where = at[COLD]["store"] if COLD in at else "-"
            found += [
                _number(at.get(COLD), where, f"{name}: cold", f"at least {EAGLE3_COLD:g}",
                        lambda n: n >= EAGLE3_COLD),
                _read(at, where, RESTARTED, WHOLE, f"{name}: "),
                _kept(at, where, RESTARTED, EAGLE3_KEPT, f"{name}: "),
            ]  # fmt: skip
    return found


def of_two_gpus(rows: Iterable[Row], stores: Iterable[str]) -> list[Demand]:
    """The demands on two GPUs."""
    given = list(rows)
    found: list[Demand] = []
    for store in stores:
        at = _stages(given, "STANDALONE", store)
        found += [
            _stored(given, "STANDALONE", store, {f"{kind} {r}/{RANKS}": WHOLE // PAGE
                    for kind in ("draft", "target") for r in range(RANKS)}),
            _read(at, store, RESTARTED, WHOLE),
            _kept(at, store, RESTARTED, KEPT),
            _read(at, store, BACK, WHOLE),
            _kept(at, store, BACK, KEPT),
        ]  # fmt: skip
        for stage in (DRAFTS_OF_ONE, TARGETS_OF_ONE):
            found += [
                _read(at, store, stage, LOST_FROM * PAGE),
                _kept(at, store, stage, KEPT),
                _read(at, store, f"{stage}, {HEALED}", WHOLE),
            ]
        found += [
            _read(at, store, ALL_DRAFTS_OF_ONE, WHOLE),
            _same_text(at, store, [stage for stage in at if stage != COLD]),
        ]
    for name in OTHERS:
        at = _stages([row for row in given if row.get("stage", "").startswith(name)], "STANDALONE")
        where = at[name]["store"] if name in at else "-"
        found += [_read(at, where, name, 0), _read(at, where, f"{name}, again", None)]
    return found + _latent(given)


def _latent(rows: list[Row]) -> list[Demand]:
    at = _stages(rows, MLA)
    where = at[COLD]["store"] if COLD in at else "-"
    log = next((row for row in rows if row["part"] == "log" and row["stage"] == MLA), None)
    read = at[RESTARTED]["from_storage"] if RESTARTED in at else None
    refused = None if log is None else bool(log["refused"])
    return [
        # As SGLang writes: rank 0 alone, for all ranks; of the draft's shards it writes its own.
        _stored(rows, MLA, where, {f"draft 0/{RANKS}": WHOLE // PAGE, "target 0/1": WHOLE // PAGE}),
        Demand(
            f"{MLA}: works, or is refused with a message",
            where,
            f"{WHOLE} tokens from storage, or none and a warning",
            f"{read} tokens, warning: {refused}",
            None if read is None else read == WHOLE or (read == 0 and refused is True),
        ),
        _read(at, where, MLA_BEST_EFFORT, WHOLE),
        _same_text(at, where, (RESTARTED, MLA_BEST_EFFORT)),
    ]


def _stages(rows: Iterable[Row], pair: str, store: str | None = None) -> Rows:
    """The rows of accept lengths, by stage."""
    return {
        row["stage"]: row
        for row in rows
        if row["part"] == "accept"
        and row["pair"].startswith(pair)
        and store in (None, row["store"])
    }


def _read(at: Rows, store: str, stage: str, wanted: int | None, prefix: str = "") -> Demand:
    """`wanted` tokens come from storage; None: at least one page."""
    row = at.get(stage)
    found = None if row is None else int(row["from_storage"])
    met = None if found is None else found > 0 if wanted is None else found == wanted
    text = "some" if wanted is None else str(wanted)
    return Demand(f"{prefix}{stage}: tokens from storage", store, text, _text(found), met)


def _kept(at: Rows, store: str, stage: str, share: float, prefix: str = "") -> Demand:
    """The accept length is at least that share of the cold one."""
    what = f"{prefix}{stage}: accept length"
    cold, row = _accept(at.get(COLD)), _accept(at.get(stage))
    if cold is None:
        return Demand(what, store, f"at least {share:g} x cold", _text(row), None)
    least = share * cold
    wanted = f"at least {share:g} x {cold:g} = {least:.2f}"
    return Demand(what, store, wanted, _text(row), None if row is None else row >= least)


def _number(
    row: Row | None, store: str, stage: str, wanted: str, good: Callable[[float], bool]
) -> Demand:
    found = _accept(row)
    met = None if found is None else good(found)
    return Demand(f"{stage}: accept length", store, wanted, _text(found), met)


def _accept(row: Row | None) -> float | None:
    return None if row is None else row["accept_length"]


def _same_text(at: Rows, store: str, stages: Iterable[str]) -> Demand:
    found = {stage: at[stage]["same_text"] for stage in stages if stage in at}
    other = [stage for stage, same in found.items() if not same]
    return Demand(
        f"the same {NEW_TOKENS} tokens as cold",
        store,
        "in all stages",
        f"in {len(found) - len(other)} of {len(found)}" + "".join(f"; not {one}" for one in other),
        None if not found or COLD not in at else not other,
    )


def _first_tokens(rows: list[Row], store: str) -> list[Demand]:
    found = []
    for row in rows:
        if row["part"] == "first token" and row["store"] == store and "ratio" in row:
            spread = row.get("quartiles")
            found.append(
                Demand(
                    f"first token, {row['model']}, {row['prompt_tokens']} tokens",
                    store,
                    f"at most 1 x {BUILT_IN}",
                    f"{row['ratio']:g}" + (f" ({spread[0]:g} to {spread[1]:g})" if spread else ""),
                    row["ratio"] <= 1.0,
                )
            )
    return found or [Demand("first token", store, f"at most 1 x {BUILT_IN}", "-", None)]


def _stored(rows: list[Row], pair: str, store: str, wanted: dict[str, int]) -> Demand:
    found = [
        row["stored"]
        for row in rows
        if row["part"] == "pages" and row["pair"].startswith(pair) and row["store"] == store
    ]
    last = found[-1] if found else None
    return Demand(
        f"{pair}: pages of the prompt by rank", store, _pages(wanted), _pages(last),
        None if last is None else last == wanted,
    )  # fmt: skip


def _pages(found: dict[str, int] | None) -> str:
    if found is None:
        return "-"
    return ", ".join(f"{count} {name}" for name, count in sorted(found.items()))


def _text(found: float | None) -> str:
    return "-" if found is None else f"{found:g}"
