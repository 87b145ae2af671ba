"""Fixtures: a store that is watched, and SGLang's storage backends over it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from adapters.fake_sglang import StorageConfig, storage_class
from recording import RecordingBackend

from hicache_storage import Store
from hicache_storage.adapters import sglang_storage

Make = Callable[..., Any]


@pytest.fixture
def backend() -> RecordingBackend:
    return RecordingBackend()


@pytest.fixture
def make(backend: RecordingBackend, monkeypatch: pytest.MonkeyPatch) -> Make:
    """`make(pool, extra_config, **storage_config)`: a backend of SGLang's over `backend`."""
    monkeypatch.setattr(
        sglang_storage, "open_store", lambda *_, **__: Store(backend, name="memory")
    )

    def build(
        pool: Any = None,
        extra_config: dict[str, Any] | None = None,
        *,
        cls: type[Any] | None = None,
        **config: Any,
    ) -> Any:
        options = {"model": "org/model", "revision": "r1", **(extra_config or {})}
        storage = (cls or storage_class())(StorageConfig(extra_config=options, **config), {})
        if pool is not None:
            storage.register_mem_pool_host(pool)
        return storage

    return build
