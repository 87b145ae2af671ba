"""What a store holds, by one scan: namespaces, pages, pairs. And `hicache-storage stat`."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ..errors import ConfigError, InvalidKey
from ..keys import DRAFT_TAG, RECORD_TAG, split_page_key, split_stored_key
from ..namespace import Namespace
from ..store import Store
from .output import Answer, ago, plural, size, table
from .stores import opened, shown_url

TARGET_TAG = ""


@dataclass
class Pool:
    """The pages of one namespace that share a tag: those of one pool."""

    pages: int = 0
    stored_bytes: int = 0
    oldest_s: float | None = None
    newest_s: float | None = None
    hashes: set[str] = field(default_factory=set)

    def add(self, page_hash: str, stored_bytes: int, used_s: float | None) -> None:
        self.pages += 1
        self.stored_bytes += stored_bytes
        self.hashes.add(page_hash)
        if used_s is not None:
            self.oldest_s = used_s if self.oldest_s is None else min(self.oldest_s, used_s)
            self.newest_s = used_s if self.newest_s is None else max(self.newest_s, used_s)

    def as_json(self) -> dict[str, Any]:
        return {
            "pages": self.pages,
            "stored_bytes": self.stored_bytes,
            "oldest_used_s": self.oldest_s,
            "newest_used_s": self.newest_s,
        }


@dataclass
class Holding:
    """Everything stored under one namespace."""

    digest: str
    namespace: Namespace | None
    """None if its record is lost or of another format."""
    pools: dict[str, Pool] = field(default_factory=dict)
    """By tag: "" for target pages, "d" for draft pages."""

    @property
    def target(self) -> Pool:
        return self.pools.get(TARGET_TAG, Pool())

    @property
    def draft(self) -> Pool:
        return self.pools.get(DRAFT_TAG, Pool())

    @property
    def role(self) -> str:
        """ "target", "draft", or both where one model is each in different set-ups."""
        roles = {TARGET_TAG: "target", DRAFT_TAG: "draft"}
        return "+".join(roles.get(tag, tag) for tag in sorted(self.pools))

    def named(self) -> str:
        """A short name for people."""
        if self.namespace is None:
            return f"{self.digest[:12]} (its record is lost)"
        return f"{self.digest[:12]} ({self.namespace.model})"


@dataclass
class Survey:
    """One scan of a store."""

    holdings: dict[str, Holding]
    foreign: int = 0
    """Entries whose names aren't those of pages."""

    def fitting(self, one: Holding, tag: str) -> list[Holding]:
        """The other halves of `one`: holdings of the pages with this tag that may pair with it."""
        return [
            other
            for other in self.holdings.values()
            if tag in other.pools and may_pair(one.namespace, other.namespace)
        ]

    def paired_hashes(self, target: Holding) -> set[str]:
        """Hashes of the target pages whose draft is stored too."""
        drafts = self.fitting(target, DRAFT_TAG)
        return target.target.hashes & set().union(*(draft.draft.hashes for draft in drafts))

    def orphan_hashes(self, draft: Holding) -> set[str]:
        """Hashes of the draft pages of which no target is stored."""
        targets = self.fitting(draft, TARGET_TAG)
        return draft.draft.hashes - set().union(*(target.target.hashes for target in targets))


def may_pair(one: Namespace | None, other: Namespace | None) -> bool:
    """Whether pages of the two may belong to one server: the same tokens, tenant and rank. An
    MLA pool is the same on every tensor-parallel rank. Unknown namespaces may."""
    if one is None or other is None:
        return True
    same = ("page_size", "tenant", "pp_rank", "pp_size", "cp_rank", "cp_size")
    if any(getattr(one, name) != getattr(other, name) for name in same):
        return False
    if "mla" in (one.pool, other.pool):
        return True
    return (one.tp_rank, one.tp_size) == (other.tp_rank, other.tp_size)


def survey(store: Store) -> Survey:
    """Scans the whole store. Needs the capability "scan"."""
    holdings: dict[str, Holding] = {}
    foreign = 0
    for page in store._caller.scan(""):
        try:
            digest, key = split_stored_key(page.key)
            tag, page_hash = split_page_key(key)
        except InvalidKey:
            foreign += 1
            continue
        holding = holdings.get(digest)
        if holding is None:
            holding = holdings[digest] = Holding(digest, None)
        if (tag, page_hash) != (RECORD_TAG, digest):
            pool = holding.pools.setdefault(tag, Pool())
            pool.add(page_hash, page.stored_bytes, page.used_s)
    for digest, holding in holdings.items():
        holding.namespace = store._read_record(digest)
    return Survey(dict(sorted(holdings.items())), foreign)


def selected(
    found: Survey, digests: Iterable[str] = (), model: str | None = None, tenant: str | None = None
) -> list[Holding]:
    """The holdings that fit all that is given. Raises ConfigError for a digest that isn't there."""
    digests = list(digests)
    for start in digests:
        if not any(digest.startswith(start.lower()) for digest in found.holdings):
            known = ", ".join(digest[:12] for digest in found.holdings) or "none"
            raise ConfigError(
                f"no namespace has a digest that begins {start!r}: nothing was stored in it yet, "
                f"or it is mistyped; stored: {known}"
            )
    return [
        one
        for one in found.holdings.values()
        if (not digests or any(one.digest.startswith(start.lower()) for start in digests))
        and (model is None or (one.namespace is not None and one.namespace.model == model))
        and (tenant is None or (one.namespace is not None and one.namespace.tenant == tenant))
    ]


def run_stat(arguments: argparse.Namespace) -> Answer:
    """`usage` and one scan, as far as the backend has them."""
    with opened(arguments) as store:
        usage = store.usage() if "usage" in store.capabilities else None
        found = survey(store) if "scan" in store.capabilities else None
        document: dict[str, Any] = {
            "store": shown_url(arguments.url),
            "backend": store.name,
            "scope": store.scope,
            "usage": usage._asdict() if usage is not None else None,
            "namespaces": None,
            "foreign_entries": found.foreign if found else None,
        }
        if found is not None:
            document["namespaces"] = [_as_json(found, one) for one in found.holdings.values()]
    return Answer(True, document, _as_text(document))


def _as_json(found: Survey, one: Holding) -> dict[str, Any]:
    has_target, has_draft = TARGET_TAG in one.pools, DRAFT_TAG in one.pools
    pairs = len(found.paired_hashes(one)) if has_target else None
    return {
        "digest": one.digest,
        "role": one.role,
        "namespace": dataclasses.asdict(one.namespace) if one.namespace is not None else None,
        "pools": {
            {TARGET_TAG: "target", DRAFT_TAG: "draft"}.get(tag, tag): pool.as_json()
            for tag, pool in sorted(one.pools.items())
        },
        "pairs": pairs,
        # Without a single pair it is a server without a draft model, which loses none.
        "lost_drafts": one.target.pages - pairs if pairs else (0 if has_target else None),
        "orphan_drafts": len(found.orphan_hashes(one)) if has_draft else None,
    }


def _as_text(document: dict[str, Any]) -> str:
    lines = [f"store       {document['store']} (backend {document['backend']})"]
    usage = document["usage"]
    if usage is not None:
        limit = usage["capacity_bytes"]
        of_limit = f" of {size(limit)}" if limit is not None else ""
        used = size(usage["stored_bytes"])
        lines.append(f"holds       {plural(usage['pages'], 'page')}, {used}{of_limit}")
    if document["namespaces"] is None:
        lines.append("namespaces  not known: this backend has no scan")
        return "\n".join(lines)
    if document["foreign_entries"]:
        lines.append(f"foreign     {document['foreign_entries']} entries that are no pages")
    if not document["namespaces"]:
        lines.append("namespaces  none: nothing is stored")
        return "\n".join(lines)
    rows = []
    for one in document["namespaces"]:
        for role, pool in one["pools"].items():
            rows.append(_row(one, role, pool))
        if not one["pools"]:
            rows.append(_row(one, "(no pages)", Pool().as_json()))
    headers = ("namespace", "pool of", "model", "meaning", "pages", "size", "last used", "pairs")
    return "\n".join([*lines, "", table(headers, rows)])


def _row(one: dict[str, Any], role: str, pool: dict[str, Any]) -> tuple[object, ...]:
    fields = one["namespace"]
    pairs = ""
    if role == "target" and one["pairs"]:
        pairs = f"{one['pairs']} pairs, {one['lost_drafts']} drafts lost"
    elif role == "draft":
        pairs = f"{one['orphan_drafts']} orphans"
    return (
        one["digest"][:12],
        role,
        fields["model"] if fields else "?",
        meaning(Namespace(**fields)) if fields else "its record is lost",
        pool["pages"],
        size(pool["stored_bytes"]),
        ago(pool["newest_used_s"]) if pool["newest_used_s"] is not None else "",
        pairs,
    )


def meaning(namespace: Namespace) -> str:
    """The rest of a namespace in a few words; only what isn't the usual case."""
    parts = [
        f"{namespace.pool} {namespace.dtype}",
        f"{namespace.page_size} tokens",
        f"{namespace.layers} layers",
        namespace.order,
    ]
    if namespace.first_layer:
        parts.append(f"from layer {namespace.first_layer}")
    for axis in ("tp", "pp", "cp"):
        rank, ranks = getattr(namespace, f"{axis}_rank"), getattr(namespace, f"{axis}_size")
        if ranks > 1:
            parts.append(f"{axis} {rank}/{ranks}")
    parts += [f"revision {namespace.revision}"] if namespace.revision else []
    parts += [f"tenant {namespace.tenant}"] if namespace.tenant else []
    return ", ".join(parts)
