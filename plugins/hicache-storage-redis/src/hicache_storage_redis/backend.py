"""RedisBackend: one string a page, moved in pipelines of bounded size.

A page is one value, so Redis itself keeps it whole. Names are `<prefix>/<stored key>`; without hash
tags, so a cluster spreads pages over its nodes. Nothing here is durable beyond what the server
is configured for (RDB, AOF): the backend declares no `flush`.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Iterator
from typing import Any

from hicache_storage import ConfigError, PageSpans, StoredPage, Usage, hookimpl
from hicache_storage.failures import FailureLog

from .config import RedisConfig
from .errors import client_errors, is_of_one_page, translated

logger = logging.getLogger("hicache_storage")
SCANNED_AT_ONCE = 1000


class RedisBackend:
    """Pages in Redis or Valkey. One client a process, remade after a fork."""

    Config = RedisConfig

    def __init__(self, config: RedisConfig) -> None:
        if re.fullmatch(r"[\w.:/-]+", config.prefix) is None:
            raise ConfigError(
                f"redis: prefix {config.prefix!r} must be letters, digits and any of _ . : / -"
            )
        self.config = config
        self.failures = FailureLog("redis")
        self._lock = threading.Lock()
        self._client: Any = None
        self._pid = 0

    @hookimpl
    def open(self) -> None:
        """Connects, and warns of a memory policy that doesn't suit a cache."""
        try:
            nodes = self._memory()
        except client_errors() as error:
            raise translated(error, "open") from error
        if any(n.get("maxmemory") and n.get("maxmemory_policy") == "noeviction" for n in nodes):
            logger.warning(
                "redis: maxmemory is set with the policy noeviction, so a full server refuses "
                "pages; allkeys-lru makes room instead"
            )

    def client(self) -> Any:
        """This process's client."""
        if self._pid != os.getpid():
            with self._lock:
                if self._pid != os.getpid():
                    from .client import connect

                    self._client, self._pid = connect(self.config), os.getpid()
        return self._client

    @hookimpl
    def batch_set(self, keys: list[str], pages: list[PageSpans]) -> list[bool]:
        stored: list[bool] = []
        for start, stop in self._portions(pages):
            with self._pipeline() as pipeline:
                for key, page in zip(keys[start:stop], pages[start:stop], strict=True):
                    pipeline.set(self._name(key), b"".join(page), ex=self.config.ttl_s)
                answers = self._execute(pipeline, "batch_set")
            stored += [self._done(answer, "batch_set") for answer in answers]
        return stored

    @hookimpl
    def batch_get(self, keys: list[str], buffers: list[PageSpans]) -> list[bool]:
        hits: list[bool] = []
        ttl_s = self.config.ttl_s
        for start, stop in self._portions(buffers):
            with self._pipeline() as pipeline:
                for key in keys[start:stop]:
                    if ttl_s is None:
                        pipeline.get(self._name(key))
                    else:
                        pipeline.getex(self._name(key), ex=ttl_s)
                answers = self._execute(pipeline, "batch_get")
            for answer, spans in zip(answers, buffers[start:stop], strict=True):
                hits.append(self._fill(spans, answer))
        return hits

    @hookimpl
    def exists(self, keys: list[str]) -> int:
        with self._pipeline() as pipeline:
            for key in keys:
                pipeline.exists(self._name(key))
            answers = self._execute(pipeline, "exists")
        found = [self._done(answer, "exists") for answer in answers]
        return found.index(False) if False in found else len(found)

    @hookimpl
    def delete(self, keys: list[str]) -> list[bool]:
        with self._pipeline() as pipeline:
            for key in keys:
                pipeline.unlink(self._name(key))
            answers = self._execute(pipeline, "delete")
        return [not self._failed(answer, "delete") for answer in answers]

    @hookimpl
    def scan(self, prefix: str) -> Iterator[StoredPage]:
        return self._scan(prefix)

    def _scan(self, prefix: str) -> Iterator[StoredPage]:
        batch: list[str] = []
        for name in self._names(prefix):
            batch.append(name)
            if len(batch) == SCANNED_AT_ONCE:
                yield from self._measured(batch)
                batch = []
        yield from self._measured(batch)

    @hookimpl
    def usage(self) -> Usage:
        """Pages counted one by one; the capacity is the server's maxmemory, over all nodes."""
        pages = stored_bytes = 0
        for page in self._scan(""):
            pages += 1
            stored_bytes += page.stored_bytes
        try:
            limit = sum(int(node.get("maxmemory", 0)) for node in self._memory())
        except client_errors() as error:
            raise translated(error, "usage") from error
        return Usage(pages, stored_bytes, limit or None)

    @hookimpl
    def clear(self) -> None:
        batch: list[str] = []
        for name in self._names(""):
            batch.append(name)
            if len(batch) == SCANNED_AT_ONCE:
                self.delete([self._key(name) for name in batch])
                batch = []
        if batch:
            self.delete([self._key(name) for name in batch])

    @hookimpl
    def close(self) -> None:
        with self._lock:
            client, self._client = self._client, None
            if client is not None and self._pid == os.getpid():
                client.close()
            self._pid = 0

    def _name(self, key: str) -> str:
        return f"{self.config.prefix}/{key}"

    def _key(self, name: str) -> str:
        return name[len(self.config.prefix) + 1 :]

    def _pipeline(self) -> Any:
        return self.client().pipeline(transaction=False)

    def _execute(self, pipeline: Any, operation: str) -> list[Any]:
        """One answer a command; an exception stands for a command that failed alone."""
        try:
            return list(pipeline.execute(raise_on_error=False))
        except client_errors() as error:
            raise translated(error, operation) from error

    def _failed(self, answer: Any, operation: str) -> bool:
        """Whether one command failed; raises if that says that the server can't serve."""
        if not isinstance(answer, Exception):
            return False
        if is_of_one_page(answer):
            self.failures.note(operation, answer)
            return True
        raise translated(answer, operation) from answer

    def _done(self, answer: Any, operation: str) -> bool:
        return not self._failed(answer, operation) and bool(answer)

    def _fill(self, spans: PageSpans, answer: Any) -> bool:
        if self._failed(answer, "batch_get") or answer is None:
            return False
        if len(answer) != sum(map(len, spans)):
            return False
        whole = memoryview(answer)
        start = 0
        for span in spans:
            span[:] = whole[start : start + len(span)]
            start += len(span)
        return True

    def _portions(self, pages: list[PageSpans]) -> Iterator[tuple[int, int]]:
        """Ranges of pages that fit one pipeline, at least one page each."""
        start = size = 0
        for i, page in enumerate(pages):
            page_bytes = sum(map(len, page))
            if i > start and size + page_bytes > self.config.pipeline:
                yield start, i
                start, size = i, 0
            size += page_bytes
        yield start, len(pages)

    def _names(self, prefix: str) -> Iterator[str]:
        """Names of pages whose stored key starts with `prefix`, each once."""
        seen: set[str] = set()  # SCAN may give a name twice while the server rehashes
        pattern = self._name(prefix) + "*"
        try:
            for name in self.client().scan_iter(match=pattern, count=SCANNED_AT_ONCE):
                text = name.decode()
                if text not in seen:
                    seen.add(text)
                    yield text
        except client_errors() as error:
            raise translated(error, "scan") from error

    def _measured(self, names: list[str]) -> Iterator[StoredPage]:
        if not names:
            return
        with self._pipeline() as pipeline:
            for name in names:
                pipeline.strlen(name)
            sizes = self._execute(pipeline, "scan")
        for name, size in zip(names, sizes, strict=True):
            if isinstance(size, int) and size:
                yield StoredPage(self._key(name), size)

    def _memory(self) -> list[dict[str, Any]]:
        """INFO memory of each server that holds pages."""
        client = self.client()
        if not self.config.cluster:
            return [client.info("memory")]
        found = client.info("memory", target_nodes=client.PRIMARIES)
        return [found] if "maxmemory" in found else list(found.values())
