"""A page comes back in any spans, and its bytes are copied no more than they must be."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from backends.lmdb_rig import check_consistency, found, key, opened, page
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache_storage.backends.lmdb.copying import UNLOCKED_BYTES, copy, gather, scatter

KIB, MIB = 1 << 10, 1 << 20


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(
        st.one_of(
            st.integers(1, 1500),
            st.integers(3500, 4700),
            st.integers(8100, 8800),
            st.integers(1, 300_000),
        ),
        min_size=1,
        max_size=6,
    ),
    parts=st.integers(1, 9),
)
def test_a_page_of_any_size_in_any_spans_comes_back(sizes: list[int], parts: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        backend = opened(directory, durability="async")
        keys = [key(number) for number in range(len(sizes))]
        given_pages = [page(i, size, min(parts, size)) for i, size in enumerate(sizes)]
        assert backend.batch_set(keys, given_pages) == [True] * len(sizes)
        for number, size in enumerate(sizes):
            assert found(backend, [number], size) == [True]
            assert found(backend, [number], size + 1) == [False]
        buffers = [
            tuple(memoryview(bytearray(len(span))) for span in page(i, size, min(parts + 3, size)))
            for i, size in enumerate(sizes)
        ]
        assert backend.batch_get(keys, list(buffers)) == [True] * len(sizes)
        for i, size in enumerate(sizes):
            assert b"".join(buffers[i]) == b"".join(page(i, size))
        assert check_consistency(backend) == len(sizes)
        backend.close()


@pytest.mark.parametrize("first", [0, 1, 63, 256, 257, 5000])
def test_the_first_span_need_not_be_a_header(tmp_path: Path, first: int) -> None:
    backend = opened(tmp_path)
    body = bytes(range(256)) * 40
    spans = (memoryview(body)[:first], memoryview(body)[first:])
    assert backend.batch_set([key(1)], [spans]) == [True]
    buffer = memoryview(bytearray(len(body)))
    assert backend.batch_get([key(1)], [(buffer[:7], buffer[7:])]) == [True]
    assert buffer == body
    backend.close()


def test_a_page_of_one_span_is_written_without_a_copy_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[int] = []
    monkeypatch.setattr(
        "hicache_storage.backends.lmdb.records.gather",
        lambda target, sources: copied.append(len(target)) or gather(target, sources),
    )
    backend = opened(tmp_path)
    assert backend.batch_set([key(0)], [page(0, 64 * KIB)]) == [True]
    assert copied == []
    assert backend.batch_set([key(1)], [page(1, 64 * KIB, 8)]) == [True]
    assert copied == [64 * KIB]
    backend.close()


@given(st.data())
@settings(deadline=None)
def test_scatter_puts_the_sources_end_to_end_over_the_targets(data: Any) -> None:
    whole = data.draw(st.binary(max_size=400))

    def cut(what: memoryview) -> list[memoryview]:
        borders = sorted(data.draw(st.lists(st.integers(0, len(what)), max_size=6)))
        return [what[a:b] for a, b in zip([0, *borders], [*borders, len(what)], strict=True)]

    target = bytearray(len(whole))
    scatter(cut(memoryview(target)), cut(memoryview(whole)))
    assert target == whole
    joined = bytearray(len(whole))
    gather(memoryview(joined), cut(memoryview(whole)))
    assert joined == whole


@pytest.mark.parametrize("length", [0, 1, UNLOCKED_BYTES - 1, UNLOCKED_BYTES, 3 * MIB])
def test_a_copy_changes_its_own_bytes_only(length: int) -> None:
    source = bytes(range(256)) * (length // 256 + 1)
    target = bytearray(b"\xa5" * (length + 20))
    view = memoryview(target)[10 : 10 + length]
    copy(view, memoryview(source)[:length])
    assert target == b"\xa5" * 10 + source[:length] + b"\xa5" * 10
    view.release()
    target.append(0)  # nothing holds the memory any longer


def test_a_long_copy_into_memory_that_may_not_be_written_to_is_refused() -> None:
    with pytest.raises(BufferError):
        copy(memoryview(bytes(MIB)), memoryview(bytes(MIB)))
