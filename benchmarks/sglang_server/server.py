"""One SGLang server: its process, and what is asked of it over HTTP."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .arguments import ADMIN_KEY, Start

LAUNCHER = ("-m", "sglang.launch_server")
_ANSWERS_S = 240.0
"""The longest that a request may take."""
_urlopen = urllib.request.build_opener(urllib.request.ProxyHandler({})).open


class ServerFailed(RuntimeError):
    """A server ended, did not start in time, or refused what was asked of it."""


@dataclass(frozen=True)
class Answer:
    """What a request for tokens gave."""

    tokens: list[int]
    accept_length: float | None
    """Tokens a verify step; None if there was none."""
    cached: dict[str, Any]
    """SGLang's `cached_tokens_details`: tokens from device, host and storage."""
    first_token_s: float
    seconds: float

    @property
    def from_storage(self) -> int:
        return int(self.cached.get("storage", 0))


class Server:
    """A server that was started; not ready before `wait` returns."""

    def __init__(self, start: Start, logs: Path, launcher: Sequence[str] = LAUNCHER) -> None:
        self.start = start
        self.log = logs / f"{start.name.replace(' ', '-')}.log"
        self.ready_after_s: float | None = None
        self._started = time.monotonic()
        # Not in this repository's folder: what is imported there is what is installed.
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, *launcher, *start.arguments()],
                cwd=logs,
                env={**os.environ, **start.environment()},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait(self, until: float) -> None:
        """Returns once it answers; raises ServerFailed at `until` (time.monotonic)."""
        while self._process.poll() is None:
            with contextlib.suppress(OSError):
                self._call("GET", "/health", timeout=5.0)
                self.ready_after_s = time.monotonic() - self._started
                return
            if time.monotonic() > until:
                raise ServerFailed(f"{self.start.name}: not ready in time; {self.last_words()}")
            time.sleep(0.25)
        raise ServerFailed(
            f"{self.start.name}: ended with {self._process.returncode}; {self.last_words()}"
        )

    def generate(self, prompt: list[int], tokens: int) -> Answer:
        """Continues `prompt` by `tokens` tokens, greedily."""
        body = {
            "input_ids": prompt,
            "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True},
            "stream": True,
        }
        first = None
        last: dict[str, Any] = {}
        started = time.perf_counter()
        with self._open("POST", "/generate", body, _ANSWERS_S) as answer:
            for line in answer:
                if not line.startswith(b"data: {"):
                    continue
                first = first or time.perf_counter()
                last = json.loads(line.removeprefix(b"data: "))
        ended = time.perf_counter()
        if first is None or "meta_info" not in last:
            raise ServerFailed(f"{self.start.name}: no tokens: {json.dumps(last)[:300]}")
        meta = last["meta_info"]
        return Answer(
            tokens=last["output_ids"],
            accept_length=meta.get("spec_accept_length"),
            cached=meta.get("cached_tokens_details") or {},
            first_token_s=first - started,
            seconds=ended - started,
        )

    def flush(self, wait_s: float = 60.0) -> None:
        """Empties device and host memory, once all pages are stored."""
        self._call("POST", f"/flush_cache?timeout={wait_s:g}", timeout=wait_s + 30)

    def attach(self, **options: Any) -> None:
        """Attaches its store with further options."""
        body = {
            "hicache_storage_backend": self.start.place.backend,
            "hicache_storage_backend_extra_config_json": self.start.place.extra(**options),
            "hicache_storage_prefetch_policy": "wait_complete",
            "hicache_write_policy": "write_through",
        }
        self._call("PUT", "/hicache/storage-backend", body)

    def detach(self) -> None:
        """Detaches its store, which it must have nothing to do with at that moment."""
        self._call("DELETE", "/hicache/storage-backend")

    def stop(self) -> None:
        """Ends it and its processes."""
        for sign, seconds in ((signal.SIGTERM, 15.0), (signal.SIGKILL, 15.0)):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, sign)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(seconds)
                break
        with contextlib.suppress(ProcessLookupError):  # those that outlive their parent
            os.killpg(self._process.pid, signal.SIGKILL)

    def logged(self, text: str) -> bool:
        """Whether its log has `text`."""
        return text in self.log.read_text(errors="replace")

    def last_words(self) -> str:
        """The end of its log, in one line."""
        text = self.log.read_text(errors="replace").strip()
        lines = [line for line in text.splitlines() if line.strip()]
        return f"log {self.log.name}: {' / '.join(lines[-3:])[-400:]}"

    def _call(
        self, method: str, path: str, body: dict[str, Any] | None = None, timeout: float = 60.0
    ) -> str:
        with self._open(method, path, body, timeout) as answer:
            return str(answer.read().decode(errors="replace"))

    def _open(self, method: str, path: str, body: dict[str, Any] | None, timeout: float) -> Any:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.start.port}{path}",
            None if body is None else json.dumps(body).encode(),
            {"Content-Type": "application/json", "Authorization": f"Bearer {ADMIN_KEY}"},
            method=method,
        )
        try:
            return _urlopen(request, timeout=timeout)
        except urllib.error.HTTPError as error:
            said = error.read().decode(errors="replace")[:500]
            if error.code == 503:
                raise ConnectionRefusedError(said) from None  # it is starting
            raise ServerFailed(
                f"{self.start.name}: {method} {path}: {error.code} {said.strip()}"
            ) from None
