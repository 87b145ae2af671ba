"""Store: whole pages of a namespace, exactly as they were written, or a miss."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import threading
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from recording import RecordingBackend

from hicache_storage import (
    BackendError,
    BackendUnavailable,
    InvalidKey,
    Namespace,
    PageSizeMismatch,
    Store,
    StoreClosed,
)
from hicache_storage.page import HEADER_BYTES

Hashes = Callable[[int], list[str]]


@pytest.fixture
def backend() -> RecordingBackend:
    return RecordingBackend()


@pytest.fixture
def store(backend: RecordingBackend) -> Iterator[Store]:
    with Store(backend, name="memory") as opened:
        opened.open()
        yield opened


def pages(count: int, size: int = 512) -> list[bytes]:
    return [bytes([i + 1]) * size for i in range(count)]


def buffers(count: int, size: int = 512) -> list[bytearray]:
    return [bytearray(b"\xee" * size) for _ in range(count)]


def test_pages_come_back_as_they_were_written(
    store: Store, target_namespace: Namespace, hashes: Hashes
) -> None:
    keys, got = hashes(3), buffers(3)
    assert store.batch_set(target_namespace, keys, pages(3)) == [True] * 3
    assert store.batch_get(target_namespace, keys, got) == [True] * 3
    assert got == pages(3)
    assert store.exists(target_namespace, keys) == 3


@given(
    cuts=st.lists(st.integers(0, 512), max_size=12),
    other=st.lists(st.integers(0, 512), max_size=12),
)
def test_a_page_may_be_cut_into_spans_in_any_way(cuts: list[int], other: list[int]) -> None:
    namespace = Namespace(
        model="m", pool="opaque", dtype="uint8", page_size=1, page_bytes=512, layers=1, heads=1,
        head_dim=512, v_head_dim=0, order="opaque",
    )  # fmt: skip
    store = Store(RecordingBackend())
    page = bytes(i % 251 for i in range(512))

    def cut(buffer: bytes | bytearray, at: list[int]) -> list[memoryview]:
        edges = [0, *sorted(at), 512]
        return [memoryview(buffer)[a:b] for a, b in itertools.pairwise(edges)]

    got = bytearray(512)
    assert store.batch_set(namespace, ["ab" * 16], [cut(page, cuts)]) == [True]
    assert store.batch_get(namespace, ["ab" * 16], [cut(got, other)]) == [True]
    assert got == page


def test_an_empty_batch_does_no_io(
    store: Store, backend: RecordingBackend, target_namespace: Namespace
) -> None:
    assert store.batch_set(target_namespace, [], []) == []
    assert store.batch_get(target_namespace, [], []) == []
    assert store.exists(target_namespace, []) == 0
    assert store.delete(target_namespace, []) == []
    assert backend.calls == []


@pytest.mark.parametrize("step", [1, 2, 3, 10])
def test_a_backend_that_asks_for_small_calls_gets_a_batch_in_parts_and_the_answers_are_the_same(
    store: Store,
    backend: RecordingBackend,
    target_namespace: Namespace,
    hashes: Hashes,
    step: int,
) -> None:
    backend.call_pages = step
    keys, prefix, got = hashes(5), hashes(7)[5:], buffers(5)
    backend.refuse = {keys[3]}
    stored = [True, True, True, False, True]
    assert store.batch_set(target_namespace, keys, pages(5), prefix) == stored
    assert store.batch_get(target_namespace, keys, got, prefix) == stored
    assert [page for page, hit in zip(got, stored, strict=True) if hit] == [
        page for page, hit in zip(pages(5), stored, strict=True) if hit
    ]
    parts = [keys[start : start + step] for start in range(0, 5, step)]
    assert backend.requests("batch_set") == backend.requests("batch_get") == parts
    digest = target_namespace.digest
    for (_, names, before), start in zip(backend.calls, [*range(0, 5, step)] * 2, strict=True):
        assert before == [f"{digest}/{key}" for key in prefix + keys[:start]]
        assert len(names) == len(keys[start : start + step])


@pytest.mark.parametrize("step", [1, 2, 5])
def test_a_backend_may_spread_a_batch_over_threads_in_any_order(
    store: Store,
    backend: RecordingBackend,
    target_namespace: Namespace,
    hashes: Hashes,
    step: int,
) -> None:
    asked = []

    def spread(hook: str, page_bytes: int, count: int, work: Callable[[slice], None]) -> None:
        asked.append((hook, page_bytes, count))
        parts = [slice(start, start + step) for start in range(0, count, step)]
        threads = [threading.Thread(target=work, args=(part,)) for part in reversed(parts)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    backend.spread = spread  # type: ignore[method-assign]
    keys, got = hashes(5), buffers(5)
    backend.refuse = {keys[3]}
    stored = [True, True, True, False, True]
    assert store.batch_set(target_namespace, keys, pages(5)) == stored
    backend.replace(keys[1], backend.page(keys[2]))
    hits = [True, False, True, False, True]
    assert store.batch_get(target_namespace, keys, got) == hits
    assert [page for page, hit in zip(got, hits, strict=True) if hit] == [
        page for page, hit in zip(pages(5), hits, strict=True) if hit
    ]
    assert asked == [("batch_set", 512, 5), ("batch_get", 512, 5)]
    assert store.counts.corrupt_pages == 1


def test_pages_that_a_spread_leaves_out_are_not_stored_and_not_read(
    store: Store, backend: RecordingBackend, target_namespace: Namespace, hashes: Hashes
) -> None:
    keys = hashes(3)
    backend.spread = lambda hook, page_bytes, count, work: work(slice(1, 2))  # type: ignore[method-assign]
    assert store.batch_set(target_namespace, keys, pages(3)) == [False, True, False]
    assert store.batch_get(target_namespace, keys, buffers(3)) == [False, True, False]


@pytest.mark.parametrize("hook", ["batch_set", "batch_get"])
@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (RuntimeError("no threads"), BackendError),
        (
            BackendUnavailable("gone", backend="file", operation="access"),
            BackendUnavailable,
        ),
    ],
)
def test_what_a_spread_raises_is_an_error_of_this_package(
    store: Store,
    backend: RecordingBackend,
    target_namespace: Namespace,
    hashes: Hashes,
    hook: str,
    raised: Exception,
    expected: type[Exception],
) -> None:
    def spread(**_: object) -> None:
        raise raised

    backend.spread = spread  # type: ignore[method-assign, assignment]
    with pytest.raises(expected):
        getattr(store, hook)(target_namespace, hashes(2), buffers(2))


def test_a_miss_does_not_spoil_its_neighbours(
    store: Store, target_namespace: Namespace, hashes: Hashes
) -> None:
    keys, got = hashes(4), buffers(4)
    store.batch_set(target_namespace, keys[:2] + keys[3:], pages(3))
    assert store.batch_get(target_namespace, keys, got) == [True, True, False, True]
    assert [got[0], got[1], got[3]] == pages(3)
    assert store.exists(target_namespace, keys) == 2


@pytest.mark.parametrize(
    ("keys", "sizes", "words"),
    [
        (3, [512] * 8, "3 keys but 8 pages"),
        (3, [512] * 2, "3 keys but 2 pages"),
        (2, [512, 511], "has 511 bytes; its namespace has pages of 512"),
        (1, [0], "has 0 bytes"),
    ],
)
def test_what_does_not_fit_is_refused_before_any_byte_moves(
    store: Store,
    backend: RecordingBackend,
    target_namespace: Namespace,
    hashes: Hashes,
    keys: int,
    sizes: list[int],
    words: str,
) -> None:
    got = [bytearray(b"\xee" * size) for size in sizes]
    for verb in (store.batch_set, store.batch_get):
        with pytest.raises(PageSizeMismatch, match=words):
            verb(target_namespace, hashes(keys), got)
    assert all(set(buffer) <= {0xEE} for buffer in got)
    assert backend.calls == []


@pytest.mark.parametrize(
    "key",
    [
        "../x",
        "/etc/x",
        "a/../../x",
        "d:../x",
        "d:" + "0a" * 32 + "/..",
        "a\0b",
        "",
        "CON",
        "..",
        "A" * 64,
        "0a" * 65,
    ],
)
def test_a_key_outside_the_allowed_form_is_refused_by_every_verb(
    store: Store, backend: RecordingBackend, target_namespace: Namespace, key: str
) -> None:
    verbs: list[Callable[[], object]] = [
        lambda: store.batch_set(target_namespace, [key], pages(1)),
        lambda: store.batch_get(target_namespace, [key], buffers(1)),
        lambda: store.exists(target_namespace, [key]),
        lambda: store.delete(target_namespace, [key]),
        lambda: store.exists(target_namespace, ["0a" * 32], [key]),
    ]
    for verb in verbs:
        with pytest.raises(InvalidKey, match="lower-case hex"):
            verb()
    assert backend.calls == []


def test_every_verb_derives_the_same_name_exactly_once(
    store: Store, backend: RecordingBackend, target_namespace: Namespace, hashes: Hashes
) -> None:
    (key,) = hashes(1)
    store.batch_set(target_namespace, [key], pages(1), [key])
    store.batch_get(target_namespace, [key], buffers(1), [key])
    store.exists(target_namespace, [key], [key])
    name = f"{target_namespace.digest}/{key}"
    assert {(tuple(keys), tuple(prefix or ())) for _, keys, prefix in backend.calls} == {
        ((name,), (name,))
    }
    assert [page.key for page in store.scan()] == [name]
    with pytest.raises(InvalidKey):
        store.exists(target_namespace, [name])
    assert store.delete(target_namespace, [key]) == [True]
    assert store.exists(target_namespace, [key]) == 0


def test_namespaces_do_not_meet(store: Store, target_namespace: Namespace, hashes: Hashes) -> None:
    (key,) = hashes(1)
    spaces = [dataclasses.replace(target_namespace, tenant=tenant) for tenant in ("t1", "t2", "")]
    for number, space in enumerate(spaces[:2]):
        store.batch_set(space, [key], [bytes([number]) * 512])
    assert [store.exists(space, [key]) for space in spaces] == [1, 1, 0]
    for number, space in enumerate(spaces[:2]):
        (got,) = buffers(1)
        assert store.batch_get(space, [key], [got]) == [True]
        assert got == bytes([number]) * 512


@pytest.mark.parametrize("damage", ["flip", "truncate", "zero", "other key", "other namespace"])
def test_a_page_proven_bad_is_a_miss_counted_logged_and_deleted(
    store: Store,
    backend: RecordingBackend,
    target_namespace: Namespace,
    hashes: Hashes,
    damage: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    keys = hashes(3)
    store.batch_set(target_namespace, keys, pages(3))
    good = backend.page(keys[1])
    other = dataclasses.replace(target_namespace, tenant="other")
    store.batch_set(other, [keys[1]], [pages(2)[1]])
    foreign = backend._pages[f"{other.digest}/{keys[1]}"][0]
    store.delete(other, [keys[1]])
    backend.replace(
        keys[1],
        {
            "flip": good[:100] + bytes([good[100] ^ 1]) + good[101:],
            "truncate": good[:-1],
            "zero": bytes(len(good)),
            "other key": backend.page(keys[0]),
            "other namespace": foreign,
        }[damage],
    )
    got = buffers(3)
    assert store.batch_get(target_namespace, keys, got) == [True, False, True]
    assert (got[0], got[2]) == (pages(3)[0], pages(3)[2])
    if damage != "truncate":  # a backend finds a wrong length itself
        assert store.counts.corrupt_pages == 1
        assert f"page {keys[1]}" in caplog.text
        assert store.exists(target_namespace, keys) == 1


def test_a_page_that_was_mended_meanwhile_is_not_deleted(
    store: Store, backend: RecordingBackend, target_namespace: Namespace, hashes: Hashes
) -> None:
    (key,) = hashes(1)
    store.batch_set(target_namespace, [key], pages(1))
    good, reads = backend.page(key), 0
    backend.replace(key, bytes(len(good)))
    read = backend._get

    def mended_after_first_read(name: str, spans: tuple[memoryview, ...]) -> bool:
        nonlocal reads
        reads += 1
        hit = read(name, spans)
        backend.replace(key, good)
        return hit

    backend._get = mended_after_first_read  # type: ignore[method-assign]
    assert store.batch_get(target_namespace, [key], buffers(1)) == [False]
    assert reads == 2
    assert store.exists(target_namespace, [key]) == 1


def test_an_io_error_while_looking_again_deletes_nothing(
    store: Store, backend: RecordingBackend, target_namespace: Namespace, hashes: Hashes
) -> None:
    (key,) = hashes(1)
    store.batch_set(target_namespace, [key], pages(1))
    backend.replace(key, bytes(512 + HEADER_BYTES))
    read = backend._get

    def fail_second(name: str, spans: tuple[memoryview, ...]) -> bool:
        backend.fail["batch_get"] = OSError(5, "I/O error")
        return read(name, spans)

    backend._get = fail_second  # type: ignore[method-assign]
    assert store.batch_get(target_namespace, [key], buffers(1)) == [False]
    assert len(list(store.scan())) == 1, "nothing is deleted"
    assert store.exists(target_namespace, [key]) == 0, "and nobody is sent to read it again"


def test_a_failing_backend_raises_and_the_next_call_works(
    store: Store, backend: RecordingBackend, target_namespace: Namespace, hashes: Hashes
) -> None:
    backend.fail["batch_set"] = BackendUnavailable("gone", backend="memory", operation="batch_set")
    with pytest.raises(BackendUnavailable):
        store.batch_set(target_namespace, hashes(1), pages(1))
    del backend.fail["batch_set"]
    assert store.batch_set(target_namespace, hashes(1), pages(1)) == [True]


def test_a_refused_page_can_be_offered_again(
    store: Store, backend: RecordingBackend, target_namespace: Namespace, hashes: Hashes
) -> None:
    keys = hashes(8)
    backend.refuse.add(keys[3])
    assert store.batch_set(target_namespace, keys, pages(8)) == [i != 3 for i in range(8)]
    assert store.exists(target_namespace, keys) == 3
    backend.refuse.clear()
    assert store.batch_set(target_namespace, keys[3:4], pages(8)[3:4]) == [True]
    assert store.exists(target_namespace, keys) == 8
    assert store.counts.refused_pages == 1


def test_the_store_says_what_it_holds(
    store: Store, target_namespace: Namespace, draft_namespace: Namespace, hashes: Hashes
) -> None:
    store.batch_set(target_namespace, hashes(2), pages(2))
    store.batch_set(draft_namespace, ["d:" + hashes(1)[0]], [bytes(256)])
    assert store.namespaces() == {
        target_namespace.digest: target_namespace,
        draft_namespace.digest: draft_namespace,
    }
    assert len(list(store.scan())) == 3
    assert len(list(store.scan(draft_namespace.digest))) == 1


def test_a_lost_namespace_record_leaves_the_pages_usable(
    store: Store, backend: RecordingBackend, target_namespace: Namespace, hashes: Hashes
) -> None:
    store.batch_set(target_namespace, hashes(1), pages(1))
    backend.delete([f"{target_namespace.digest}/n:{target_namespace.digest}"])
    assert store.namespaces() == {target_namespace.digest: None}
    assert store.batch_get(target_namespace, hashes(1), buffers(1)) == [True]


def test_clear_forgets_the_records_too(
    store: Store, target_namespace: Namespace, hashes: Hashes
) -> None:
    store.batch_set(target_namespace, hashes(1), pages(1))
    store.clear()
    assert store.namespaces() == {}
    store.batch_set(target_namespace, hashes(1), pages(1))
    assert store.namespaces() == {target_namespace.digest: target_namespace}


def test_a_closed_store_says_so(target_namespace: Namespace, hashes: Hashes) -> None:
    closed: list[int] = []
    backend = RecordingBackend()
    store = Store(backend)
    store._caller.close = lambda: closed.append(1)  # type: ignore[method-assign]
    store.close()
    store.close()
    assert closed == [1]
    verbs: list[Callable[[], object]] = [
        lambda: store.batch_set(target_namespace, hashes(1), pages(1)),
        lambda: store.batch_get(target_namespace, hashes(1), buffers(1)),
        lambda: store.exists(target_namespace, hashes(1)),
        lambda: store.delete(target_namespace, hashes(1)),
        lambda: list(store.scan()),
        store.namespaces,
        store.usage,
        store.flush,
        store.clear,
    ]
    for verb in verbs:
        with pytest.raises(StoreClosed, match="is closed"):
            verb()


def test_counts_are_exact_under_threads(target_namespace: Namespace, hashes: Hashes) -> None:
    store, keys = Store(RecordingBackend()), hashes(50)

    def work() -> None:
        for key in keys:
            store.batch_set(target_namespace, [key], pages(1))
            store.batch_get(target_namespace, [key, "00" * 32], buffers(2))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert (store.counts.set_pages, store.counts.hit_pages, store.counts.missed_pages) == (200,) * 3


def test_failures_are_logged_once_in_a_while(
    store: Store, backend: RecordingBackend, target_namespace: Namespace, hashes: Hashes,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    keys = hashes(20)
    store.batch_set(target_namespace, keys, pages(20))
    for key in keys:
        backend.replace(key, bytes(512 + HEADER_BYTES))
    with caplog.at_level(logging.WARNING):
        store.batch_get(target_namespace, keys, buffers(20))
    assert store.counts.corrupt_pages == 20
    assert store.failures.counts["corrupt"] == 20
    assert len(caplog.records) == 1


def test_a_store_without_delete_keeps_serving_after_a_bad_page(
    target_namespace: Namespace, hashes: Hashes
) -> None:
    class NoDelete(RecordingBackend):
        delete = None  # type: ignore[assignment]

    backend = NoDelete()
    store, keys = Store(backend), hashes(2)
    store.batch_set(target_namespace, keys, pages(2))
    backend.replace(keys[0], bytes(512 + HEADER_BYTES))
    assert store.batch_get(target_namespace, keys, buffers(2)) == [False, True]
    assert store.exists(target_namespace, keys) == 0, "a page known to be bad is not found again"
    store.batch_set(target_namespace, keys[:1], pages(1))
    assert store.exists(target_namespace, keys) == 2
    with pytest.raises(BackendError, match="has no delete"):
        store.delete(target_namespace, keys)
