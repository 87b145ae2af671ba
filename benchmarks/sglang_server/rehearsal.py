"""A stand-in for `sglang.launch_server`, to rehearse the program without a GPU.

It takes the same arguments, answers the same requests, and keeps pages in the real stores, under
namespaces that differ where a server's would; the pages' bytes and the tokens are made up. With the
drafts of all pages that it reads it claims an accept length of 8, else of 1. REHEARSAL_FAULT, as
"no start: lmdb" or "forgets: s3" (after the first page), breaks the servers of one backend.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from hicache_storage import Namespace, Store, open_store
from hicache_storage.keys import draft_key, page_hashes

_PAGE_BYTES, _THRESHOLD_TOKENS = 64, 256


class StandIn:
    """One server's memory and its store."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        config = json.loads((Path(options.model_path) / "config.json").read_text())
        self.latent = config["model_type"] == "deepseek_v2"
        self.store: Store | None = None
        self.device: set[str] = set()
        self.pairing = "required"
        self.lock = threading.Lock()
        self.folder = os.environ.get("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", "")

    def attach(self, backend: str, extra: str) -> None:
        given = json.loads(extra)
        self.pairing = given.get("pairing", "required")
        url = f"file://{self.folder}" if backend == "file" else given["url"]
        self.store = open_store(url)
        if self.latent and self.pairing == "required" and self.options.tp_size > 1:
            print("of the draft's shards only those of rank 0 are ever written", flush=True)

    def detach(self) -> None:
        if self.store is not None:
            self.store.close()
        self.store = None

    def generate(self, prompt: list[int], tokens: int) -> dict[str, Any]:
        size, mode = self.options.page_size, "tokens"
        if self.options.speculative_algorithm != "STANDALONE":
            mode = "pairs"
        hashes = page_hashes(prompt, size, mode=mode)  # type: ignore[arg-type]
        wanted = hashes[: (len(prompt) - 1) // size]
        here = _leading(wanted, self.device)
        read, whole = self._read(wanted[here:])
        self.device.update(hashes)
        if self.store is not None:
            self._write(hashes if whole else hashes[here + read :])
        seed = hashlib.sha256(json.dumps(prompt).encode()).digest()
        steps = max(1, round(tokens / (8 if whole else 1)))
        cached = {"device": here * size, "host": 0, "storage": read * size,
                  "storage_backend": "StandIn"}  # fmt: skip
        return {
            "output_ids": [seed[n % 32] for n in range(tokens)],
            "meta_info": {
                "cached_tokens_details": cached,
                "spec_accept_length": tokens / steps,
                "completion_tokens": tokens,
            },
        }

    def _read(self, hashes: list[str]) -> tuple[int, bool]:
        """How many pages come from storage, and whether all have their drafts."""
        if self.store is None or not hashes:
            return 0, True
        runs = [self._run(kind, rank, hashes) for kind, rank in self._shards("target")]
        drafts = min(self._run(kind, rank, hashes) for kind, rank in self._shards("draft"))
        run = min(runs)
        if os.environ.get("REHEARSAL_FAULT") == f"forgets: {self.options.hicache_storage_backend}":
            run = min(run, 1)
        if self.pairing == "required":
            run = min(run, drafts)
        if run * self.options.page_size < _THRESHOLD_TOKENS:
            return 0, True
        return run, drafts >= run

    def _run(self, kind: str, rank: int, hashes: list[str]) -> int:
        assert self.store is not None
        keys = [draft_key(h) for h in hashes] if kind == "draft" else hashes
        return self.store.exists(self._namespace(kind, rank), keys)

    def _write(self, hashes: list[str]) -> None:
        assert self.store is not None
        for kind in ("draft", "target"):
            for _, rank in self._shards(kind):
                if self.latent and rank > 0:
                    continue
                keys = [draft_key(h) for h in hashes] if kind == "draft" else hashes
                pages = [bytes(_PAGE_BYTES)] * len(keys)
                self.store.batch_set(self._namespace(kind, rank), keys, pages)

    def _shards(self, kind: str) -> list[tuple[str, int]]:
        ranks = 1 if self.latent and kind == "target" else self.options.tp_size
        return [(kind, rank) for rank in range(ranks)]

    def _namespace(self, kind: str, rank: int) -> Namespace:
        return Namespace(
            model=self.options.model_path,
            pool="opaque",
            dtype=self.options.kv_cache_dtype,
            page_size=self.options.page_size,
            page_bytes=_PAGE_BYTES,
            layers=1,
            heads=1,
            head_dim=1,
            v_head_dim=0,
            order="opaque",
            revision=f"{kind} {self.options.hicache_mem_layout}",
            tp_rank=rank,
            tp_size=len(self._shards(kind)),
        )


class Handler(BaseHTTPRequestHandler):
    """SGLang's paths."""

    stand_in: StandIn

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing of it."""

    def do_GET(self) -> None:
        self._answer(200, "")

    def do_POST(self) -> None:
        body = self._body()
        with self.stand_in.lock:
            if self.path.startswith("/flush_cache"):
                self.stand_in.device.clear()
                self._answer(200, "Cache flushed.\n")
            else:
                tokens = body["sampling_params"]["max_new_tokens"]
                said = self.stand_in.generate(body["input_ids"], tokens)
                self._answer(200, f"data: {json.dumps(said)}\n\ndata: [DONE]\n\n")

    def do_PUT(self) -> None:
        body = self._body()
        self.stand_in.attach(
            body["hicache_storage_backend"], body["hicache_storage_backend_extra_config_json"]
        )
        self._answer(200, "attached")

    def do_DELETE(self) -> None:
        self.stand_in.detach()
        self._answer(200, "detached")

    def _body(self) -> dict[str, Any]:
        length = int(self.headers.get("Content-Length") or 0)
        found: dict[str, Any] = json.loads(self.rfile.read(length) or b"{}")
        return found

    def _answer(self, status: int, said: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(said.encode())))
        self.end_headers()
        self.wfile.write(said.encode())


def _leading(hashes: list[str], known: set[str]) -> int:
    return next((n for n, one in enumerate(hashes) if one not in known), len(hashes))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    for name in (
        "--model-path", "--hicache-storage-backend", "--hicache-storage-backend-extra-config",
        "--hicache-mem-layout", "--kv-cache-dtype", "--speculative-algorithm",
    ):  # fmt: skip
        parser.add_argument(name)
    for name in ("--port", "--page-size", "--tp-size"):
        parser.add_argument(name, type=int)
    return parser.parse_known_args()[0]


def main() -> None:
    options = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    if os.environ.get("REHEARSAL_FAULT") == f"no start: {options.hicache_storage_backend}":
        sys.exit("it was told not to start")
    time.sleep(float(os.environ.get("REHEARSAL_START_S", "0")))
    stand_in = StandIn(options)
    stand_in.attach(options.hicache_storage_backend, options.hicache_storage_backend_extra_config)
    Handler.stand_in = stand_in
    ThreadingHTTPServer(("127.0.0.1", options.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
