"""Key forms of SGLang's releases: each reaches its one page, any other form reaches none."""

from __future__ import annotations

import pytest
from page_names import page_hash

from hicache_storage import InvalidKey
from hicache_storage.adapters.sglang_keys import key_tag, keys_by_pool, parse_key, pool_name

HASH = page_hash(0)


@pytest.mark.parametrize(
    ("key", "pool"), [(HASH, "kv"), (f"d:{HASH}", "draft"), (f"{HASH}.draft", "draft")]
)
def test_every_known_form_names_its_pool(key: str, pool: str) -> None:
    assert parse_key(key) == (pool, HASH)


@pytest.mark.parametrize(
    "key",
    [
        "", "d:", ".draft", f"d:{HASH}.draft", f"d:d:{HASH}", f"{HASH}.draft.draft", f"e:{HASH}",
        f"{HASH}.mamba", f"{HASH}_0_1", f"model/{HASH}", f"../{HASH}", f"{HASH}/..", HASH.upper(),
        f"{HASH}\n", f" {HASH}", "x" * 64, HASH[:15], 7, None, b"0" * 64,
    ],
)  # fmt: skip
def test_a_form_of_no_release_is_refused(key: object) -> None:
    with pytest.raises(InvalidKey):
        parse_key(key)


def test_a_refused_key_leaves_its_neighbours_in_place() -> None:
    refused: list[InvalidKey] = []
    keys = [HASH, "?", f"d:{page_hash(1)}", page_hash(2)]
    found = keys_by_pool(keys, refused.append)
    assert found == [("kv", [0, 3], [HASH, page_hash(2)]), ("draft", [2], [page_hash(1)])]
    assert len(refused) == 1


def test_pools_have_tags_of_their_own_and_the_target_none() -> None:
    names = ("kv", "draft", "draft_indexer", "mamba", "deepseek_v4_c4_indexer_scale")
    tags = [key_tag(pool_name(name)) for name in names]
    assert tags == ["", "d", "draft_indexer", "mamba", "deepseek_v4_c4_indexer_scale"]


@pytest.mark.parametrize("name", ["", "Mamba", "a:b", "../x", None, 3, "x" * 40])
def test_a_name_that_can_be_no_tag_is_refused(name: object) -> None:
    with pytest.raises(InvalidKey):
        pool_name(name)
