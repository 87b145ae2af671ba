"""How pages are stored: any shape, whole, together with their index, by one commit a batch."""

from __future__ import annotations

import gc
import mmap
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from backends.lmdb_rig import (
    DIGEST,
    Child,
    check_consistency,
    extent,
    found,
    key,
    opened,
    page,
    store,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache_storage import ConfigError, Namespace, open_store
from hicache_storage.backends.lmdb import LmdbConfig
from hicache_storage.backends.lmdb.copying import UNLOCKED_BYTES, copy, gather, scatter
from hicache_storage.backends.lmdb.gate import Gate
from hicache_storage.backends.lmdb.records import MOST_PAGE_BYTES

KIB, MIB = 1 << 10, 1 << 20


# -- durability ----------------------------------------------------------------------------------

NO_META_SYNC, NO_SYNC, WRITE_MAP, MAP_ASYNC = 0x40000, 0x10000, 0x80000, 0x100000


@pytest.mark.parametrize(
    ("durability", "flags"),
    [("sync", 0), ("ordered", NO_META_SYNC), ("async", NO_META_SYNC | NO_SYNC)],
)
def test_each_durability_reaches_lmdb_as_flags_that_act(
    tmp_path: Path, durability: str, flags: int
) -> None:
    backend = opened(tmp_path, durability=durability)
    named: dict[str, bool] = backend.environment.handle.flags()
    found_flags = (
        (0 if named["metasync"] else NO_META_SYNC)
        | (0 if named["sync"] else NO_SYNC)
        | (WRITE_MAP if named["writemap"] else 0)
        | (MAP_ASYNC if named["map_async"] else 0)
    )
    assert found_flags == flags
    backend.close()


@pytest.mark.parametrize("durability", ["sync", "ordered", "async"])
def test_a_batch_of_a_thousand_pages_is_one_commit(tmp_path: Path, durability: str) -> None:
    backend = opened(tmp_path, durability=durability)
    store(backend, [0])
    before = backend.environment.handle.info()["last_txnid"]
    assert store(backend, range(1, 1001), 2048) == [True] * 1000
    assert backend.environment.handle.info()["last_txnid"] - before == 1
    backend.close()


@pytest.mark.parametrize(("durability", "most"), [("ordered", 64 * MIB), ("async", 8 * MIB)])
def test_a_commit_takes_a_bounded_number_of_bytes(
    tmp_path: Path, durability: str, most: int
) -> None:
    backend = opened(tmp_path, durability=durability)
    store(backend, [0])
    before = backend.environment.handle.info()["last_txnid"]
    assert store(backend, range(100), MIB) == [True] * 100
    commits = backend.environment.handle.info()["last_txnid"] - before
    assert commits == -(-100 // (most // (MIB + 64)))
    backend.close()


def test_storing_what_is_stored_already_commits_nothing(tmp_path: Path) -> None:
    backend = opened(tmp_path)
    store(backend, range(20))
    before = backend.environment.handle.info()["last_txnid"]
    for _ in range(3):
        assert store(backend, range(20)) == [True] * 20
    assert backend.environment.handle.info()["last_txnid"] == before
    backend.close()


@pytest.mark.parametrize("name", ["map_async", "writemap", "sync", "metasync", "durable"])
def test_an_option_that_would_not_act_does_not_exist(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="no option"):
        open_store(f"lmdb://{tmp_path}", **{name: "true"})


@pytest.mark.parametrize("name", ["none", "map_async", "nosync", "Sync", ""])
def test_a_durability_that_is_not_offered_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="expected one of"):
        open_store(f"lmdb://{tmp_path}", durability=name)


@pytest.mark.parametrize("durability", ["sync", "ordered", "async"])
def test_integrity_never_rests_on_a_writable_map(durability: Any) -> None:
    flags = LmdbConfig("/x", durability=durability).flags
    assert flags["writemap"] is False
    assert flags["map_async"] is False
    assert LmdbConfig("/x").flags["sync"] is True


def test_the_map_is_opened_without_read_ahead_and_with_many_reader_slots(tmp_path: Path) -> None:
    backend = opened(tmp_path)
    assert backend.environment.handle.flags()["readahead"] is False
    assert backend.environment.handle.max_readers() == 2048
    backend.close()


def test_flush_puts_everything_on_the_disk_whatever_the_durability(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for durability in ("sync", "ordered", "async"):
        backend = opened(tmp_path / durability, durability=durability)
        store(backend, range(3))
        synced: list[bool] = []

        class Watched:
            def __init__(self, handle: Any) -> None:
                self._handle = handle

            def sync(self, force: bool = False, log: list[bool] = synced) -> None:
                log.append(force)
                self._handle.sync(force)

            def __getattr__(self, name: str) -> Any:
                return getattr(self._handle, name)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(backend.environment, "_handle", Watched(backend.environment.handle))
            backend.flush()
            assert synced == [True]
        backend.close()


# -- keys and pages that don't fit ---------------------------------------------------------------


@pytest.mark.parametrize("wrong", [f"{DIGEST}/{'a' * 600}", "", "k" * 512])
def test_a_key_that_lmdb_can_not_take_fails_alone(tmp_path: Path, wrong: str) -> None:
    backend = opened(tmp_path)
    keys = [key(number) for number in range(10)]
    keys[5] = wrong
    answers = backend.batch_set(keys, [page(number, 512) for number in range(10)])
    assert answers == [True] * 5 + [False] + [True] * 4
    assert found(backend, [0, 4, 6, 9], 512) == [True] * 4
    assert backend.usage().pages == 9
    assert backend.failures.counts["key"] == 1
    check_consistency(backend)
    backend.close()


def test_the_longest_stored_key_fits_and_comes_back_as_it_was(tmp_path: Path) -> None:
    longest = f"{DIGEST}/{'t' * 32}:{'a' * 128}"
    assert len(longest) == 194
    backend = opened(tmp_path)
    assert backend.environment.longest_key >= 194
    assert backend.batch_set([longest, key(1)], [page(1, 600), page(2, 600)]) == [True, True]
    assert {entry.key for entry in backend.scan("")} == {longest, key(1)}
    assert [entry.key for entry in backend.scan(longest[:190])] == [longest]
    backend.close()


def test_long_model_names_and_tenants_do_not_make_keys_longer(tmp_path: Path) -> None:
    namespace = Namespace(
        model="a/very/long/" + "name" * 30,
        pool="opaque",
        dtype="uint8",
        page_size=1,
        page_bytes=100,
        layers=1,
        heads=1,
        head_dim=1,
        v_head_dim=0,
        order="opaque",
        tenant="t" * 64,
    )
    with open_store(f"lmdb://{tmp_path}") as pages:
        name = f"d:{'f' * 64}"
        assert pages.batch_set(namespace, [name], [bytes(100)]) == [True]
        assert all(len(entry.key) <= 194 for entry in pages.scan())
        assert pages.namespaces() == {namespace.digest: namespace}


def test_a_page_beyond_two_gib_is_refused_and_its_neighbours_are_stored(tmp_path: Path) -> None:
    backend = opened(tmp_path)
    with mmap.mmap(-1, MOST_PAGE_BYTES + 4096) as memory:
        huge = memoryview(memory)
        large = (memoryview(bytes(64)), huge)
        answers = backend.batch_set([key(0), key(1), key(2)], [page(0, 99), large, page(2, 99)])
        buffers: list[Any] = [(memoryview(bytearray(64)), huge)]
        assert backend.batch_get([key(1)], buffers) == [False]
        del large, buffers
        huge.release()
    assert answers == [True, False, True]
    assert found(backend, [0, 2], 99) == [True, True]
    backend.close()


# -- the layout ----------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [16 * KIB, 64 * KIB, MIB, 3 * MIB])
def test_a_page_of_a_power_of_two_wastes_next_to_nothing(tmp_path: Path, size: int) -> None:
    backend = opened(tmp_path, durability="async")
    count = 16 * MIB // size
    store(backend, range(count), size)
    backend.close()
    used = extent(tmp_path).used_pages * 4096
    assert used < count * size * 1.03 + 64 * KIB


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


# -- the whole as a state machine ----------------------------------------------------------------

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


# -- copies and the gate -------------------------------------------------------------------------


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


def test_a_gate_lets_many_through_or_one_alone() -> None:
    gate = Gate()
    state = {"inside": 0, "alone": 0, "most": 0}
    failures: list[str] = []
    lock, done = threading.Lock(), threading.Event()

    def pass_through() -> None:
        while not done.is_set():
            gate.enter()
            with lock:
                state["inside"] += 1
                state["most"] = max(state["most"], state["inside"])
                if state["alone"]:
                    failures.append("inside while somebody is alone")
            with lock:
                state["inside"] -= 1
            gate.leave()

    def be_alone() -> None:
        for _ in range(50):
            with gate.alone():
                state["alone"] += 1
                time.sleep(0.0005)
                if state["inside"] or state["alone"] != 1:
                    failures.append("not alone")
                state["alone"] -= 1

    def be_sole() -> None:
        for _ in range(50):
            gate.enter()
            with gate.sole():
                time.sleep(0.0005)
                if state["inside"] or state["alone"]:
                    failures.append("not the only one")
            gate.leave()

    threads = [threading.Thread(target=pass_through) for _ in range(4)]
    threads += [threading.Thread(target=be_alone) for _ in range(2)]
    threads += [threading.Thread(target=be_sole)]
    for thread in threads:
        thread.start()
    for thread in threads[4:]:
        thread.join(60)
    done.set()
    for thread in threads[:4]:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert not failures
    assert gate.idle


def test_waiting_to_be_alone_ends_in_time_and_leaves_the_gate_open() -> None:
    gate = Gate()
    gate.enter()
    assert gate.shut(0.05) is False
    gate.enter()
    gate.leave()
    gate.leave()
    assert gate.shut(0.05) is True
    assert gate.shut(0.05) is False
    gate.open()
    assert gate.idle


def test_a_writer_gives_up_only_once_no_other_thread_is_in_a_transaction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While others read all the time the client would never let it."""
    backend = opened(tmp_path, durability="async")
    store(backend, range(4), 256 * KIB)
    environment = backend.environment
    inside: list[int] = []

    class Transaction:
        def __init__(self, transaction: Any) -> None:
            self._transaction = transaction

        def abort(self) -> None:
            inside.append(environment._gate._inside)
            self._transaction.abort()

        def __getattr__(self, name: str) -> Any:
            return getattr(self._transaction, name)

    begin = environment._begin
    monkeypatch.setattr(
        environment,
        "_begin",
        lambda write: Transaction(begin(write=True)) if write else begin(write=False),
    )
    stop = threading.Event()

    def read() -> None:
        while not stop.is_set():
            found(backend, range(4), 256 * KIB)

    readers = [threading.Thread(target=read, daemon=True) for _ in range(3)]
    for reader in readers:
        reader.start()
    for _ in range(10):
        with pytest.raises(RuntimeError, match="on purpose"):
            write_and_fail(backend)
    stop.set()
    for reader in readers:
        reader.join(30)
    assert inside == [1] * 10
    with environment.reading() as (txn, trees):
        assert txn.get(b"x", db=trees.totals) is None
    backend.close()


def write_and_fail(backend: Any) -> None:
    with backend.environment.writing() as (txn, trees):
        txn.put(b"x", b"y", db=trees.totals)
        raise RuntimeError("on purpose")


def test_two_threads_write_at_once_and_neither_is_refused(tmp_path: Path) -> None:
    backend = opened(tmp_path, durability="async")
    failures: list[BaseException] = []

    def write(first: int) -> None:
        try:
            for start in range(first, first + 200, 5):
                assert store(backend, range(start, start + 5)) == [True] * 5
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=write, args=(first,)) for first in (0, 1000, 2000)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
    assert check_consistency(backend) == 600
    backend.close()


def test_processes_and_threads_write_and_read_at_once(tmp_path: Path) -> None:
    children = [
        Child(
            """
            import threading
            backend = opened(sys.argv[1], durability="async", map_size=1 << 20)
            first = int(sys.argv[2])
            failures = []
            def work(base):
                try:
                    for start in range(base, base + 60, 4):
                        assert store(backend, range(start, start + 4), 30_000) == [True] * 4
                        assert found(backend, range(start, start + 4), 30_000) == [True] * 4
                        if start % 20 == 0:
                            assert backend.delete([key(start)]) == [True]
                except BaseException as error:
                    failures.append(repr(error))
            threads = [threading.Thread(target=work, args=(first + i * 100,)) for i in range(3)]
            for thread in threads: thread.start()
            for thread in threads: thread.join(60)
            assert not failures, failures
            backend.close()
            """,
            tmp_path,
            first,
        )
        for first in (0, 1000)
    ]
    for child in children:
        with child:
            assert child.end() == ""
    backend = opened(tmp_path)
    assert check_consistency(backend) == 2 * 3 * 57
    backend.close()
