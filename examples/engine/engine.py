"""The example engine: a target, its draft head and their paged KV cache, over optional storage.

    target, head, tokenizer = load_pair("checkpoints/mha")
    engine = Engine(target, head, name="mha")
    engine.attach_storage(open_store("file:///var/cache/kv"))
    scheduler = Scheduler(engine)
    request = scheduler.submit(engine.request("first", prompt_tokens, new_tokens=100))
    scheduler.run()
    engine.close()

Both models' rows lie in device pools of equal page counts under one index; so whatever HiCache
moves between device, host and storage moves in pairs. Pages are keyed by token pairs, since
the draft's entry t is made from token t + 1 too: a page is the same only if the first
token after it is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from model import ContiguousCache, EagleHead, Target
from request import OnTokens, Request
from speculation import GUESSES, catch_up, guess, run_target

from hicache_storage import HiCacheStorageError, PairedStore, Store
from hicache_storage.hicache.controller import HiCache
from hicache_storage.keys import page_hashes
from hicache_storage.pairing import Pairing
from hicache_storage.pools.device import DevicePool, MHADevicePool, MLADevicePool
from hicache_storage.pools.geometry import PageGeometry
from hicache_storage.pools.layouts import Layout
from hicache_storage.pools.paired import PairedPools


class RequestError(HiCacheStorageError, ValueError):
    """A request that this engine can't serve; nothing was queued."""


@dataclass(frozen=True)
class EngineConfig:
    """Sizes and places of an engine's KV cache."""

    page_size: int = 64  # tokens
    device_pages: int = 64  # in each of the two device pools
    host_pages: int = 128  # in each of the two host pools
    layout: Layout = "page_first"  # of the host pools
    dtype: torch.dtype = torch.bfloat16  # of the KV rows
    context_tokens: int = 2688  # most tokens of a sequence: the models have seen no longer one


def pages_for(tokens: int, page_size: int) -> int:
    """Device pages that a sequence of `tokens` tokens needs, with the last guesses behind it."""
    return -(-(tokens + GUESSES) // page_size)


class Engine:
    """Two models and their cache. It moves to `device` what it is given. One thread uses it."""

    def __init__(
        self,
        target: Target,
        head: EagleHead,
        *,
        name: str,
        revision: str = "",
        config: EngineConfig | None = None,
        device: str | torch.device = "cpu",
    ) -> None:
        self.config = config or EngineConfig()
        self.device = torch.device(device)
        self.name, self.revision = name, revision
        self.target, self.head = target.to(self.device), head.to(self.device)
        self.target_pool = self._pool(
            target.config.layers, target.config.kv_row_shape, target.config.has_values
        )
        self.draft_pool = self._pool(1, head.config.kv_row_shape, has_values=True)
        self.pools = PairedPools(
            self.target_pool, host_pages=self.config.host_pages, layout=self.config.layout
        )
        self.pools.register_draft(self.draft_pool)
        self.cache = HiCache(self.pools)

    def _pool(self, layers: int, row: tuple[int, int], has_values: bool) -> DevicePool:
        heads, dim = row
        geometry = PageGeometry(
            kind="mha" if has_values else "mla",
            layers=layers,
            heads=heads,
            head_dim=dim,
            v_head_dim=dim if has_values else 0,
            page_size=self.config.page_size,
            dtype=self.config.dtype,
        )
        kind = MHADevicePool if has_values else MLADevicePool
        return kind(geometry, self.config.device_pages, self.device)

    @property
    def page_size(self) -> int:
        """Tokens in a page."""
        return self.config.page_size

    def attach_storage(
        self, store: Store, *, pairing: Pairing = "best_effort", tenant: str = ""
    ) -> PairedStore:
        """Use `store`, which stays the caller's to close, from now on."""
        target, draft = self.pools.namespaces(
            model=f"example-engine/{self.name}",
            revision=self.revision,
            draft_model=f"example-engine/{self.name}-draft",
            draft_revision=self.revision,
            tenant=tenant,
        )
        pairs = PairedStore(store, target, draft, pairing=pairing)
        self.cache.attach_storage(pairs)
        return pairs

    def warm_up(self) -> None:
        """Run both models once, so that no request pays for what torch sets up at first use."""
        target_kv, draft_kv = ContiguousCache(self.target.config.layers), ContiguousCache(1)
        tokens = torch.zeros(self.page_size, dtype=torch.long, device=self.device)
        states, said = run_target(self.target, lambda *_: target_kv, tokens, 0)
        output = catch_up(self.head, lambda *_: draft_kv, states.features, said, 0)
        guesses = guess(self.head, lambda *_: draft_kv, output, self.page_size)
        run_target(self.target, lambda *_: target_kv, guesses, self.page_size)

    def close(self) -> None:
        """Write what is still to be written, and end the cache's threads."""
        self.cache.close()

    def hashes(self, tokens: Sequence[int]) -> list[str]:
        """The page hashes of the whole pages of `tokens`.

        The last token never lies in one: a page is whole once the token after it is known. So
        at least the last token of a prompt is always computed, which yields the first new one.
        """
        return page_hashes(tokens, self.page_size, mode="pairs")

    def request(
        self,
        request_id: str,
        prompt: Sequence[int],
        new_tokens: int,
        *,
        stop: frozenset[int] = frozenset(),
        on_tokens: OnTokens | None = None,
    ) -> Request:
        """A request to continue `prompt` by `new_tokens` tokens, or until one of `stop`.

        `on_tokens(request, tokens)` is called for each handful of new tokens. Raises RequestError
        for what can't be served.
        """
        vocab = self.target.config.vocab
        if not prompt or new_tokens < 1:
            raise RequestError(
                f"a request needs a prompt and at least 1 new token, got {len(prompt)} prompt "
                f"tokens and {new_tokens} new ones"
            )
        if not all(0 <= token < vocab for token in prompt):
            raise RequestError(f"prompt: token ids must be from 0 to {vocab - 1}")
        total = len(prompt) + new_tokens
        if total > self.config.context_tokens:
            raise RequestError(
                f"{len(prompt)} prompt tokens and {new_tokens} new ones are {total}, more than "
                f"the models' context of {self.config.context_tokens} tokens; ask for less"
            )
        pages = pages_for(total, self.page_size)
        if pages > self.config.device_pages:
            raise RequestError(
                f"{total} tokens need {pages} pages of {self.page_size} tokens, but the device "
                f"pool has {self.config.device_pages}; ask for less or raise device_pages"
            )
        prompt = list(prompt)
        return Request(
            id=request_id,
            prompt=prompt,
            new_tokens=new_tokens,
            stop=stop,
            on_tokens=on_tokens,
            hashes=self.hashes(prompt),
            pages_needed=pages,
            tokens=torch.tensor(prompt, device=self.device),
        )
