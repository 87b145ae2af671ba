"""`hicache-storage verify`: reads and checks every page."""

from __future__ import annotations

import argparse
from collections import Counter
from typing import Any

from ..errors import InvalidKey
from ..keys import split_stored_key
from ..page import HEADER_BYTES
from .output import Answer, plural
from .reading import Verdict, read_and_check
from .stores import opened, shown_url
from .survey import selected, survey

SHOWN = 20


def run_verify(arguments: argparse.Namespace) -> Answer:
    """Checks what the selection holds; with --delete-bad deletes pages that are bad twice."""
    needs = ("scan", "delete") if arguments.delete_bad else ("scan",)
    with opened(arguments, *needs, writes=arguments.delete_bad) as store:
        found = survey(store)
        chosen = {one.digest: one for one in selected(found, arguments.namespace, arguments.model)}
        names = []
        for page in store._caller.scan(""):
            try:
                digest, _ = split_stored_key(page.key)
            except InvalidKey:
                continue
            if digest in chosen:
                names.append((page.key, page.stored_bytes - HEADER_BYTES))
        counts: Counter[str] = Counter()
        wrong: list[Verdict] = []
        for verdict in read_and_check(store, names):
            counts[verdict.state] += 1
            if verdict.state in ("bad", "unreadable"):
                wrong.append(verdict)
        deleted = _delete_bad(store, wrong, dict(names)) if arguments.delete_bad else 0
    document: dict[str, Any] = {
        "store": shown_url(arguments.url),
        "pages": len(names),
        "good": counts["good"],
        "bad": counts["bad"],
        "missing": counts["missing"],
        "unreadable": counts["unreadable"],
        "deleted": deleted,
        "wrong": [{"key": one.name, "state": one.state, "reason": one.reason} for one in wrong],
    }
    return Answer(not wrong, document, _as_text(document, arguments.delete_bad))


def _delete_bad(store: Any, wrong: list[Verdict], sizes: dict[str, int]) -> int:
    """Deletes pages that a second read finds bad again; how many."""
    bad = [(one.name, sizes[one.name]) for one in wrong if one.state == "bad"]
    again = [one.name for one in read_and_check(store, bad) if one.state == "bad"]
    return sum(sum(store._caller.delete([name])) for name in again)


def _as_text(document: dict[str, Any], delete_bad: bool) -> str:
    lines = [f"{one['state']}  {one['key']}  {one['reason']}" for one in document["wrong"][:SHOWN]]
    if len(document["wrong"]) > SHOWN:
        lines.append(f"... and {len(document['wrong']) - SHOWN} more (all of them with --json)")
    summary = (
        f"{plural(document['pages'], 'page')} read: {document['good']} good, "
        f"{document['bad']} bad, {document['unreadable']} unreadable"
    )
    if document["missing"]:
        summary += f", {document['missing']} gone meanwhile"
    if document["deleted"]:
        summary += f"; {document['deleted']} bad ones deleted"
    elif document["bad"] and not delete_bad:
        summary += "; --delete-bad would delete the bad ones"
    return "\n".join([*lines, summary])
