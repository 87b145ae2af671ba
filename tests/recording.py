"""A memory store that remembers what it was asked and fails on demand."""

from __future__ import annotations

from collections.abc import Callable

from hicache_storage import PageSpans, hookimpl
from hicache_storage.backends.memory import MemoryBackend, MemoryConfig


class RecordingBackend(MemoryBackend):
    """memory:// that lists its calls as (hook, keys, prefix_keys); namespace records apart."""

    def __init__(self) -> None:
        super().__init__(MemoryConfig())
        self.calls: list[tuple[str, list[str], list[str] | None]] = []
        self.refuse: set[str] = set()
        """Page keys (or stored keys) that batch_set answers False for."""
        self.fail: dict[str, Exception] = {}
        """By hook: what to raise, for draft pages only if the name is "draft <hook>"."""
        self.call_pages: int | None = None
        """Pages in one call; None for whole batches."""

    def spread(self, hook: str, page_bytes: int, count: int, work: Callable[[slice], None]) -> None:
        step = self.call_pages or count
        for start in range(0, count, step):
            work(slice(start, min(start + step, count)))

    def _note(self, hook: str, keys: list[str], prefix_keys: list[str] | None) -> None:
        keys = [key for key in keys if "/n:" not in key]
        if not keys:
            return
        self.calls.append((hook, keys, prefix_keys))
        name = f"draft {hook}" if "/d:" in keys[0] else hook
        if name in self.fail:
            raise self.fail[name]

    @hookimpl
    def batch_set(
        self, keys: list[str], pages: list[PageSpans], prefix_keys: list[str] | None
    ) -> list[bool]:
        self._note("batch_set", keys, prefix_keys)
        return [
            key.partition("/")[2] not in self.refuse
            and super(RecordingBackend, self)._set(key, b"".join(page))
            for key, page in zip(keys, pages, strict=True)
        ]

    @hookimpl
    def batch_get(
        self, keys: list[str], buffers: list[PageSpans], prefix_keys: list[str] | None
    ) -> list[bool]:
        self._note("batch_get", keys, prefix_keys)
        return [self._get(key, spans) for key, spans in zip(keys, buffers, strict=True)]

    @hookimpl
    def exists(self, keys: list[str], prefix_keys: list[str] | None) -> int:
        self._note("exists", keys, prefix_keys)
        return next((i for i, key in enumerate(keys) if key not in self._pages), len(keys))

    def page(self, key: str) -> bytes:
        """The stored bytes of the one page whose stored key ends in `/key`."""
        (name,) = [name for name in self._pages if name.endswith(f"/{key}")]
        return self._pages[name][0]

    def replace(self, key: str, stored: bytes) -> None:
        """Puts other bytes under a stored page's name, as a fault of the medium would."""
        (name,) = [name for name in self._pages if name.endswith(f"/{key}")]
        self._pages[name] = (stored, 0.0)

    def requests(self, hook: str) -> list[list[str]]:
        """The page keys of each call of a hook."""
        return [
            [key.partition("/")[2] for key in keys] for name, keys, _ in self.calls if name == hook
        ]
