"""What `explain` says: one code, and the explanation in sentences, the most important first."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field

from ..keys import HashMode, page_hashes
from .output import plural
from .survey import Holding, meaning

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


def verdict_on(
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
    if code == "readable" and not arguments.namespace:
        lines.append(
            f"That namespace is {_meaning(best.holding)}. A server with another one doesn't read "
            "it: give the one of the server, which its log names at the start, as --namespace."
        )
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
    line = f"{lost} of the {best.run} drafts are missing or bad (the first at page {first})"
    if question.pairing == "required":
        return [f"{line}."]
    return [
        f"{line}: the draft model starts from zeros there, and fewer of its tokens are accepted. "
        "With pairing 'required', which servers of SGLang have unless told otherwise, only "
        f"{plural(best.usable('required'), 'page')} can be read (--pairing required)."
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
