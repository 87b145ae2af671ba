"""SGLang's unified radix cache with its hybrid controller, on a CPU and without a model.

Built from the fixtures that the wheel itself ships for tests. What needs a GPU, the copies between
device and host pools, is done by indexing here.
"""

from __future__ import annotations

import json
import unittest
from array import array
from typing import Any
from unittest import mock

import torch
from real_sglang.controllers import threads_alive
from sglang.kernels.ops.attention.fla.chunk_delta_h import CHUNK_SIZE
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle
from sglang.srt.mem_cache.hybrid_cache import hybrid_pool_assembler
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.mem_cache.unified_cache.components.base import ComponentType
from sglang.srt.runtime_context import get_parallel
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler
from sglang.test.kits.unified_radix_cache import fixtures
from sglang.test.kits.unified_radix_cache.config import CacheConfig
from sglang.test.kits.unified_radix_cache.storage import UnifiedRadixCacheStorageFixtures

from hicache_storage.pools.layouts import by_page

PAGE = 4
LAYERS = 2


def _parts(pool: Any) -> list[list[torch.Tensor]]:
    """A device pool's tensors, by part and layer."""
    return [pool.kv_buffer] if hasattr(pool, "kv_buffer") else [pool.k_buffer, pool.v_buffer]


def _views(host: Any) -> list[torch.Tensor]:
    """A host pool's parts by page and layer: (P, L, S, H, D)."""
    parts = [host.k_buffer, host.v_buffer] if hasattr(host, "head_num") else [host.kv_buffer]
    return [by_page(host.layout, host.page_size, part) for part in parts]


def _backup(
    self: Any, device_pool: Any, host_indices: Any, device_indices: Any, *_: Any, **__: Any
) -> None:
    pages = host_indices[:: self.page_size] // self.page_size
    for view, layers in zip(_views(self), _parts(device_pool), strict=True):
        for layer, rows in enumerate(layers):
            view[pages, layer] = rows[device_indices].view(len(pages), *view.shape[2:])


def _load(
    self: Any,
    device_pool: Any,
    host_indices: Any,
    device_indices: Any,
    layer_id: int,
    *_: Any,
    **__: Any,
) -> None:
    pages = host_indices[:: self.page_size] // self.page_size
    for view, layers in zip(_views(self), _parts(device_pool), strict=True):
        if layer_id < len(layers):
            rows = view[pages, layer_id]
            layers[layer_id][device_indices] = rows.reshape(-1, *rows.shape[2:])


def _unpinned(original: Any) -> Any:
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **{**kwargs, "pin_memory": False})

    return init


def _mla_pool(**options: Any) -> Any:
    for name in ("head_num", "head_dim"):
        del options[name]
    return MLATokenToKVPool(kv_lora_rank=12, qk_rope_head_dim=4, **options)


class Trees(UnifiedRadixCacheStorageFixtures, unittest.TestCase):
    """Makes trees with storage; `doCleanups` takes them down."""

    __test__ = False
    cfg = CacheConfig(
        page_size=PAGE,
        components=(ComponentType.FULL,),
        num_layers=LAYERS,
        full_attention_layer_ids=tuple(range(LAYERS)),
        head_dim=8,
        kv_size=256,
    )

    def __init__(self, layout: str, kind: str) -> None:
        super().__init__("id")
        self.layout, self.kind = layout, kind
        self._patch(fixtures, "get_device", lambda: "cpu")
        if kind == "mla":
            self._patch(fixtures, "MHATokenToKVPool", _mla_pool)
        for cls in (MHATokenToKVPoolHost, MLATokenToKVPoolHost):
            self._patch(cls, "__init__", _unpinned(cls.__init__))
            self._patch(cls, "backup_from_device_all_layer", _backup)
            self._patch(cls, "load_to_device_per_layer", _load)
        ranks = get_parallel().override(tp_rank=0, tp_size=1, pp_rank=0, pp_size=1)
        ranks.__enter__()
        self.addCleanup(ranks.__exit__, None, None, None)

    def _patch(self, owner: Any, name: str, value: Any) -> None:
        patcher = mock.patch.object(owner, name, value)
        patcher.start()
        self.addCleanup(patcher.stop)

    def tree(
        self,
        backend: str | None,
        extra_config: dict[str, Any] | None = None,
        *,
        draft: bool = False,
    ) -> Tree:
        return Tree(self, backend, extra_config, draft=draft)


class Tree:
    """One server's cache: device pool, tree, host pools, controller and storage."""

    def __init__(
        self, trees: Trees, backend: str | None, extra_config: Any, *, draft: bool
    ) -> None:
        self.trees = trees
        self.cache, self.allocator, self.requests = fixtures.build_fixture(trees.cfg)
        config = {"prefetch_threshold": 1, **(extra_config or {})}
        found = ServerArgs(
            model_path="dummy",
            page_size=PAGE,
            device="cpu",
            hicache_ratio=2.0,
            hicache_io_backend="kernel" if trees.layout == "page_first" else "direct",
            hicache_mem_layout=trees.layout,
            hicache_write_policy="write_through",
            hicache_storage_backend=backend,
            hicache_storage_backend_extra_config=json.dumps(config) if backend else None,
            hicache_storage_prefetch_policy="wait_complete",
        )
        found._mamba_cache_chunk_size = max(CHUNK_SIZE, PAGE)
        set_global_server_args_for_scheduler(found)
        self.cache.init_hicache(found, self.cache.cache_init_params)
        trees.addCleanup(fixtures.drop_hicache_atexit_pin, self.cache)
        trees.addCleanup(self.cache.release_host_resources)
        self.cache.write_through_threshold = 1 << 30
        self.cache.load_back_threshold = 0
        self.controller = self.cache.cache_controller
        trees.addCleanup(self.stop)
        self.widen()
        self.device = self.allocator.get_kvcache()
        self.draft = self._register_draft() if draft else None

    def widen(self) -> None:
        """Lets a prefetch take the whole host pool, which is small here."""
        if self.cache.enable_storage:
            self.controller.prefetch_capacity_limit = self.controller.mem_pool_host.size

    def _register_draft(self) -> Any:
        pool = MHATokenToKVPool(
            size=self.trees.cfg.kv_size,
            page_size=PAGE,
            dtype=self.trees.cfg.dtype,
            head_num=1,
            head_dim=8,
            layer_num=1,
            device="cpu",
            enable_memory_saver=False,
        )
        specs, entries = hybrid_pool_assembler.build_hicache_draft_sidecars(
            draft_device_pools=(pool,), tree_cache=self.cache
        )
        for spec, entry in zip(specs, entries, strict=True):
            self.cache.register_sidecar_pool(spec, entry)
        return pool

    @property
    def storage(self) -> Any:
        backend = self.controller.storage_backend
        return getattr(backend, "_backend", backend)

    def fill(self, seed: int) -> None:
        """Random rows in the device pools."""
        generator = torch.Generator().manual_seed(seed)
        for pool in filter(None, (self.device, self.draft)):
            for layers in _parts(pool):
                for rows in layers:
                    rows.copy_(torch.randn(rows.shape, generator=generator).to(rows.dtype))

    def rows(self, indices: Any, pool: Any = None) -> list[torch.Tensor]:
        parts = _parts(self.device if pool is None else pool)
        return [rows[indices].clone() for layers in parts for rows in layers]

    def write(self, tokens: list[int]) -> Any:
        """Computes these tokens' pages, so to speak, and backs them up to storage; their device
        indices."""
        self.trees._insert(self.cache, self.allocator, self.requests, tokens)
        leaf = fixtures.match_prefix(self.cache, tokens).last_device_node
        self.trees._backup_node(self.cache, leaf)
        self.trees._write_path_to_l3(self.cache, leaf)
        self.trees._flush_l3_backups(self.cache, timeout=60.0)
        return self.cache.path_device_indices(leaf)

    def read(self, tokens: list[int], request: str = "r1") -> Any:
        """Prefetches these tokens' pages and loads them back; device indices of what came."""
        handle = CacheRequestHandle(request, 0)
        root = self.cache.root_node_handle()
        self.cache.prefetch_from_storage(handle, root, array("q", tokens), None, None)
        self.trees._run_prefetch_to_completion(self.cache, handle, timeout=60.0)
        found = fixtures.match_prefix(self.cache, tokens)
        if not found.host_hit_length:
            return self.cache.path_device_indices(found.last_device_node)
        self.trees._load_back_node(self.cache, found.best_match_node)
        again = fixtures.match_prefix(self.cache, tokens)
        return self.cache.path_device_indices(again.last_device_node)

    def threads_alive(self) -> bool:
        return threads_alive(self.controller)

    def stop(self) -> None:
        self.controller._stop_storage_threads()
