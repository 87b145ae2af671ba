"""Staging: scattered pages reach a backend in one span, and only good ones come back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
from recording import RecordingBackend

from hicache_storage import Namespace, PageSizeMismatch, PageSpans, Store, hookimpl, staging
from hicache_storage.page import ScatteredPage, as_spans
from hicache_storage.staging import Staged, Staging

PARTS = 8


class Parts(ScatteredPage):
    """A page of eight separate buffers that notes how it is copied."""

    def __init__(self, content: bytes) -> None:
        step = len(content) // PARTS
        self.parts = [bytearray(content[i : i + step]) for i in range(0, len(content), step)]
        self.length_bytes = len(content)
        self.copies: list[str] = []

    def gather(self, into: memoryview) -> None:
        self.copies.append("gather")
        into[:] = b"".join(self.parts)

    def scatter(self, source: memoryview) -> None:
        self.copies.append("scatter")
        step = len(source) // PARTS
        for i, part in enumerate(self.parts):
            part[:] = source[i * step : i * step + step]

    def __iter__(self) -> Iterator[memoryview]:
        return map(memoryview, self.parts)

    @property
    def content(self) -> bytes:
        return b"".join(self.parts)


class SpansSeen(RecordingBackend):
    """Notes how many spans each page came in."""

    def __init__(self) -> None:
        super().__init__()
        self.spans: list[int] = []

    @hookimpl
    def batch_set(
        self, keys: list[str], pages: list[PageSpans], prefix_keys: list[str] | None
    ) -> list[bool]:
        self.spans += [len(page) for page in pages]
        return super().batch_set(keys=keys, pages=pages, prefix_keys=prefix_keys)

    @hookimpl
    def batch_get(
        self, keys: list[str], buffers: list[PageSpans], prefix_keys: list[str] | None
    ) -> list[bool]:
        self.spans += [len(page) for page in buffers]
        return super().batch_get(keys=keys, buffers=buffers, prefix_keys=prefix_keys)


@pytest.fixture
def backend() -> SpansSeen:
    return SpansSeen()


@pytest.fixture
def store(backend: SpansSeen) -> Iterator[Store]:
    with Store(backend, name="memory") as opened:
        opened.open()
        yield opened


def contents(count: int, size: int = 512) -> list[bytes]:
    return [bytes([i + 1]) * size for i in range(count)]


@pytest.mark.parametrize("call_pages", [None, 1, 2])
def test_scattered_pages_are_one_span_after_the_header(
    store: Store, backend: SpansSeen, target_namespace: Namespace, hashes, call_pages
) -> None:
    backend.call_pages = call_pages
    keys, wanted = hashes(5), contents(5)
    pages = [Parts(content) for content in wanted]
    assert store.batch_set(target_namespace, keys, pages) == [True] * 5
    backend.spans.clear()
    places = [Parts(bytes(512)) for _ in range(5)]
    assert store.batch_get(target_namespace, keys, places) == [True] * 5
    assert [place.content for place in places] == wanted
    assert backend.spans == [2] * 5
    assert [page.copies for page in pages] == [["gather"]] * 5
    assert [place.copies for place in places] == [["scatter"]] * 5


def test_scattered_pages_and_spans_may_stand_in_one_batch(
    store: Store, target_namespace: Namespace, hashes
) -> None:
    keys, wanted = hashes(4), contents(4)
    mixed = [Parts(wanted[0]), wanted[1], (wanted[2][:100], wanted[2][100:]), Parts(wanted[3])]
    assert store.batch_set(target_namespace, keys, mixed) == [True] * 4
    first, second = Parts(bytes(512)), bytearray(512)
    third, fourth = Parts(bytes(512)), bytearray(512)
    assert store.batch_get(target_namespace, keys, [first, second, third, fourth]) == [True] * 4
    assert [first.content, second, third.content, fourth] == wanted


def test_a_bad_page_and_a_miss_leave_a_scattered_place_untouched(
    store: Store, backend: SpansSeen, target_namespace: Namespace, hashes
) -> None:
    keys = hashes(3)
    assert store.batch_set(target_namespace, keys[:2], contents(2)) == [True] * 2
    name = f"{target_namespace.digest}/{keys[1]}"
    stored = bytearray(64 + 512)
    header, body = memoryview(stored)[:64], memoryview(stored)[64:]
    assert backend.batch_get(keys=[name], buffers=[(header, body)], prefix_keys=None) == [True]
    stored[200] ^= 1
    assert backend.batch_set(keys=[name], pages=[(header, body)], prefix_keys=None) == [True]
    places = [Parts(b"\xee" * 512) for _ in range(3)]
    assert store.batch_get(target_namespace, keys, places) == [True, False, False]
    assert [place.content for place in places] == [contents(1)[0], *[b"\xee" * 512] * 2]


def test_the_length_of_a_scattered_page_is_checked(
    store: Store, target_namespace: Namespace, hashes
) -> None:
    with pytest.raises(PageSizeMismatch, match="has 504 bytes"):
        store.batch_set(target_namespace, hashes(1), [Parts(bytes(504))])


def test_more_than_a_thread_keeps_is_moved_in_place(
    store: Store, backend: SpansSeen, target_namespace: Namespace, hashes, monkeypatch
) -> None:
    monkeypatch.setattr(staging, "KEPT_BYTES", 3 * 512)
    keys, wanted = hashes(4), contents(4)
    pages = [Parts(content) for content in wanted]
    assert store.batch_set(target_namespace, keys, pages) == [True] * 4
    places = [Parts(bytes(512)) for _ in range(4)]
    backend.spans.clear()
    assert store.batch_get(target_namespace, keys, places) == [True] * 4
    assert [place.content for place in places] == wanted
    assert backend.spans == [1 + PARTS] * 4
    # For the checksum alone: one copy costs less than many spans.
    assert [page.copies for page in pages + places] == [["gather"]] * 8


def test_threads_have_memory_of_their_own_and_keep_it(target_namespace: Namespace) -> None:
    shared, found = Staging(), []
    pages = [Parts(bytes(512))]

    def look() -> None:
        first, second = shared.places(pages)[0], shared.places(pages)[0]
        assert type(first) is type(second) is Staged
        assert first[0].obj is second[0].obj
        found.append(first[0].obj)

    look()
    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert len(found) == 2
    assert found[0] is not found[1]
    assert shared.places([as_spans(bytes(8))]) == [as_spans(bytes(8))]


class Reentrant(SpansSeen):
    """Has the store write and read other pages in the middle of its calls."""

    inner: Callable[[], None] | None = None

    def _again(self) -> None:
        inner, self.inner = self.inner, None
        if inner is not None:
            inner()

    @hookimpl
    def batch_set(
        self, keys: list[str], pages: list[PageSpans], prefix_keys: list[str] | None
    ) -> list[bool]:
        self._again()
        return super().batch_set(keys=keys, pages=pages, prefix_keys=prefix_keys)

    @hookimpl
    def batch_get(
        self, keys: list[str], buffers: list[PageSpans], prefix_keys: list[str] | None
    ) -> list[bool]:
        hits = super().batch_get(keys=keys, buffers=buffers, prefix_keys=prefix_keys)
        self._again()
        return hits


@pytest.mark.parametrize("hook", ["batch_set", "batch_get"])
@pytest.mark.parametrize("inner_hook", ["batch_set", "batch_get"])
def test_a_call_in_the_middle_of_a_call_has_memory_of_its_own(
    target_namespace: Namespace, hashes, hook: str, inner_hook: str
) -> None:
    backend, keys, wanted = Reentrant(), hashes(6), contents(6)
    with Store(backend, name="memory") as store:
        store.open()
        assert store.batch_set(target_namespace, keys, wanted) == [True] * 6
        first = [Parts(content) for content in wanted[:4]]
        inner = [Parts(content) for content in wanted[4:]]

        def call() -> None:
            answers = getattr(store, inner_hook)(target_namespace, keys[4:], inner)
            assert answers == [True] * 2

        backend.inner = call
        assert getattr(store, hook)(target_namespace, keys[:4], first) == [True] * 4
        assert backend.inner is None
        assert [page.content for page in first + inner] == wanted
        got = [Parts(bytes(512)) for _ in keys]
        assert store.batch_get(target_namespace, keys, got) == [True] * 6
        assert [page.content for page in got] == wanted
