"""A prefix of ten pages, as a target and a draft model store it, and what can happen to it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

from hicache_storage import Namespace, PairedStore, Store
from hicache_storage.keys import page_hashes, stored_key
from hicache_storage.page import HEADER_BYTES

TOKENS = list(range(1000, 1041))
PAGE_SIZE = 4
HASHES = page_hashes(TOKENS, PAGE_SIZE, mode="pairs")
"""Ten pages."""


@dataclass
class Ran:
    """One run of the command."""

    status: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        return json.loads(self.out)


def space(**changes: Any) -> Namespace:
    """The target's namespace, or one that differs from it."""
    fields: dict[str, Any] = {
        "model": "org/target",
        "pool": "mha",
        "dtype": "bfloat16",
        "page_size": PAGE_SIZE,
        "page_bytes": 512,
        "layers": 2,
        "heads": 2,
        "head_dim": 8,
        "v_head_dim": 8,
        "order": "token_layer",
        **changes,
    }
    return Namespace(**fields)


TARGET = space()
DRAFT = space(model="org/draft", layers=1, page_bytes=256)


def put(
    store: Store,
    *,
    targets: list[int] | None = None,
    drafts: list[int] | None = None,
    target: Namespace = TARGET,
    draft: Namespace = DRAFT,
    hashes: list[str] = HASHES,
) -> None:
    """Stores these pages of the prefix (all by default)."""
    every = list(range(len(hashes)))
    for namespace, tag, places in (
        (target, "", every if targets is None else targets),
        (draft, "d:", every if drafts is None else drafts),
    ):
        keys = [tag + hashes[i] for i in places]
        pages = [bytes([i + 1]) * namespace.page_bytes for i in places]
        assert all(store.batch_set(namespace, keys, pages))


def damage(store: Store, key: str, namespace: Namespace = TARGET) -> None:
    """Turns a bit in the payload of a stored page."""
    name = stored_key(namespace.digest, key)
    whole = memoryview(bytearray(HEADER_BYTES + namespace.page_bytes))
    spans = (whole[:HEADER_BYTES], whole[HEADER_BYTES:])
    assert store._caller.batch_get([name], [spans], None) == [True]
    whole[HEADER_BYTES + 7] ^= 4
    other = memoryview(bytes(HEADER_BYTES) + b"x")
    for content in (other, whole):
        frame = (content[:HEADER_BYTES], content[HEADER_BYTES:])
        assert store._caller.batch_set([name], [frame], None) == [True]


def pairs(store: Store) -> PairedStore:
    return PairedStore(store, TARGET, DRAFT)


def command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "hicache_storage", *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**os.environ, **environment},
    )
