"""`hicache-storage explain`: why a prefix is, or is not, read from a store."""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..keys import DRAFT_TAG, check_page_key, draft_key, page_hashes, stored_key
from ..store import Store
from .output import Answer
from .reading import read_and_check
from .stores import opened, shown_url
from .survey import TARGET_TAG, Holding, Survey, selected, survey
from .verdicts import Finding, Question, verdict_on


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
    code, lines = verdict_on(arguments, question, everything, chosen, findings)
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
