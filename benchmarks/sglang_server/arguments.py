"""The command line of a server under measurement."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .stores import Place

ADMIN_KEY = "of-this-run"
GUESSES = 7
Algorithm = Literal["STANDALONE", "EAGLE3"]
_NO_MULTICAST = {
    "NCCL_NVLS_ENABLE": "0",
    "NVSHMEM_DISABLE_NVLS": "1",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
}
"""NVLink multicast can put GPUs out of service that other guests of a host use. SGLang gathers
logits with it where they are bfloat16; in float16, as here, it never does."""


@dataclass(frozen=True)
class Start:
    """What one server is started with."""

    name: str
    """Names its log."""
    model: Path
    draft: Path
    place: Place
    port: int
    """And the next one, for the ranks' own."""
    algorithm: Algorithm = "STANDALONE"
    ranks: int = 1
    page_size: int = 64
    device_tokens: int = 8192
    kv_dtype: str = "auto"
    layout: str = "layer_first"

    def arguments(self) -> list[str]:
        """For `python -m sglang.launch_server`."""
        found = [
            "--model-path", str(self.model), "--skip-tokenizer-init",
            "--host", "127.0.0.1", "--port", str(self.port), "--nccl-port", str(self.port + 1),
            "--admin-api-key", ADMIN_KEY, "--enable-cache-report",
            "--tp-size", str(self.ranks), "--page-size", str(self.page_size),
            "--dtype", "float16", "--kv-cache-dtype", self.kv_dtype,
            # Several servers share the GPU: the pool's size is what is said, whatever is free.
            "--mem-fraction-static", "0.6", "--max-total-tokens", str(self.device_tokens),
            "--max-running-requests", "4", "--disable-cuda-graph", "--attention-backend", "triton",
            "--sampling-backend", "pytorch", "--grammar-backend", "none",
            "--enable-hierarchical-cache", "--hicache-ratio", "2",
            "--hicache-mem-layout", self.layout, "--hicache-io-backend", "kernel",
            "--hicache-write-policy", "write_through",
            "--hicache-storage-backend", self.place.backend,
            "--hicache-storage-prefetch-policy", "wait_complete",
            "--hicache-storage-backend-extra-config", self.place.extra(),
            "--speculative-algorithm", self.algorithm,
            "--speculative-draft-model-path", str(self.draft),
            "--speculative-num-steps", str(GUESSES), "--speculative-eagle-topk", "1",
            "--speculative-num-draft-tokens", str(GUESSES + 1),
        ]  # fmt: skip
        if self.ranks > 1:
            found.append("--disable-custom-all-reduce")  # NCCL will do, without more kernels
        return found

    def environment(self) -> dict[str, str]:
        """What the server's environment has beside this process's."""
        return {
            "PYTHONUNBUFFERED": "1",
            "HF_HUB_OFFLINE": "1",
            # A health check would be a request of its own.
            "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
            "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0",
            "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
            **_NO_MULTICAST,
            **self.place.environment,
        }
