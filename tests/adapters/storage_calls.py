"""Writing and reading pages by each of the calls that SGLang has, with and without drafts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from adapters.conftest import Make
from adapters.fake_sglang import MhaHostPool, PoolName, PoolTransfer, fill, indices

Hashes = Callable[[int], list[str]]
WAYS = ("flat", "in place", "by pool")


def write(storage: Any, way: str, keys: list[str], pool: Any, pages: list[int]) -> list[bool]:
    where = indices(pool, *pages)
    if way == "flat":
        flat = [pool.get_data_page(page * pool.page_size) for page in pages]
        return [storage.batch_set(keys, flat)] * len(keys)
    if way == "in place":
        return list(storage.batch_set_v1(keys, where, None))
    return list(storage.batch_set_v2([PoolTransfer(PoolName.KV, where, keys)])[PoolName.KV])


def read(storage: Any, way: str, keys: list[str], pool: Any, pages: list[int]) -> list[bool]:
    """Reads as SGLang does: flat pages are put into the pool by the caller."""
    where = indices(pool, *pages)
    if way == "flat":
        flat = storage.batch_get(keys, [pool.get_dummy_flat_data_page() for _ in keys])
        for page, tensor in zip(pages, flat, strict=True):
            if tensor is not None:
                pool.set_from_flat_data_page(page * pool.page_size, tensor)
        return [tensor is not None for tensor in flat]
    if way == "in place":
        return list(storage.batch_get_v1(keys, where, None))
    return list(storage.batch_get_v2([PoolTransfer("kv", where, keys)], extra_info=None)["kv"])


def pair(make: Make, options: dict[str, Any] | None = None, **config: Any) -> tuple[Any, ...]:
    """A backend with a filled target pool and a filled draft pool, and these."""
    pool, draft = MhaHostPool(), MhaHostPool(layers=1)
    fill(pool)
    fill(draft, seed=1)
    storage = make(pool, options, **config)
    storage.register_draft_host_pool(draft)
    return storage, pool, draft


def write_pairs(storage: Any, pool: Any, draft: Any, keys: list[str]) -> None:
    """Writes targets in place and their drafts flat."""
    pages = list(range(len(keys)))
    assert storage.batch_set_v1(keys, indices(pool, *pages)) == [True] * len(keys)
    flat = [draft.get_data_page(page * draft.page_size) for page in pages]
    assert storage.batch_set([f"d:{key}" for key in keys], flat)
