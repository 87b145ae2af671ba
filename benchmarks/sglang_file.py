"""SGLang's own file backend with its host pools and its controller's page functions, on the CPU.

What a page costs there is what its controller does for it: to write, it takes each page out of
the host pool as one flat tensor and hands those to the backend; to read, it lets the backend
fill new flat tensors and copies them to their places in the pool. All of it is SGLang's code,
called as its backup and prefetch threads do.
"""

from __future__ import annotations

import logging
import os
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import sglang_stand_ins

sglang_stand_ins.install()
warnings.filterwarnings("ignore")
os.environ.setdefault("SGLANG_HICACHE_FILE_BACKEND_ENABLE_METADATA_CACHE", "0")

import torch  # noqa: E402
from sglang.srt.managers.cache_controller import HiCacheController  # noqa: E402
from sglang.srt.mem_cache.hicache_storage import (  # noqa: E402
    HiCacheFile,
    HiCacheStorageConfig,
)
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool  # noqa: E402
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost  # noqa: E402
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost  # noqa: E402

logging.getLogger("sglang").setLevel(logging.ERROR)


class SGLangFile:
    """A host pool of SGLang's, filled with random bytes, and its file backend in `directory`."""

    def __init__(self, directory: Path, geometry: Any, num_pages: int, layout: str) -> None:
        directory.mkdir()
        self.directory = directory
        self.page_size: int = geometry.page_size
        self.pool = _host_pool(geometry, num_pages, layout)
        self.buffer: torch.Tensor = self.pool.kv_buffer
        self.fill()
        self.backend = HiCacheFile(
            HiCacheStorageConfig(
                tp_rank=0,
                tp_size=1,
                pp_rank=0,
                pp_size=1,
                attn_cp_rank=0,
                attn_cp_size=1,
                is_mla_model=geometry.kind == "mla",
                enable_storage_metrics=False,
                is_page_first_layout=layout != "layer_first",
                model_name="benchmark",
                extra_config={"file_storage_path": str(directory)},
            )
        )
        self._controller = SimpleNamespace(
            storage_host_pool=self.pool, storage_backend=self.backend, page_size=self.page_size
        )
        self._operation = SimpleNamespace(request_id="benchmark", is_terminated=lambda: False)

    def fill(self) -> None:
        self.buffer.view(torch.uint8).random_(0, 256)

    def write(self, keys: list[str], pages: list[int]) -> bool:
        stored = HiCacheController._generic_page_set(self._controller, keys, self._indices(pages))
        return bool(stored)

    def read(self, keys: list[str], pages: list[int]) -> bool:
        count = HiCacheController._generic_page_get(
            self._controller, self._operation, keys, self._indices(pages)
        )
        return count == len(keys)

    def _indices(self, pages: list[int]) -> torch.Tensor:
        starts = torch.tensor(pages, dtype=torch.int64) * self.page_size
        return (starts[:, None] + torch.arange(self.page_size)).flatten()


def _host_pool(geometry: Any, num_pages: int, layout: str) -> Any:
    """A host pool of `num_pages` pages beside the smallest device pool."""
    common = {
        "size": geometry.page_size,
        "page_size": geometry.page_size,
        "dtype": geometry.dtype,
        "layer_num": geometry.layers,
        "device": "cpu",
        "enable_memory_saver": False,
    }
    cls: Any
    if geometry.kind == "mha":
        device: Any = MHATokenToKVPool(
            head_num=geometry.heads, head_dim=geometry.head_dim, **common
        )
        cls, extra = MHATokenToKVPoolHost, {}
    else:
        rope = 64
        device = MLATokenToKVPool(
            kv_lora_rank=geometry.head_dim - rope, qk_rope_head_dim=rope, **common
        )
        cls = MLATokenToKVPoolHost
        extra = {
            "target_layer_num": geometry.layers,
            "override_kv_cache_dim": device.kv_cache_dim,
        }
    return cls(
        device.get_device_pool_infos()[0].buffer_info,
        2.0,
        0,
        geometry.page_size,
        layout,
        pin_memory=False,
        device="cpu",
        device_capacity_tokens=geometry.page_size,
        start_layer=device.start_layer,
        end_layer=device.end_layer,
        host_token_capacity=num_pages * geometry.page_size,
        **extra,
    )
