"""ServerPools: the pools of one SGLang process, and what a lost draft page costs it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Any, Literal

import torch

from ..edge import ErrorsToMisses
from ..errors import ConfigError, PageSizeMismatch
from ..namespace import Namespace
from ..store import Store
from .sglang_identity import Identity
from .sglang_keys import DRAFT, TARGET
from .sglang_namespaces import flat_draft_namespace, pool_namespace, writes
from .sglang_options import PairingOption
from .sglang_pages import host_pages
from .sglang_pools import PoolStorage
from .sglang_stats import TransferStats

logger = logging.getLogger("hicache_storage")


class ServerPools:
    """Pools by name, each with its namespace in one store. Registered by one thread, used by any.

    `drafts_untold` says that SGLang's draft pool is neither registered nor told of by a hook, so
    that its pages are known once the first one is written. `stats` gets what is moved of the
    target's.
    """

    def __init__(
        self,
        title: str,
        store: Store,
        identity: Identity,
        pairing: PairingOption,
        *,
        drafts_untold: bool = False,
        stats: TransferStats | None = None,
    ) -> None:
        self.title = title
        self.store = store
        self.identity = identity
        self.guard = ErrorsToMisses(store.name)
        self.lost_drafts = 0
        """Draft pages that did not come although their targets were wanted."""
        self._asked_pairing = pairing
        self._drafts_untold = drafts_untold
        self._stats = stats
        self._pools: dict[str, PoolStorage] = {}
        self._unpaired: set[str] = set()
        self._lock = threading.Lock()

    @property
    def target(self) -> PoolStorage:
        """Raises ConfigError before SGLang has registered it."""
        if TARGET not in self._pools:
            raise ConfigError("SGLang has registered no host pool for the target")
        return self._pools[TARGET]

    @property
    def draft(self) -> PoolStorage:
        """Raises ConfigError before it is known."""
        if DRAFT not in self._pools:
            raise ConfigError("SGLang has registered no host pool for the draft")
        return self._pools[DRAFT]

    def __iter__(self) -> Any:
        return iter(self._pools.values())

    def get(self, name: str) -> PoolStorage | None:
        return self._pools.get(name)

    @property
    def pairing(self) -> Literal["required", "best_effort"]:
        """What a lost draft page costs now."""
        if self._asked_pairing != "auto":
            return self._asked_pairing
        draft = self._pools.get(DRAFT)
        return "required" if draft is not None and draft.pages is not None else "best_effort"

    def register(self, name: str, host_pool: Any) -> None:
        """Makes a host pool known, also while others are in use; the same one again is nothing.

        Raises ConfigError for one that can't be stored.
        """
        known = self._pools.get(name)
        if known is not None and known.pages is not None and known.pages.pool is host_pool:
            return
        target = None if name == TARGET else self.target.namespace
        pages = host_pages(host_pool)
        namespace = pool_namespace(name, pages, self.identity, target)
        stats = self._stats if name == TARGET else None
        pool = PoolStorage(
            name,
            self.store,
            namespace,
            pages,
            writes=writes(namespace, self.identity.ranks),
            stats=stats,
        )
        self._pools = {**self._pools, name: pool}
        logger.info(
            "%s: pool %s (%s, %s): pages of %d tokens and %d bytes, %s; namespace %s of %r, "
            "revision %r%s; %s",
            self.title,
            name,
            type(host_pool).__name__,
            getattr(host_pool, "layout", "?"),
            pages.page_size,
            pages.page_bytes,
            "read and written in place" if pages.in_place else "copied on the way",
            namespace.digest,
            namespace.model,
            namespace.revision,
            f", tenant {namespace.tenant!r}" if namespace.tenant else "",
            self._writers(name, namespace),
        )
        if name == DRAFT:
            logger.info("%s: a lost draft page: %s", self.title, self.pairing)
            self._warn_of_draft_shards(pool)

    def flat_draft(self, page_bytes: int, dtype: torch.dtype) -> PoolStorage:
        """The draft's pool where nobody has said which host pool its flat tensors are from."""
        with self._lock:
            known = self._pools.get(DRAFT)
            if known is not None:
                return known
            namespace = flat_draft_namespace(
                page_bytes, dtype, self.identity, self.target.namespace
            )
            pool = PoolStorage(DRAFT, self.store, namespace, None, writes=True)
            self._pools = {**self._pools, DRAFT: pool}
        logger.info(
            "%s: draft pages come as tensors of %d bytes from a pool that is not known; namespace "
            "%s; a lost draft page: %s",
            self.title,
            page_bytes,
            namespace.digest,
            self.pairing,
        )
        return pool

    def usable_run(self, hashes: Sequence[str], prefix: Sequence[str] | None) -> int:
        """The leading run of stored target pages, with their drafts where those are required."""
        run = self.target.run(hashes, prefix)
        if not run or self.pairing != "required":
            return run
        if DRAFT in self._pools:
            return self.draft_run(hashes[:run], prefix)
        if not (self._drafts_untold and self.identity.drafting):
            return run
        self.guard.note(
            "lookup",
            "pairing is 'required', but the size of draft pages is not known before one is "
            "written, so nothing counts as stored: let SGLang load the plugin 'hicache_storage' "
            "(see SGLANG_PLUGINS), or set pairing to 'best_effort'",
        )
        return 0

    def draft_run(self, hashes: Sequence[str], prefix: Sequence[str] | None) -> int:
        """The leading run of stored drafts of stored targets, where drafts are required."""
        run = self.draft.run(hashes, prefix)
        if run < len(hashes):
            self.guard.failures.note(
                "missing drafts",
                f"{len(hashes)} target pages are stored, but only {run} with their drafts: the "
                "others are computed again (written by a server without a draft, or evicted)",
            )
        return run

    def note_drafts(
        self, hashes: Sequence[str], hits: Sequence[bool], *, targets_follow: bool
    ) -> None:
        """Counts lost drafts of a read. Where they are required and `targets_follow`, the read
        of their targets that comes next answers with misses."""
        lost = [page_hash for page_hash, hit in zip(hashes, hits, strict=True) if not hit]
        required = self.pairing == "required"
        with self._lock:
            self.lost_drafts += len(lost)
            if required and targets_follow:
                self._unpaired.difference_update(hashes)
                self._unpaired.update(lost)
        if lost:
            self.guard.failures.note(
                "lost drafts",
                f"{len(lost)} of {len(hashes)} draft pages did not come"
                + (
                    "; the pages from there on are computed again"
                    if required
                    else "; speculation is slow for that prefix as long as it is kept"
                ),
            )

    def paired(self, hashes: Sequence[str], hits: list[bool]) -> list[bool]:
        """Target hits without those whose required draft was lost in the read before."""
        if not self._unpaired:
            return hits
        with self._lock:
            found = [
                hit and page_hash not in self._unpaired
                for page_hash, hit in zip(hashes, hits, strict=True)
            ]
            self._unpaired.difference_update(hashes)
        return found

    def clear(self, pool: PoolStorage) -> None:
        """Deletes all pages of a pool's namespace, and no other."""
        missing = {"scan", "delete"} - self.store.capabilities
        if missing:
            raise ConfigError(
                f"backend {self.store.name!r} can't {' and '.join(sorted(missing))}, so this "
                "server's pages can't be told from others' and deleted"
            )
        prefix = f"{pool.namespace.digest}/"
        keys = [page.key.removeprefix(prefix) for page in self.store.scan(prefix)]
        for start in range(0, len(keys), 1000):
            self.store.delete(pool.namespace, keys[start : start + 1000])
        logger.info("%s: pool %s: %d pages deleted", self.title, pool.name, len(keys))

    def _writers(self, name: str, namespace: Namespace) -> str:
        """Who writes a pool's pages, for the log."""
        if not writes(namespace, self.identity.ranks):
            return "another rank writes them"
        if name == DRAFT and self._rank_0_alone(namespace) and self.identity.ranks.tp_rank:
            return "no rank writes them"
        return "this rank writes them"

    def _rank_0_alone(self, draft: Namespace) -> bool:
        """Whether SGLang never asks the other ranks to write their shards of the draft: it doesn't
        where the target's pages are the same on all ranks."""
        return self.identity.ranks.tp_size > 1 and self.identity.replicated and draft.tp_size > 1

    def _warn_of_draft_shards(self, draft: PoolStorage) -> None:
        if not self._rank_0_alone(draft.namespace):
            return
        cost = (
            "so with pairing 'required' nothing is read back; set 'best_effort' to use the target's"
            if self.pairing == "required"
            else "they count as lost"
        )
        logger.warning(
            "%s: the target's pages are the same on all %d tensor-parallel ranks, and SGLang lets "
            "rank 0 alone write; the draft has its own heads on each rank, of which only those of "
            "rank 0 are ever written: %s",
            self.title,
            self.identity.ranks.tp_size,
            cost,
        )


def check_count(what: str, given: Sequence[Any] | None, keys: Sequence[str]) -> Sequence[Any]:
    """Returns `given` if it has an entry for each key; raises PageSizeMismatch."""
    found = 0 if given is None else len(given)
    if found != len(keys):
        raise PageSizeMismatch(f"{len(keys)} keys but {found} {what}")
    return given or ()
