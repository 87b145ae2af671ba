"""The stores that servers are compared with, and the deletion of single pages in them."""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hicache_storage import Namespace, Store, open_store
from hicache_storage.keys import DRAFT_TAG, split_page_key, split_stored_key

BUILT_IN = "SGLang file"
OURS = ("file", "lmdb", "s3")
STORES = (BUILT_IN, *OURS)
"""SGLang's file backend, and this package's own."""
_ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Place:
    """Where servers keep pages, and how SGLang is told."""

    store: str
    """One of STORES."""
    backend: str
    """For --hicache-storage-backend."""
    options: dict[str, Any] = field(default_factory=dict)
    """The extra config."""
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def ours(self) -> bool:
        return self.store != BUILT_IN

    def extra(self, **more: Any) -> str:
        """The extra config as SGLang takes it, with further options."""
        return json.dumps({**self.options, **more})

    def open(self) -> Store:
        """The store itself, opened in this process."""
        return open_store(self.options["url"])


class Shelf:
    """Makes new, empty places under one folder; SeaweedFS is started with the first of S3."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def place(self, store: str, part: str) -> Place:
        """A place of its own for `part`, a word."""
        folder = self.folder / f"{store}-{part}".lower().replace(" ", "-")
        if store == BUILT_IN:
            folder.mkdir(parents=True)
            variable = "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"
            return Place(store, "file", environment={variable: str(folder)})
        url = _seaweedfs() if store == "s3" else f"{store}://{folder}"
        # 'file' is SGLang's own name.
        return Place(
            store, "hicache_storage" if store == "file" else store, {"url": url, "revision": "1"}
        )


def delete_pages(
    place: Place,
    *,
    drafts: bool,
    rank: int | None = None,
    hashes: set[str] | None = None,
) -> int:
    """Deletes draft or target pages, all of them or those of a rank and of page hashes; how many.

    They are gone afterwards: RuntimeError if one is still there.
    """
    with place.open() as store:
        chosen = {
            digest: [key for key in keys if _wanted(key, drafts, hashes)]
            for digest, keys in _keys(store).items()
        }
        deleted = 0
        for digest, namespace in store.namespaces().items():
            if namespace is None or (rank is not None and namespace.tp_rank != rank):
                continue
            if keys := chosen.get(digest):
                left = keys.copy()
                while left:
                    store.delete(namespace, left[:1000])
                    left = left[1000:]
                if any(store.exists(namespace, [key]) for key in keys):
                    raise RuntimeError(f"{place.store}: a deleted page is still there")
                deleted += len(keys)
        return deleted


def count_pages(place: Place, hashes: set[str] | None = None) -> dict[str, int]:
    """How many pages are stored, by "target 0/2" or "draft 0/2": kind, rank and ranks."""
    with place.open() as store:
        namespaces = store.namespaces()
        found: Counter[str] = Counter()
        for digest, keys in _keys(store).items():
            name = _ranks(namespaces.get(digest))
            for key in keys:
                tag, page_hash = split_page_key(key)
                if hashes is None or page_hash in hashes:
                    found[f"{'draft' if tag == DRAFT_TAG else 'target'} {name}"] += 1
        return dict(sorted(found.items()))


def _keys(store: Store) -> dict[str, list[str]]:
    """Page keys by namespace digest."""
    found: dict[str, list[str]] = {}
    for page in store.scan():
        digest, key = split_stored_key(page.key)
        found.setdefault(digest, []).append(key)
    return found


def _wanted(key: str, drafts: bool, hashes: set[str] | None) -> bool:
    tag, page_hash = split_page_key(key)
    return (tag == DRAFT_TAG) is drafts and (hashes is None or page_hash in hashes)


def _ranks(namespace: Namespace | None) -> str:
    return "?" if namespace is None else f"{namespace.tp_rank}/{namespace.tp_size}"


def _seaweedfs() -> str:
    """The URL of a new store in a running SeaweedFS."""
    sys.path.append(str(_ROOT / "tests"))
    from s3_servers import start_seaweedfs

    return str(start_seaweedfs().store_url())
