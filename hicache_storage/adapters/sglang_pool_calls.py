"""The calls by pool (v2): lookups under each pool's hit policy, reads and writes of its pages.

May raise; `sglang_storage` turns errors into misses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from ..errors import InvalidKey
from .sglang_keys import DRAFT, TARGET, check_hash, pool_name
from .sglang_page_calls import write_draft_slots
from .sglang_pools import PoolStorage
from .sglang_server import ServerPools, check_count

TRAILING = "trailing_pages"
GROUPS = "block_groups"
_LOOKUPS_AT_ONCE = 16


class Found(NamedTuple):
    """What a lookup by pool found, in pages."""

    usable: int
    by_pool: dict[Any, int]
    """How far each pool's pages reach, under the name that SGLang gave; those that reach nowhere
    are absent."""
    restorable: list[int]
    """Every length of a prefix that all pools can restore, rising."""


def find_pools(
    server: ServerPools,
    keys: Sequence[str],
    transfers: Iterable[Any] | None,
    prefix: list[str] | None,
    target_name: Any = TARGET,
) -> Found:
    """The prefix lengths that the target and every pool can restore.

    A pool's policy says which of its pages a prefix needs: all of them, or the last ones
    (`trailing_pages`: as many as the transfer has keys, at least one). One of `block_groups` never
    limits a prefix, and isn't asked for. The draft limits it only if drafts are required.
    """
    hashes = [check_hash(key) for key in keys]
    run = server.target.run(hashes, prefix)
    by_pool: dict[Any, int] = {target_name: run} if run else {}
    restorable = range(1, run + 1) if run else range(0)
    allowed = list(restorable)
    for transfer in transfers or ():
        if not allowed:
            break
        name = pool_name(transfer.name)
        policy = _policy(transfer)
        if name == TARGET or policy == GROUPS:
            continue
        if name == DRAFT and server.pairing == "best_effort":
            by_pool[transfer.name] = run
            continue
        pool = server.get(name)
        if pool is None:
            server.guard.note("lookup", f"pool {name!r} is not registered")
            lengths: set[int] = set()
        elif policy == TRAILING:
            window = max(1, len(transfer.keys or ()))
            lengths = _ends_of_windows(_each_stored(pool, hashes[:run], prefix), window)
        elif name == DRAFT:
            lengths = set(range(1, server.draft_run(hashes[:run], prefix) + 1))
        else:
            lengths = set(range(1, pool.run(hashes[:run], prefix) + 1))
        if lengths:
            by_pool[transfer.name] = max(lengths)
        allowed = [length for length in allowed if length in lengths]
    return Found(allowed[-1] if allowed else 0, by_pool, allowed)


def write_pools(
    server: ServerPools, transfers: Iterable[Any], prefix: list[str] | None
) -> dict[Any, list[bool]]:
    """Stores each transfer's pages; by pool, True for each that is stored."""

    def write(pool: PoolStorage, hashes: list[str], host_indices: Any) -> list[bool]:
        if pool.name == DRAFT:
            return write_draft_slots(pool, hashes, host_indices, prefix)
        return pool.write_slots(hashes, host_indices, prefix)

    return _each_pool(server, "write", transfers, write)


def read_pools(
    server: ServerPools, transfers: Iterable[Any], prefix: list[str] | None
) -> dict[Any, list[bool]]:
    """Reads each transfer's pages; by pool, True for each that arrived.

    With best effort a lost draft page counts as arrived, with zeros.
    """

    def read(pool: PoolStorage, hashes: list[str], host_indices: Any) -> list[bool]:
        hits = pool.read_slots(hashes, host_indices, prefix)
        if pool.name == DRAFT:
            # SGLang has read the targets by now, and itself uses none beyond a draft's miss.
            server.note_drafts(hashes, hits, targets_follow=False)
            pool.zero_slots(host_indices, [not hit for hit in hits])
            if server.pairing == "best_effort":
                return [True] * len(hits)
        return hits

    return _each_pool(server, "read", transfers, read)


def _each_pool(
    server: ServerPools,
    operation: str,
    transfers: Iterable[Any],
    call: Callable[[PoolStorage, list[str], Any], list[bool]],
) -> dict[Any, list[bool]]:
    """One pool's failure is a miss of that pool alone."""
    results: dict[Any, list[bool]] = {}
    for transfer in transfers:
        keys = list(transfer.keys or ())

        def one(transfer: Any = transfer, keys: list[str] = keys) -> list[bool]:
            name = pool_name(transfer.name)
            pool = server.get(name)
            if pool is None:
                raise InvalidKey(f"pool {name!r} is not registered")
            hashes = [check_hash(key) for key in keys]
            return list(check_count("answers", call(pool, hashes, transfer.host_indices), keys))

        results[transfer.name] = server.guard.call(operation, one, [False] * len(keys))
    return results


def _policy(transfer: Any) -> str:
    policy = getattr(transfer, "hit_policy", "")
    return str(getattr(policy, "value", policy))


def _each_stored(
    pool: PoolStorage, hashes: Sequence[str], prefix: Sequence[str] | None
) -> list[bool]:
    """Whether each page is stored. The store tells leading runs only, so pages are asked for one
    by one, several at once."""

    def stored(i: int) -> bool:
        before = None if prefix is None else [*prefix, *hashes[:i]]
        return pool.run([hashes[i]], before) == 1

    if len(hashes) <= 1:
        return [stored(i) for i in range(len(hashes))]
    with ThreadPoolExecutor(min(_LOOKUPS_AT_ONCE, len(hashes))) as threads:
        return list(threads.map(stored, range(len(hashes))))


def _ends_of_windows(stored: Sequence[bool], window: int) -> set[int]:
    """Every prefix length whose last `window` pages (or all, if it has fewer) are stored."""
    ends = set()
    length = 0
    for end, one in enumerate(stored, 1):
        length = length + 1 if one else 0
        if length >= min(window, end):
            ends.add(end)
    return ends
