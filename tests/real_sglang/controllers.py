"""SGLang's own controller with its threads and host pools, on a CPU and without a model.

The differences between releases that a caller of the controller sees are settled here.
"""

from __future__ import annotations

import contextlib
import inspect
import queue
import time
from typing import Any

import pytest
import torch
from sglang.srt import server_args as arguments
from sglang.srt.managers import cache_controller
from sglang.srt.mem_cache import utils as hashing
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.version import __version__

from hicache_storage.keys import page_hashes

try:
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
    from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
except ImportError:
    from sglang.srt.mem_cache.memory_pool_host import MHATokenToKVPoolHost, MLATokenToKVPoolHost

RELEASE = tuple(int(part) for part in __version__.split(".")[:3])
Controller = cache_controller.HiCacheController
HAS_DRAFT_CALLS = hasattr(Controller, "set_draft_kv_pool")
"""Whether the controller itself sends draft pages to storage."""
PAGE = 4
TOKENS = 64
DEADLINE_S = 30.0


def set_rank(
    monkeypatch: pytest.MonkeyPatch,
    *,
    tp_rank: int = 0,
    tp_size: int = 1,
    pp_rank: int = 0,
    pp_size: int = 1,
) -> Any:
    """Makes SGLang take this process for a rank; a context to leave, in newer releases."""
    values = {
        "get_tensor_model_parallel_rank": tp_rank,
        "get_tensor_model_parallel_world_size": tp_size,
        "get_pipeline_model_parallel_rank": pp_rank,
        "get_pipeline_model_parallel_world_size": pp_size,
    }
    for name, value in values.items():
        if hasattr(cache_controller, name):
            monkeypatch.setattr(cache_controller, name, lambda value=value: value)
    try:
        from sglang.srt.runtime_context import get_parallel
    except ImportError:
        return None
    plain = {"tp_rank": tp_rank, "tp_size": tp_size, "pp_rank": pp_rank, "pp_size": pp_size}
    parts = {"attn_tp_rank": tp_rank, "attn_tp_size": tp_size, "moe_tp_size": tp_size}
    context = get_parallel().override(**plain)
    if tp_size > 1:
        try:
            context.__enter__()
        except ValueError:  # newer releases want what belongs together
            context = get_parallel().override(**plain, **parts)
        else:
            return context
    context.__enter__()
    return context


def set_arguments(**values: Any) -> None:
    """SGLang's arguments of this process."""
    found = arguments.ServerArgs(model_path="dummy", page_size=PAGE, device="cpu", **values)
    arguments.set_global_server_args_for_scheduler(found)


def device_pool(kind: str, *, layers: int = 2, heads: int = 2, dtype: Any = torch.bfloat16) -> Any:
    common = {
        "size": TOKENS,
        "page_size": PAGE,
        "dtype": dtype,
        "layer_num": layers,
        "device": "cpu",
        "enable_memory_saver": False,
    }
    if kind == "mha":
        return MHATokenToKVPool(head_num=heads, head_dim=8, **common)
    return MLATokenToKVPool(kv_lora_rank=12, qk_rope_head_dim=4, **common)


def host_pool(device: Any, layout: str, ratio: float = 3.0) -> Any:
    cls = MLATokenToKVPoolHost if isinstance(device, MLATokenToKVPool) else MHATokenToKVPoolHost
    parameters = inspect.signature(cls.__init__).parameters
    first, more = device, {}
    if "buffer_info" in parameters:
        first = device.get_device_pool_infos()[0].buffer_info
        offered = {
            "device_capacity_tokens": TOKENS,
            "start_layer": device.start_layer,
            "end_layer": device.end_layer,
            "target_layer_num": device.layer_num,
            "override_kv_cache_dim": getattr(device, "kv_cache_dim", None),
        }
        more = {name: value for name, value in offered.items() if name in parameters}
    return cls(first, ratio, 0, PAGE, layout, pin_memory=False, device="cpu", **more)


class Server:
    """A controller with storage, its host pools, and the waiting that a scheduler would do."""

    def __init__(
        self,
        backend: str,
        extra_config: dict[str, Any] | None,
        *,
        kind: str = "mha",
        layout: str = "page_first",
        draft: bool = False,
        attach: bool = True,
        dtype: Any = torch.bfloat16,
    ) -> None:
        self.device = device_pool(kind, dtype=dtype)
        self.host = host_pool(self.device, layout)
        self.controller = Controller(
            token_to_kv_pool_allocator=_allocator(self.device),
            mem_pool_host=self.host,
            page_size=PAGE,
            tp_group=None,
            load_cache_event=None,
            write_policy="write_through",
            io_backend="kernel" if layout == "page_first" else "direct",
        )
        self._backend, self._config = backend, dict(extra_config or {})
        if attach and not draft:
            self.attach()
        self.draft: Any = None
        if draft:
            draft_device = device_pool("mha", layers=1)
            self.draft = host_pool(draft_device, layout)
            if attach:
                self.attach()
            self.controller.set_draft_kv_pool(draft_device, self.draft)

    def attach(self) -> None:
        self.controller.attach_storage_backend(
            storage_backend=self._backend,
            prefetch_threshold=PAGE,
            model_name="served",
            storage_backend_extra_config=self._config,
        )
        self.controller.prefetch_capacity_limit = 1 << 30

    @property
    def storage(self) -> Any:
        return self.controller.storage_backend

    def send_drafts_flat(self) -> None:
        """Draft pages as the release itself sends them."""
        for name in ("_draft_page_get", "_draft_page_set"):
            vars(self.controller).pop(name, None)
        if hasattr(self.controller, "_maybe_register_draft_with_storage"):
            self.controller._maybe_register_draft_with_storage()

    def fill(self, seed: int) -> None:
        """Random bytes in all host pages."""
        for pool in filter(None, (self.host, self.draft)):
            generator = torch.Generator().manual_seed(seed)
            raw = torch.randint(0, 1 << 14, (pool.kv_buffer.nbytes // 2,), generator=generator)
            # Small numbers, so that no bfloat16 is a NaN.
            pool.kv_buffer.view(torch.int16).copy_(raw.view(pool.kv_buffer.view(torch.int16).shape))

    def pages(self, indices: Any, pool: Any = None) -> list[bytes]:
        pool = self.host if pool is None else pool
        return [
            bytes(pool.get_data_page(int(i)).contiguous().view(torch.uint8).numpy().data)
            for i in indices[::PAGE]
        ]

    def write(self, tokens: list[int]) -> tuple[Any, int]:
        """Backs these tokens' pages up; their host indices, and how many tokens were stored."""
        indices = self.host.alloc(len(tokens) // PAGE * PAGE)
        self.controller.write_storage(indices, tokens, hashes_of(tokens), None)
        done = self.controller.ack_backup_queue.get(timeout=DEADLINE_S)
        return indices, done.completed_tokens

    def prefetch(self, tokens: list[int], request: str = "r") -> tuple[Any, int]:
        """Prefetches these tokens' pages; their host indices, and how many tokens came."""
        if "host_indices" in inspect.signature(self.controller.prefetch).parameters:
            return self._prefetch_into(tokens, request)
        self.controller.prefetch(request, tokens, None)
        operation = self._looked_up()
        if operation is None or not operation.storage_hit_count:
            return torch.empty(0, dtype=torch.int64), 0
        operation.host_indices = self.host.alloc(operation.storage_hit_count)
        self.controller.prefetch_buffer.put(operation)
        self._wait_for_pages(operation)
        return operation.host_indices, operation.completed_tokens

    def _looked_up(self) -> Any:
        """The operation once its hits are known; None if it was revoked for too few."""
        end = time.monotonic() + DEADLINE_S
        revoked = getattr(self.controller, "prefetch_revoke_queue", None)
        while time.monotonic() < end:
            with contextlib.suppress(queue.Empty):
                return self.controller.prefetch_hit_queue.get(timeout=0.05)
            if revoked is not None and not revoked.empty():
                revoked.get_nowait()
                return None
        raise TimeoutError("the lookup never ended: a thread of the controller is gone")

    def _prefetch_into(self, tokens: list[int], request: str) -> tuple[Any, int]:
        indices = self.host.alloc(len(tokens) // PAGE * PAGE)
        operation = self.controller.prefetch(request, indices, tokens, None)
        end = time.monotonic() + DEADLINE_S
        while time.monotonic() < end:
            if not self.controller.prefetch_revoke_queue.empty():
                self.controller.prefetch_revoke_queue.get_nowait()
                return indices, 0
            if operation.is_terminated() or (
                operation.hash_value
                and operation.completed_tokens == len(operation.hash_value) * PAGE
            ):
                break
            time.sleep(0.01)
        else:
            raise TimeoutError("the prefetch never ended: a thread of the controller is gone")
        return indices, operation.completed_tokens

    def _wait_for_pages(self, operation: Any) -> None:
        wanted = len(operation.hash_value) * PAGE
        end = time.monotonic() + DEADLINE_S
        acks = getattr(self.controller, "ack_prefetch_queue", None)
        while time.monotonic() < end:
            if acks is None:
                if operation.completed_tokens == wanted or operation.is_terminated():
                    return
                time.sleep(0.01)
                continue
            with contextlib.suppress(queue.Empty):
                ack = acks.get(timeout=0.1)
                if ack.completed_tokens is not None:
                    operation.completed_tokens = ack.completed_tokens
                if ack.completed_req:
                    return
        raise TimeoutError("the prefetch never ended: a thread of the controller is gone")

    def threads_alive(self) -> bool:
        return threads_alive(self.controller)

    def stop(self) -> None:
        self.controller.detach_storage_backend()


def threads_alive(controller: Any) -> bool:
    """Whether all threads of a controller live; one of them starts another, so not all do at
    once."""
    names = ("prefetch_thread", "prefetch_io_aux_thread", "backup_thread")
    end = time.monotonic() + 5
    while time.monotonic() < end:
        threads = [getattr(controller, name, None) for name in names]
        if all(thread is not None and thread.is_alive() for thread in threads):
            return True
        time.sleep(0.05)
    return False


def hashes_of(tokens: list[int]) -> list[str]:
    """SGLang's page hashes of these tokens, which are also this package's."""
    theirs: list[str] = []
    for start in range(0, len(tokens) // PAGE * PAGE, PAGE):
        page = tokens[start : start + PAGE]
        theirs.append(hashing.get_hash_str(page, theirs[-1] if theirs else None))
    assert theirs == page_hashes(tokens, PAGE, mode="tokens")
    return theirs


def _allocator(device: Any) -> Any:
    try:
        from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
    except ImportError:
        from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
    return TokenToKVPoolAllocator(
        TOKENS, dtype=torch.bfloat16, device="cpu", kvcache=device, need_sort=False
    )
