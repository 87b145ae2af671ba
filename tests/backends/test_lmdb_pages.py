"""Pages and their index never disagree, whatever is done to them and however it is read."""

from __future__ import annotations

import gc
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from backends.lmdb_rig import check_consistency, found, key, opened, page, store
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache_storage import Namespace, open_store

KIB, MIB = 1 << 10, 1 << 20


def test_looking_up_and_setting_again_do_not_touch_bodies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = opened(tmp_path)
    store(backend, range(8), 64 * KIB)
    environment = backend.environment
    trees = environment._known_trees()
    asked: list[object] = []

    class Watched:
        def __init__(self, handle: Any) -> None:
            self._handle = handle

        def begin(self, **options: Any) -> Any:
            return Transaction(self._handle.begin(**options))

        def __getattr__(self, name: str) -> Any:
            return getattr(self._handle, name)

    class Transaction:
        def __init__(self, transaction: Any) -> None:
            self._transaction = transaction

        def get(self, name: bytes, db: Any) -> Any:
            asked.append(db)
            return self._transaction.get(name, db=db)

        def cursor(self, db: Any) -> Any:
            asked.append(db)
            return self._transaction.cursor(db=db)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._transaction, name)

    monkeypatch.setattr(environment, "_handle", Watched(environment.handle))
    assert backend.exists([key(number) for number in range(9)]) == 8
    assert store(backend, range(8), 64 * KIB) == [True] * 8
    assert len(list(backend.scan(""))) == 8
    assert asked
    assert trees.bodies not in asked
    assert found(backend, [1], 64 * KIB) == [True]
    assert trees.bodies in asked
    backend.close()


def test_no_view_into_the_map_outlives_its_transaction(tmp_path: Path) -> None:
    backend = opened(tmp_path)
    store(backend, range(5), 64 * KIB)

    def views() -> set[int]:
        gc.collect()
        # What LMDB gives has no owner: it is plain memory of the map.
        return {id(one) for one in gc.get_objects() if type(one) is memoryview and one.obj is None}

    before = views()
    buffers = [(memoryview(bytearray(64)), memoryview(bytearray(64 * KIB))) for _ in range(6)]
    backend.batch_get([key(number) for number in range(6)], list(buffers))
    backend.exists([key(0)])
    list(backend.scan(""))
    backend.usage()
    store(backend, range(3, 7), 64 * KIB)
    assert views() <= before
    backend.close()


def test_a_record_and_its_body_never_disagree_for_a_reader(tmp_path: Path) -> None:
    """Every read of a page that is rewritten all the time is one whole page, and each is a hit."""
    backend = opened(tmp_path, durability="async")
    contents = [(memoryview(bytes([n]) * 64), memoryview(bytes([n]) * MIB)) for n in (0, 255)]
    backend.batch_set([key(0)], [contents[0]])
    stop, failures, reads = threading.Event(), [], []

    def read() -> None:
        header, body = bytearray(64), bytearray(MIB)
        while not stop.is_set():
            hit = backend.batch_get([key(0)], [(memoryview(header), memoryview(body))])
            if hit != [True] or len({*header, *body[::511], body[-1], body[-17]}) != 1:
                failures.append((hit, set(header), set(body)))
            reads.append(1)

    readers = [threading.Thread(target=read) for _ in range(4)]
    for reader in readers:
        reader.start()
    until_s = time.monotonic() + 3
    rounds = 0
    while time.monotonic() < until_s or rounds < 20:
        assert backend.batch_set([key(0)], [contents[rounds % 2]]) == [True]
        rounds += 1
    stop.set()
    for reader in readers:
        reader.join(30)
    assert not failures
    assert len(reads) > 20
    backend.close()


def test_a_page_proven_bad_is_at_most_one_false_hit(tmp_path: Path) -> None:
    namespace = Namespace(
        model="m",
        pool="opaque",
        dtype="uint8",
        page_size=1,
        page_bytes=64 * KIB,
        layers=1,
        heads=1,
        head_dim=1,
        v_head_dim=0,
        order="opaque",
    )
    with open_store(f"lmdb://{tmp_path}") as pages:
        names = [f"{number:064x}" for number in range(3)]
        content = [bytes([number]) * 64 * KIB for number in range(3)]
        assert pages.batch_set(namespace, names, content) == [True] * 3
        environment = pages._caller.backend.environment  # type: ignore[attr-defined]
        with environment.writing() as (txn, trees):
            cursor = txn.cursor(db=trees.bodies)
            assert cursor.first()
            while bytes(cursor.value()[:1]) != b"\1":
                assert cursor.next()
            body = bytearray(cursor.value())
            body[1000] ^= 4
            txn.put(cursor.key(), bytes(body), db=trees.bodies)
        answers = []
        for _ in range(5):
            run = pages.exists(namespace, names)
            hits = pages.batch_get(namespace, names, [bytearray(64 * KIB) for _ in names])
            answers.append((run, hits))
        assert answers[0] == (3, [True, False, True])
        assert answers[1:] == [(1, [True, False, True])] * 4


operations = st.lists(
    st.tuples(
        st.sampled_from(["set", "set other", "get", "delete", "exists", "clear", "reopen"]),
        st.lists(st.integers(0, 7), min_size=1, max_size=5),
        st.sampled_from([40, 700, 4064, 4080, 9000, 70_000]),
    ),
    max_size=25,
)


@settings(max_examples=40, deadline=None)
@given(operations=operations)
def test_the_store_behaves_as_a_dict(operations: list[tuple[str, list[int], int]]) -> None:
    model: dict[int, bytes] = {}
    with tempfile.TemporaryDirectory() as directory:
        backend = opened(directory, durability="async", map_size=MIB)
        for operation, numbers, size in operations:
            names = [key(number) for number in numbers]
            if operation.startswith("set"):
                other = 100 if operation == "set other" else 0
                given_pages = [page(number + other, size) for number in numbers]
                assert backend.batch_set(names, given_pages) == [True] * len(names)
                model.update(
                    (number, b"".join(spans))
                    for number, spans in zip(numbers, given_pages, strict=True)
                )
            elif operation == "get":
                buffers = [memoryview(bytearray(size + 64)) for _ in numbers]
                hits = backend.batch_get(names, [(b[:64], b[64:]) for b in buffers])
                for number, hit, buffer in zip(numbers, hits, buffers, strict=True):
                    assert hit == (len(model.get(number, b"")) == size + 64)
                    assert not hit or buffer == model[number]
            elif operation == "delete":
                assert backend.delete(names) == [True] * len(names)
                for number in numbers:
                    model.pop(number, None)
            elif operation == "exists":
                run = next((i for i, n in enumerate(numbers) if n not in model), len(numbers))
                assert backend.exists(names) == run
            elif operation == "clear":
                backend.clear()
                model.clear()
            else:
                backend.close()
                backend = opened(directory, durability="async", map_size=MIB)
            usage = backend.usage()
            assert usage.pages == len(model)
            assert usage.stored_bytes == sum(map(len, model.values()))
        assert {entry.key: entry.stored_bytes for entry in backend.scan("")} == {
            key(number): len(content) for number, content in model.items()
        }
        assert check_consistency(backend) == len(model)
        backend.close()
