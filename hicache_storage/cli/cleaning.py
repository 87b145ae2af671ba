"""`hicache-storage clean`: deletes pages by namespace, by age, or draft pages without target."""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

from ..errors import ConfigError, InvalidKey
from ..hookspecs import StoredPage
from ..keys import DRAFT_TAG, RECORD_TAG, split_page_key, split_stored_key
from ..store import Store
from .output import Answer, parse_duration, plural, size, table
from .stores import opened, shown_url
from .survey import Holding, Survey, selected, survey

BATCH_PAGES = 128
YOUNG_S = 600.0
"""A draft younger than this may still get its target: it is written first."""


def run_clean(arguments: argparse.Namespace) -> Answer:
    """What is selected must fit everything that is given. Without --yes nothing is deleted."""
    narrowed = bool(arguments.namespace or arguments.model or arguments.older_than)
    if not (narrowed or arguments.orphan_drafts or arguments.all):
        raise ConfigError(
            "say what to clean: --namespace, --model, --older-than, --orphan-drafts or --all"
        )
    if arguments.all and (narrowed or arguments.orphan_drafts):
        raise ConfigError("--all takes every page; it can't be combined with a narrower choice")
    older_than_s = parse_duration(arguments.older_than) if arguments.older_than else None
    if arguments.orphan_drafts and older_than_s is None:
        older_than_s = YOUNG_S
    with opened(arguments, "scan", "delete", writes=arguments.yes) as store:
        found = survey(store)
        chosen = {one.digest: one for one in selected(found, arguments.namespace, arguments.model)}
        orphans = _orphans(found, chosen) if arguments.orphan_drafts else None
        picked: list[StoredPage] = []
        unknown_age = 0
        for page in _pages(store, chosen):
            digest, key = split_stored_key(page.key)
            if orphans is not None and key not in orphans.get(digest, ()):
                continue
            if older_than_s is not None:
                if page.used_s is None and not (orphans is not None and not arguments.older_than):
                    unknown_age += 1
                    continue
                if page.used_s is not None and time.time() - page.used_s < older_than_s:
                    continue
            picked.append(page)
        if orphans is not None:
            picked = [page for page in picked if not _target_has_come(store, page.key, found)]
        deleted = _delete(store, picked) if arguments.yes else 0
        if arguments.yes and orphans is None and older_than_s is None:
            _delete_empty_records(store, chosen)
    by_namespace: Counter[str] = Counter(split_stored_key(page.key)[0] for page in picked)
    document: dict[str, Any] = {
        "store": shown_url(arguments.url),
        "dry_run": not arguments.yes,
        "selected_pages": len(picked),
        "selected_bytes": sum(page.stored_bytes for page in picked),
        "deleted_pages": deleted,
        "unknown_age_pages": unknown_age,
        "namespaces": [
            {"digest": digest, "name": found.holdings[digest].named(), "pages": count}
            for digest, count in sorted(by_namespace.items())
        ],
    }
    good = not arguments.yes or deleted == len(picked)
    return Answer(good, document, _as_text(document))


def _pages(store: Store, chosen: dict[str, Holding]) -> Iterator[StoredPage]:
    for page in store.scan(""):
        try:
            digest, _ = split_stored_key(page.key)
        except InvalidKey:
            continue
        if digest in chosen:
            yield page


def _orphans(found: Survey, chosen: dict[str, Holding]) -> dict[str, set[str]]:
    return {
        digest: {f"{DRAFT_TAG}:{page_hash}" for page_hash in found.orphan_hashes(holding)}
        for digest, holding in chosen.items()
        if DRAFT_TAG in holding.pools
    }


def _delete(store: Store, picked: list[StoredPage]) -> int:
    """Targets before drafts, so that no visible target loses its draft."""
    tags = {page.key: split_page_key(split_stored_key(page.key)[1])[0] for page in picked}
    names = sorted(tags, key=lambda name: tags[name] != "")
    deleted = 0
    for start in range(0, len(names), BATCH_PAGES):
        deleted += sum(store._caller.delete(names[start : start + BATCH_PAGES]))
    return deleted


def _target_has_come(store: Store, name: str, found: Survey) -> bool:
    """Whether an orphan isn't one any more: its target may have been written since the scan."""
    digest, key = split_stored_key(name)
    page_hash = split_page_key(key)[1]
    targets = found.fitting(found.holdings[digest], "")
    return any(store._caller.exists([f"{one.digest}/{page_hash}"], None) for one in targets)


def _delete_empty_records(store: Store, chosen: dict[str, Holding]) -> None:
    """Removes the readable record of a namespace that holds nothing else any more. A server that
    is at work in it won't write the record again, so this is for namespaces that are to go."""
    for digest in chosen:
        record = f"{digest}/{RECORD_TAG}:{digest}"
        names = {page.key for page in store._caller.scan(f"{digest}/")}
        if names == {record}:
            store._caller.delete([record])


def _as_text(document: dict[str, Any]) -> str:
    lines = []
    if document["namespaces"]:
        rows = [(one["name"], one["pages"]) for one in document["namespaces"]]
        lines.append(table(("namespace", "pages"), rows))
    chosen = f"{plural(document['selected_pages'], 'page')}, {size(document['selected_bytes'])}"
    if document["dry_run"]:
        lines.append(f"would delete {chosen}; nothing was deleted (--yes deletes)")
    else:
        lines.append(f"selected {chosen}; deleted {document['deleted_pages']}")
    if document["unknown_age_pages"]:
        lines.append(
            f"{plural(document['unknown_age_pages'], 'page')} left out: the backend does not know "
            "when they were used"
        )
    return "\n".join(lines)
