"""`hicache-storage explain`: why a prefix is, or is not, read from a store."""

from __future__ import annotations

import argparse
import json
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..keys import DRAFT_TAG, HashMode, check_page_key, draft_key, page_hashes, stored_key
from ..store import Store
from .output import Answer, plural
from .reading import read_and_check
from .stores import opened, shown_url
from .survey import TARGET_TAG, Holding, Survey, meaning, selected, survey

SHOWN = 5


@dataclass
class Question:
    """What an engine would ask for."""

    hashes: list[str]
    tokens: list[int] | None = None
    page_size: int | None = None
    mode: HashMode | None = None
    pairing: str = "best_effort"
    threshold_pages: int = 0


@dataclass
class Finding:
    """What one namespace has of the prefix."""

    holding: Holding
    stored: list[bool]
    """Which pages are stored, by the scan."""
    run: int
    """The leading run, as the backend's own `exists` says."""
    bad: dict[int, str] = field(default_factory=dict)
    """Pages of the run that can't be used, and why."""
    drafts: list[bool] | None = None
    """Which pages of the run have a good draft; None if nobody stores drafts beside it."""

    def usable(self, pairing: str) -> int:
        """The leading run that an engine may use."""
        run = min([self.run, *self.bad])
        if pairing == "required":
            drafts = self.drafts or []
            run = min(run, next((i for i, there in enumerate(drafts) if not there), len(drafts)))
        return run


def run_explain(arguments: argparse.Namespace) -> Answer:
    """Scans the store once and reads the leading run; changes nothing."""
    question = _question(arguments)
    with opened(arguments, "scan") as store:
        found = survey(store)
        everything = [one for one in found.holdings.values() if TARGET_TAG in one.pools]
        chosen = [
            one
            for one in selected(found, arguments.namespace, arguments.model, arguments.tenant)
            if TARGET_TAG in one.pools
        ]
        fitting = [one for one in chosen if _page_size_fits(one, question)]
        findings = [_look(store, found, one, question) for one in fitting]
    findings.sort(key=lambda one: (-one.usable(question.pairing), -sum(one.stored)))
    if findings and any(any(one.stored) for one in findings):
        findings = [one for one in findings if any(one.stored)]
    code, lines = _verdict(arguments, question, everything, chosen, findings)
    best = findings[0] if findings else None
    usable = best.usable(question.pairing) if best is not None else 0
    if usable < question.threshold_pages:
        usable = 0
    document: dict[str, Any] = {
        "store": shown_url(arguments.url),
        "asked_pages": len(question.hashes),
        "usable_pages": usable,
        "verdict": code,
        "explanation": lines,
        "namespaces": [_as_json(one, question) for one in findings],
    }
    return Answer(code == "readable", document, "\n".join(lines))


def _question(arguments: argparse.Namespace) -> Question:
    question = Question([], pairing=arguments.pairing, threshold_pages=arguments.threshold_pages)
    if arguments.hashes:
        words = list(arguments.hashes)
        if len(words) == 1 and words[0].startswith("@"):
            words = Path(words[0][1:]).read_text().split()
        question.hashes = [check_page_key(word.strip(",")) for word in words]
        if any(":" in key for key in question.hashes):
            raise ConfigError("--hashes takes page hashes without a tag; drafts are looked up too")
    else:
        if arguments.page_size is None or arguments.mode is None:
            raise ConfigError(
                "--tokens needs --page-size and --mode: 'tokens', or 'pairs' for a server with "
                "EAGLE speculation (both must be those of the server)"
            )
        question.tokens = _read_tokens(arguments.tokens)
        question.page_size, question.mode = arguments.page_size, arguments.mode
        question.hashes = page_hashes(question.tokens, arguments.page_size, mode=arguments.mode)
    if not question.hashes:
        raise ConfigError(
            f"{len(question.tokens or ())} tokens hold no whole page of {question.page_size} tokens"
            + (" and the token after it" if question.mode == "pairs" else "")
        )
    return question


def _read_tokens(name: str) -> list[int]:
    text = sys.stdin.read() if name == "-" else Path(name).read_text()
    try:
        if text.lstrip().startswith("["):
            tokens = json.loads(text)
            if not all(type(token) is int for token in tokens):
                raise ValueError("not all of them are whole numbers")
            return list(tokens)
        return [int(word) for word in re.split(r"[\s,]+", text.strip()) if word]
    except ValueError as error:
        raise ConfigError(
            f"{name}: expected token ids, as a JSON list or numbers: {error}"
        ) from None


def _page_size_fits(one: Holding, question: Question) -> bool:
    return (
        question.page_size is None
        or one.namespace is None
        or one.namespace.page_size == question.page_size
    )


def _look(store: Store, found: Survey, one: Holding, question: Question) -> Finding:
    hashes = question.hashes
    names = [stored_key(one.digest, page_hash) for page_hash in hashes]
    run = store._caller.exists(names, None)
    finding = Finding(one, [page_hash in one.target.hashes for page_hash in hashes], run)
    if one.namespace is not None:
        wanted = [(name, one.namespace.page_bytes) for name in names[:run]]
        for i, verdict in enumerate(read_and_check(store, wanted)):
            if verdict.state != "good":
                finding.bad[i] = verdict.reason or "it is stored with another length, or just gone"
    drafts = found.fitting(one, DRAFT_TAG)
    if drafts and question.pairing != "off":
        finding.drafts = [False] * run
        for draft in drafts:
            _look_for_drafts(store, draft, hashes[:run], finding.drafts)
    return finding


def _look_for_drafts(store: Store, draft: Holding, hashes: list[str], good: list[bool]) -> None:
    """Sets `good[i]` for each page of which this namespace holds a good draft."""
    if draft.namespace is None:
        return
    there = [i for i, page_hash in enumerate(hashes) if page_hash in draft.draft.hashes]
    wanted = [
        (stored_key(draft.digest, draft_key(hashes[i])), draft.namespace.page_bytes) for i in there
    ]
    for i, verdict in zip(there, read_and_check(store, wanted), strict=True):
        good[i] = good[i] or verdict.state == "good"


# -- the verdict -------------------------------------------------------------------------------


def _verdict(
    arguments: argparse.Namespace,
    question: Question,
    everything: list[Holding],
    chosen: list[Holding],
    findings: list[Finding],
) -> tuple[str, list[str]]:
    """A code, and the explanation in sentences, the most important one first."""
    count = plural(len(question.hashes), "page")
    if not everything:
        return "store_empty", ["No target page is stored at all: nothing was written here yet."]
    if not chosen:
        asked = arguments.model or arguments.tenant or ", ".join(arguments.namespace)
        lines = [f"No namespace with target pages fits {asked!r}. Stored are:"]
        lines += [f"  {one.named()}: {_meaning(one)}" for one in everything]
        return "no_such_namespace", lines + _elsewhere(question, everything, None)
    if not findings:
        sizes = sorted({one.namespace.page_size for one in chosen if one.namespace})
        lines = [
            f"Only pages of other sizes are stored: {', '.join(map(str, sizes))} tokens, not "
            f"{question.page_size}. A server with another page size can't read them."
        ]
        return "other_page_size", lines + _other_hashing(question, everything)
    best = findings[0]
    if not any(best.stored):
        others = [one for one in everything if one not in chosen]
        elsewhere = _elsewhere(question, others, best.holding)
        if elsewhere:
            lines = [f"None of the {count} is stored in {best.holding.named()}."]
            return "other_namespace", lines + elsewhere
        lines = [f"None of the {count} is stored in any namespace."]
        return "not_stored", lines + _other_hashing(question, everything)
    code, lines = _of_one(best, question)
    for other in findings[1:]:
        lines.append(
            f"{other.holding.named()} holds {sum(other.stored)} of the {count}, usable "
            f"{other.usable(question.pairing)}; {_difference(best.holding, other.holding)}."
        )
    if code == "first_page_missing":
        others = [one for one in everything if all(one is not f.holding for f in findings)]
        lines += _elsewhere(question, others, best.holding)
    return code, lines


def _of_one(best: Finding, question: Question) -> tuple[str, list[str]]:
    """The verdict on the namespace that has most of the prefix."""
    total, stored = len(question.hashes), sum(best.stored)
    usable, place = best.usable(question.pairing), best.holding.named()
    behind = sum(best.stored[best.run :])
    first_bad = min(best.bad, default=None)
    notes = _draft_notes(best, question)
    if best.run == 0:
        return "first_page_missing", [
            f"The first page is missing in {place}, so nothing can be used, although {stored} of "
            f"{total} pages are stored: a prefix is read from its beginning up to its first hole. "
            "It was never written (write_back and write_through_selective write late), or it was "
            "evicted first."
        ]
    if first_bad is not None and first_bad == usable:
        return "bad_page", [
            f"Page {first_bad} of {total} in {place} can't be used: {best.bad[first_bad]}. "
            f"{plural(usable, 'page')} before it can be read. The next read by a server puts it "
            "aside; `verify --delete-bad` does it now.",
            *notes,
        ]
    if question.pairing == "required" and usable < best.run:
        why = "no draft pages are stored beside it" if best.drafts is None else "its draft is not"
        return "draft_missing", [
            f"Page {usable} of {total} is stored in {place}, but {why}; with pairing 'required' "
            f"the usable run ends there, at {plural(usable, 'page')} of {best.run}.",
            *notes,
        ]
    if usable < total:
        rest = f", although {behind} behind it are stored" if behind else ", and none behind it"
        code, lines = (
            "hole",
            [
                f"Page {best.run} of {total} is missing in {place}{rest}: "
                f"{plural(usable, 'page')} can be read."
            ],
        )
    else:
        code, lines = "readable", [f"All {total} pages can be read from {place}."]
    if usable < question.threshold_pages:
        return "below_threshold", [
            f"{plural(usable, 'page')} can be read from {place}, fewer than the threshold of "
            f"{question.threshold_pages}: the engine doesn't prefetch so short a run.",
            *notes,
        ]
    return code, lines + notes


def _draft_notes(best: Finding, question: Question) -> list[str]:
    if question.pairing == "off" or best.drafts is None:
        return []
    lost = best.drafts.count(False)
    if not lost:
        return ["The draft of each of them is stored too."]
    first = best.drafts.index(False)
    return [
        f"{lost} of the {best.run} drafts are missing or bad (the first at page {first}): the "
        "draft model starts from zeros there, and fewer of its tokens are accepted."
    ]


def _elsewhere(question: Question, others: list[Holding], asked: Holding | None) -> list[str]:
    lines = []
    for other in others:
        there = sum(page_hash in other.target.hashes for page_hash in question.hashes)
        if there:
            what = f"{there} of the pages are stored in {other.named()}"
            differs = f"; {_difference(asked, other)}" if asked is not None else ""
            lines.append(f"{what}{differs}.")
    return lines


def _difference(one: Holding, other: Holding) -> str:
    if one.namespace is None or other.namespace is None:
        return "how they differ is not known, since a record is lost"
    differing = one.namespace.differences(other.namespace)
    return f"it differs in {'; '.join(differing[:SHOWN])}"


def _other_hashing(question: Question, everything: list[Holding]) -> list[str]:
    """Whether the same tokens are found when they are hashed in another way."""
    if question.tokens is None or question.page_size is None:
        return []
    sizes = {one.namespace.page_size for one in everything if one.namespace is not None}
    lines = []
    modes: tuple[HashMode, ...] = ("tokens", "pairs")
    for page_size in sorted(sizes | {question.page_size}):
        for mode in modes:
            if (page_size, mode) == (question.page_size, question.mode):
                continue
            hashes = page_hashes(question.tokens, page_size, mode=mode)
            for one in everything:
                there = sum(page_hash in one.target.hashes for page_hash in hashes)
                if there:
                    lines.append(
                        f"Hashed with --mode {mode} --page-size {page_size}, {there} of "
                        f"{plural(len(hashes), 'page')} are stored in {one.named()}: writer and "
                        "reader hash in different ways."
                    )
    return lines


def _meaning(one: Holding) -> str:
    return meaning(one.namespace) if one.namespace is not None else "meaning not known"


def _as_json(one: Finding, question: Question) -> dict[str, Any]:
    missing = [i for i, there in enumerate(one.stored) if not there]
    return {
        "digest": one.holding.digest,
        "model": one.holding.namespace.model if one.holding.namespace is not None else None,
        "stored_pages": sum(one.stored),
        "run_pages": one.run,
        "usable_pages": one.usable(question.pairing),
        "missing": missing,
        "bad": {str(i): reason for i, reason in sorted(one.bad.items())},
        "drafts_missing": None
        if one.drafts is None
        else [i for i, there in enumerate(one.drafts) if not there],
    }
