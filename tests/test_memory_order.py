"""memory:// gives up the least recently used pages first."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from page_names import page_hash

from hicache_storage import Namespace, Store
from hicache_storage.backends.memory import MemoryBackend, MemoryConfig
from hicache_storage.page import HEADER_BYTES

PAGE = 4096
SPACE = Namespace("m", "opaque", "uint8", 1, PAGE, 1, 1, PAGE, 0, "opaque")
STORED = PAGE + HEADER_BYTES


@given(st.lists(st.tuples(st.sampled_from(["set", "get", "exists"]), st.integers(0, 6))))
def test_a_read_or_write_makes_a_page_recent_and_a_lookup_does_not(
    steps: list[tuple[str, int]],
) -> None:
    """Against a list of what is held in order of use, in a store with room for four."""
    backend = MemoryBackend(MemoryConfig(capacity=4 * STORED + STORED // 2))
    store = Store(backend)
    held: list[str] = []
    for verb, number in steps:
        key = page_hash(number)
        if verb == "set":
            if not store.counts.set_pages:
                held.append(f"n:{SPACE.digest}")  # as large as a page, and written once
            assert store.batch_set(SPACE, [key], [bytes(PAGE)]) == [True]
        elif verb == "get":
            assert store.batch_get(SPACE, [key], [bytearray(PAGE)]) == [key in held]
        else:
            assert store.exists(SPACE, [key]) == (key in held)
        if verb == "set" or (verb == "get" and key in held):
            held = [*(other for other in held if other != key), key][-4:]
        assert [page.key.partition("/")[2] for page in backend.scan("")] == held
