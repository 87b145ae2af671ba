"""The existence cache: what is known isn't asked for again, and is wrong for a bounded time."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st
from middleware.conftest import KEY, OTHER, around
from recording import RecordingBackend

from hicache_storage.calling import Caller
from hicache_storage.middleware.existence import ExistenceCache


def set_page(caller: Caller, key: str) -> None:
    assert caller.batch_set([key], [(memoryview(b"x"),)], None) == [True]


def test_known_pages_are_not_asked_for_again_until_their_time_is_over(
    backend: RecordingBackend, clock: Callable[[float], None]
) -> None:
    _, caller = around(backend, ExistenceCache, found_s=10, missing_s=1)
    set_page(caller, KEY)
    assert caller.exists([KEY, OTHER], None) == 1
    assert caller.exists([KEY, OTHER], None) == 1
    assert backend.requests("exists") == [[OTHER.partition("/")[2]]]
    Caller(backend, name="other process").batch_set([OTHER], [(memoryview(b"x"),)], None)
    clock(1.1)
    assert caller.exists([KEY, OTHER], None) == 2
    backend.delete([KEY, OTHER])
    clock(8.8)
    assert caller.exists([KEY, OTHER], None) == 2, "a positive answer may be old for 10 s"
    clock(0.2)
    assert caller.exists([KEY, OTHER], None) == 0


def test_a_failed_read_turns_a_positive_answer_into_a_miss_at_once(
    backend: RecordingBackend, clock: object
) -> None:
    _, caller = around(backend, ExistenceCache, found_s=60)
    set_page(caller, KEY)
    backend.delete([KEY])
    false_hits = 0
    for _ in range(5):
        false_hits += caller.exists([KEY], None)
        caller.batch_get([KEY], [(memoryview(bytearray(1)),)], None)
    assert false_hits == 1
    set_page(caller, KEY)
    assert caller.exists([KEY], None) == 1, "a write clears it"


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["set", "get", "delete", "exists"]), st.sampled_from([KEY, OTHER])
        ),
        max_size=30,
    )
)
def test_alone_on_a_store_the_cache_is_never_wrong(steps: list[tuple[str, str]]) -> None:
    backend = RecordingBackend()
    _, caller = around(backend, ExistenceCache, found_s=1e6, missing_s=1e6)
    for verb, key in steps:
        if verb == "set":
            set_page(caller, key)
        elif verb == "get":
            caller.batch_get([key], [(memoryview(bytearray(1)),)], None)
        elif verb == "delete":
            caller.delete([key])
        for keys in ([KEY, OTHER], [OTHER, KEY]):
            assert caller.exists(keys, None) == backend.exists(keys, None)


def test_what_it_remembers_is_bounded(backend: RecordingBackend) -> None:
    cache, caller = around(backend, ExistenceCache, pages=10)
    for i in range(50):
        caller.exists([f"{'0f' * 16}/{i:064x}"], None)
    assert len(cache._known) == 10
