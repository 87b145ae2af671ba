"""SGLangStorage: what SGLang calls a storage backend, over a store of this package.

One class serves the calls of every release from 0.5.11 on: with flat tensors (`batch_set`,
`batch_get`), in place (`*_v1`) and by pool (`*_v2`). It knows SGLang's objects by their attributes
only; `sglang` joins it with SGLang's base class.

What an engine's thread calls never raises, never gives None in place of a result, and always
answers for every key.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import threading
from typing import Any, ClassVar

from torch import Tensor

from ..opening import open_store
from .sglang_identity import identify, server_arguments
from .sglang_keys import DRAFT, TARGET, pool_name, prefix_of
from .sglang_options import read_options
from .sglang_page_calls import (
    find_run,
    read_drafts,
    read_flat,
    read_target,
    write_drafts,
    write_flat,
    write_target,
)
from .sglang_pool_calls import Found, find_pools, read_pools, write_pools
from .sglang_server import ServerPools
from .sglang_stats import TransferStats

logger = logging.getLogger("hicache_storage")


class SGLangStorage:
    """SGLang's storage backend. `storage_config` is SGLang's; `kwargs` isn't used.

    Opens the store, in the process that uses it. Raises ConfigError, or the backend's error if it
    can't open; nothing stays open then.
    """

    backend_name: ClassVar[str] = ""
    """Name of the backend, or "" to let the extra config say it."""
    release: ClassVar[str] = ""
    """SGLang's version."""
    lookup_result: ClassVar[Any] = None
    """SGLang's class for the result of a lookup by pool."""
    target_pool: ClassVar[Any] = TARGET
    """SGLang's name of the target's pool."""

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        options = read_options(self.backend_name, getattr(storage_config, "extra_config", None))
        identity = identify(storage_config, options.adapter, server_arguments(), self.release)
        self.mem_pool_host: Any = None
        self.registered_pools: dict[Any, Any] = {}
        self._closing = threading.Lock()
        self._closed = False
        metrics = getattr(storage_config, "enable_storage_metrics", False)
        self._stats = TransferStats() if metrics else None
        store = open_store(options.url, **options.overrides)
        title = type(self).__name__
        self.server = ServerPools(
            title,
            store,
            identity,
            options.adapter.pairing,
            drafts_untold=self.drafts_untold(),
            stats=self._stats,
        )
        self._guard = self.server.guard
        if store.scope == "process":
            logger.warning("%s: pages in %r end with this process", title, store.name)
        for doubt in identity.doubts:
            logger.warning("%s: %s", title, doubt)

    @classmethod
    def drafts_untold(cls) -> bool:
        """Whether SGLang sends draft pages as flat tensors and nothing tells of their pool."""
        return False

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """The target's host pool, or a group of pools with the target's as its anchor. Raises
        ConfigError if its pages can't be stored: SGLang then starts no thread."""
        self.mem_pool_host = mem_pool_host
        anchor = getattr(mem_pool_host, "anchor_entry", None)
        self.server.register(TARGET, mem_pool_host if anchor is None else anchor.host_pool)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Another host pool, at any time; the target's may come again."""
        self.registered_pools[host_pool_name] = host_pool
        try:
            self.server.register(pool_name(host_pool_name), host_pool)
        except Exception as error:  # the server works without it, if with fewer hits
            logger.error(
                "%s: pool %s is not stored: %s", type(self).__name__, host_pool_name, error
            )

    def register_draft_host_pool(self, host_pool: Any) -> bool:
        """The draft's host pool, in releases that don't register it themselves; whether its
        pages can be stored."""
        self.register_mem_host_pool_v2(host_pool, DRAFT)
        draft = self.server.get(DRAFT)
        return draft is not None and draft.pages is not None

    def on_host_pools_registered(self) -> None:
        """SGLang has registered the pools that it starts with."""

    # Pages as flat tensors

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """The length of the leading run of usable pages."""
        return self._guard.call(
            "lookup", lambda: find_run(self.server, keys, prefix_of(extra_info)), 0
        )

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def batch_set(
        self,
        keys: list[str],
        values: Any = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """Stores flat tensors; True if all are stored."""
        return self._guard.call("write", lambda: all(write_flat(self.server, keys, values)), False)

    def set(
        self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None
    ) -> bool:
        return self.batch_set([key], [value])

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[Tensor | None]:
        """Fills the tensors of `target_locations`: for each key its tensor, or None for a miss."""
        nothing: list[Tensor | None] = [None] * len(keys)
        return self._guard.call(
            "read", lambda: read_flat(self.server, keys, target_locations), nothing
        )

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Tensor | None:
        return self.batch_get([key], [target_location])[0]

    # Target pages in place

    def batch_set_v1(
        self, keys: list[str], host_indices: Tensor, extra_info: Any = None
    ) -> list[bool]:
        """Stores pages from the host pool; `host_indices` has every token's. True for each that
        is stored."""
        return self._guard.call(
            "write",
            lambda: write_target(self.server, keys, host_indices, prefix_of(extra_info)),
            [False] * len(keys),
        )

    def batch_get_v1(
        self, keys: list[str], host_indices: Tensor, extra_info: Any = None
    ) -> list[bool]:
        """Reads pages into the host pool; True for each that arrived."""
        return self._guard.call(
            "read",
            lambda: read_target(self.server, keys, host_indices, prefix_of(extra_info)),
            [False] * len(keys),
        )

    # Draft pages in place, in releases that have no call for them

    def write_drafts(self, keys: list[str], host_indices: Tensor) -> list[bool]:
        """Stores the draft's pages beside their targets; True for each that is stored."""
        return self._guard.call(
            "draft write",
            lambda: write_drafts(self.server, keys, host_indices),
            [False] * len(keys),
        )

    def read_drafts(self, keys: list[str], host_indices: Tensor) -> list[bool]:
        """Reads the draft's pages of targets that are read next; True for each that arrived."""
        return self._guard.call(
            "draft read",
            lambda: read_drafts(self.server, keys, host_indices),
            [False] * len(keys),
        )

    # Pages by pool

    def batch_exists_v2(
        self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None
    ) -> Any:
        """What target and pools can restore, as SGLang's result of this release."""
        found = self._guard.call(
            "lookup",
            lambda: find_pools(
                self.server, keys, pool_transfers, prefix_of(extra_info), self.target_pool
            ),
            Found(0, {}, []),
        )
        values = {
            "kv_hit_pages": found.usable,
            "extra_pool_hit_pages": found.by_pool,
            "restorable_prefix_pages": found.restorable,
        }
        names = {field.name for field in dataclasses.fields(self.lookup_result)}
        return self.lookup_result(**{name: values[name] for name in names & set(values)})

    def batch_set_v2(self, transfers: Any, extra_info: Any = None) -> dict[Any, list[bool]]:
        """Stores each transfer's pages; by pool, True for each that is stored."""
        given = list(transfers or ())
        return self._guard.call(
            "write",
            lambda: write_pools(self.server, given, prefix_of(extra_info)),
            {transfer.name: [False] * len(transfer.keys or ()) for transfer in given},
        )

    def batch_get_v2(self, transfers: Any, extra_info: Any = None) -> dict[Any, list[bool]]:
        """Reads each transfer's pages; by pool, True for each that arrived."""
        given = list(transfers or ())
        return self._guard.call(
            "read",
            lambda: read_pools(self.server, given, prefix_of(extra_info)),
            {transfer.name: [False] * len(transfer.keys or ()) for transfer in given},
        )

    # The rest

    def clear(self) -> None:
        """Deletes the pages of this server's pools, and of no other server's."""
        for pool in self.server:
            self._guard.call("clear", functools.partial(self.server.clear, pool), None)

    def get_stats(self) -> Any:
        """Pages and bandwidth since the last call, as SGLang's metrics take them; None unless
        its metrics are on."""
        stats = self._stats
        return None if stats is None else self._guard.call("metrics", stats.collect, None)

    def close(self) -> None:
        """Closes the store. A second call does nothing; other calls then find nothing."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
        for pool in self.server:
            logger.info("%s: pool %s: %s", type(self).__name__, pool.name, pool.edge.counts)
        self._guard.call("close", self.server.store.close, None)
