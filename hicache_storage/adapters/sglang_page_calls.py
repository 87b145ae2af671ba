"""The calls without pool names: pages as flat tensors, and pages in place.

May raise; `sglang_storage` turns errors into misses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..errors import InvalidKey
from ..page import AnyPage
from .sglang_keys import DRAFT, TARGET, keys_by_pool, parse_key
from .sglang_pools import PoolStorage, flat_spans, is_zero, zero_missed
from .sglang_server import ServerPools, check_count


def find_run(server: ServerPools, keys: Sequence[str], prefix: list[str] | None) -> int:
    """The length of the leading run of usable pages; all keys of one form."""
    names = set()
    hashes = []
    for key in keys:
        try:
            name, page_hash = parse_key(key)
        except InvalidKey as error:
            server.guard.note("key", error)
            break
        names.add(name)
        if len(names) > 1:
            break
        hashes.append(page_hash)
    if not hashes:
        return 0
    if names == {TARGET}:
        return server.usable_run(hashes, prefix)
    draft = server.get(DRAFT)
    return 0 if draft is None else draft.run(hashes, prefix)


def write_flat(
    server: ServerPools, keys: Sequence[str], values: Sequence[Tensor] | None
) -> list[bool]:
    """Stores flat tensors under their keys; True for each that is stored."""
    tensors = check_count("values", values, keys)
    results = [False] * len(keys)
    for name, places, hashes in keys_by_pool(keys, lambda e: server.guard.note("key", e)):
        chosen = [tensors[i].contiguous() for i in places]
        pool = _pool_of(server, name, chosen)
        for i, done in zip(places, write_pages(pool, hashes, flat_spans(chosen)), strict=True):
            results[i] = done
    return results


def read_flat(
    server: ServerPools, keys: Sequence[str], locations: Sequence[Tensor] | None
) -> list[Tensor | None]:
    """Fills flat tensors; each is returned if its page came, else None.

    SGLang leaves a draft's slot as it is where it gets None, so a lost draft page is a tensor
    of zeros.
    """
    tensors = check_count("target_locations", locations, keys)
    results: list[Tensor | None] = [None] * len(keys)
    for name, places, hashes in keys_by_pool(keys, lambda e: server.guard.note("key", e)):
        chosen = [tensors[i] for i in places]
        pool = _pool_of(server, name, chosen)
        spans = flat_spans(chosen)
        hits = pool.read(hashes, spans)
        if name == DRAFT:
            zero_missed(spans, hits)
            server.note_drafts(hashes, hits, targets_follow=True)
            hits = [True] * len(hits)
        else:
            hits = server.paired(hashes, hits)
        for i, tensor, hit in zip(places, chosen, hits, strict=True):
            results[i] = tensor if hit else None
    return results


def write_target(
    server: ServerPools, keys: Sequence[str], host_indices: Tensor, prefix: list[str] | None
) -> list[bool]:
    """Stores target pages from the host pool; True for each that is stored."""
    return server.target.write_slots(_target_hashes(keys), host_indices, prefix)


def read_target(
    server: ServerPools, keys: Sequence[str], host_indices: Tensor, prefix: list[str] | None
) -> list[bool]:
    """Reads target pages into the host pool; True for each that arrived."""
    hashes = _target_hashes(keys)
    return server.paired(hashes, server.target.read_slots(hashes, host_indices, prefix))


def write_drafts(server: ServerPools, keys: Sequence[str], host_indices: Tensor) -> list[bool]:
    """Stores the draft's pages beside targets under `keys`; True for each that is stored."""
    return write_draft_slots(server.draft, _target_hashes(keys), host_indices, None)


def read_drafts(server: ServerPools, keys: Sequence[str], host_indices: Tensor) -> list[bool]:
    """Reads the draft's pages of targets that are read next; a lost one becomes zeros."""
    hashes = _target_hashes(keys)
    hits = server.draft.read_slots(hashes, host_indices, None)
    server.draft.zero_slots(host_indices, [not hit for hit in hits])
    server.note_drafts(hashes, hits, targets_follow=True)
    return hits


def write_draft_slots(
    draft: PoolStorage, hashes: Sequence[str], host_indices: Any, prefix: Sequence[str] | None
) -> list[bool]:
    """Stores draft pages from their host pool, except for zeros."""
    pages = draft.host_pages()
    spans = pages.to_write(pages.pages(len(hashes), host_indices))
    return write_pages(draft, hashes, spans, prefix)


def write_pages(
    pool: PoolStorage,
    hashes: Sequence[str],
    pages: Sequence[AnyPage],
    prefix: Sequence[str] | None = None,
) -> list[bool]:
    """Stores pages, except for draft pages of nothing but zeros: those were lost once, and
    would make the loss last."""
    if pool.name != DRAFT:
        return pool.write(hashes, pages, prefix)
    real = [i for i, page in enumerate(pages) if not is_zero(page)]
    results = [False] * len(hashes)
    done = pool.write([hashes[i] for i in real], [pages[i] for i in real], prefix)
    for i, answer in zip(real, done, strict=True):
        results[i] = answer
    return results


def _pool_of(server: ServerPools, name: str, tensors: Sequence[Tensor]) -> PoolStorage:
    if name == TARGET:
        return server.target
    first = tensors[0]
    return server.flat_draft(first.numel() * first.element_size(), first.dtype)


def _target_hashes(keys: Sequence[str]) -> list[str]:
    hashes = []
    for key in keys:
        name, page_hash = parse_key(key)
        if name != TARGET:
            raise InvalidKey(f"{key!r} is a draft page's key, among target pages")
        hashes.append(page_hash)
    return hashes
