"""Parts: what a backend's `spread` may do with a batch, and what it can't."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from recording import RecordingBackend

from hicache_storage import BackendUnavailable, ContractViolation, Namespace, Store

WAIT_S = 30.0
Work = Callable[[slice], None]
Spread = Callable[[int, Work], None]


@pytest.fixture
def backend() -> RecordingBackend:
    return RecordingBackend()


@pytest.fixture
def store(backend: RecordingBackend) -> Iterator[Store]:
    with Store(backend, name="memory") as opened:
        opened.open()
        yield opened


def spreads(backend: RecordingBackend, spread: Spread) -> None:
    backend.spread = (  # type: ignore[method-assign]
        lambda hook, page_bytes, count, work: spread(count, work)
    )


def buffers(count: int) -> list[bytearray]:
    return [bytearray(512) for _ in range(count)]


def stored(store: Store, namespace: Namespace, keys: list[str]) -> list[bytes]:
    pages = [bytes([i + 1]) * 512 for i in range(len(keys))]
    assert store.batch_set(namespace, keys, pages) == [True] * len(keys)
    return pages


class Held:
    """A wait that another thread ends, within a bound."""

    def __init__(self) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()

    def wait(self) -> None:
        self.begun.set()
        assert self.go_on.wait(WAIT_S)


@pytest.mark.parametrize("ending", ["return", "raise"])
def test_a_call_waits_for_parts_that_its_spread_left_under_way(
    store: Store,
    backend: RecordingBackend,
    target_namespace: Namespace,
    hashes: Callable[[int], list[str]],
    monkeypatch: pytest.MonkeyPatch,
    ending: str,
) -> None:
    keys, got = hashes(2), buffers(2)
    pages, held, order = stored(store, target_namespace, keys), Held(), []
    real = RecordingBackend._get

    def slow(self: RecordingBackend, key: str, spans: Any) -> bool:
        held.wait()
        order.append("read")
        return real(self, key, spans)

    monkeypatch.setattr(RecordingBackend, "_get", slow)

    def spread(count: int, work: Work) -> None:
        threading.Thread(target=work, args=(slice(0, count),)).start()
        assert held.begun.wait(WAIT_S)
        threading.Timer(0.2, held.go_on.set).start()
        if ending == "raise":
            raise BackendUnavailable("gone", backend="memory", operation="access")

    spreads(backend, spread)
    if ending == "raise":
        with pytest.raises(BackendUnavailable):
            store.batch_get(target_namespace, keys, got)
    else:
        assert store.batch_get(target_namespace, keys, got) == [True] * 2
        assert got == pages
    assert order == ["read"] * 2


def test_a_part_that_comes_after_the_call_touches_nothing(
    store: Store,
    backend: RecordingBackend,
    target_namespace: Namespace,
    hashes: Callable[[int], list[str]],
) -> None:
    keys, got = hashes(2), buffers(2)
    stored(store, target_namespace, keys)
    late: list[Work] = []
    spreads(backend, lambda count, work: late.append(work))
    assert store.batch_get(target_namespace, keys, got) == [False] * 2
    with pytest.raises(ContractViolation, match="'memory': spread called `work` after it had ret"):
        late[0](slice(0, 2))
    assert got == buffers(2)
    for buffer in got:
        buffer.append(0)  # nobody holds it any more


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ([slice(0, 2), slice(1, 3)], "a second time with some of pages 1 to 3"),
        ([slice(0, 3), slice(0, 3)], "a second time"),
        ([slice(0, 3, 2)], "expected a slice of pages in a row, of the batch's 3"),
        ([slice(None, None, -1)], "expected a slice"),
        ([0, 1, 2], "called `work` with 0; expected a slice"),
        ([None], "with None; expected a slice"),
    ],
)
@pytest.mark.parametrize("swallowed", [False, True])
def test_parts_that_are_none_of_the_batch_break_the_contract(
    store: Store,
    backend: RecordingBackend,
    target_namespace: Namespace,
    hashes: Callable[[int], list[str]],
    parts: list[Any],
    words: str,
    swallowed: bool,
) -> None:
    def spread(count: int, work: Work) -> None:
        for part in parts:
            if swallowed:
                thread = threading.Thread(target=quietly, args=(work, part))
                thread.start()
                thread.join()
            else:
                work(part)

    spreads(backend, spread)
    for call in (store.batch_set, store.batch_get):
        with pytest.raises(ContractViolation, match=words):
            call(target_namespace, hashes(3), buffers(3))


def quietly(work: Work, part: Any) -> None:
    try:
        work(part)
    except BaseException:
        return


@pytest.mark.parametrize(
    "parts",
    [
        [slice(None)],
        [slice(-1, None), slice(None, -1)],
        [slice(0, 2), slice(2, 9)],
        [slice(0, 3), slice(3, 6), slice(1, 1)],
    ],
)
def test_slices_mean_what_they_mean_of_a_list(
    store: Store,
    backend: RecordingBackend,
    target_namespace: Namespace,
    hashes: Callable[[int], list[str]],
    parts: list[slice],
) -> None:
    keys, got, before = hashes(3), buffers(3), hashes(4)[3:]
    spreads(backend, lambda count, work: [work(part) for part in parts] and None)
    pages = stored(store, target_namespace, keys)
    backend.calls.clear()
    assert store.batch_get(target_namespace, keys, got, before) == [True] * 3
    assert got == pages
    names = [f"{target_namespace.digest}/{key}" for key in (*before, *keys)]
    for _, asked, prefix in backend.calls:
        assert prefix == names[: names.index(asked[0])]


@pytest.mark.parametrize("hook", ["batch_set", "batch_get"])
def test_an_error_that_a_spread_loses_is_raised(
    store: Store,
    backend: RecordingBackend,
    target_namespace: Namespace,
    hashes: Callable[[int], list[str]],
    hook: str,
) -> None:
    def spread(count: int, work: Work) -> None:
        for i in range(count):
            quietly(work, slice(i, i + 1))

    spreads(backend, spread)
    error = BackendUnavailable("gone", backend="memory", operation=hook)
    backend.fail[hook] = error
    with pytest.raises(BackendUnavailable) as raised:
        getattr(store, hook)(target_namespace, hashes(3), buffers(3))
    assert raised.value is error


@pytest.mark.parametrize("spread", [False, True])
def test_what_the_callers_own_pages_raise_is_no_error_of_the_backend(
    store: Store,
    backend: RecordingBackend,
    target_namespace: Namespace,
    hashes: Callable[[int], list[str]],
    monkeypatch: pytest.MonkeyPatch,
    spread: bool,
) -> None:
    def places(_: object) -> None:
        raise MemoryError("no room to copy to")

    monkeypatch.setattr(store._staging, "places", places)
    if not spread:
        backend.spread = None  # type: ignore[method-assign, assignment]
    for call in (store.batch_set, store.batch_get):
        with pytest.raises(MemoryError):
            call(target_namespace, hashes(2), buffers(2))


@pytest.mark.skipif(
    threading.current_thread() is not threading.main_thread(), reason="signals go to the main one"
)
@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_is_raised_only_once_no_part_is_under_way(
    store: Store,
    backend: RecordingBackend,
    target_namespace: Namespace,
    hashes: Callable[[int], list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held, order, caller = Held(), [], threading.get_ident()

    def slow(*_: object) -> bool:
        held.wait()
        order.append("read")
        return False

    monkeypatch.setattr(RecordingBackend, "_get", slow)

    def interrupt() -> None:
        for _ in range(3):
            signal.pthread_kill(caller, signal.SIGINT)
            threading.Event().wait(0.1)
        held.go_on.set()

    def spread(count: int, work: Work) -> None:
        threading.Thread(target=work, args=(slice(0, count),)).start()
        assert held.begun.wait(WAIT_S)
        threading.Timer(0.1, interrupt).start()

    spreads(backend, spread)
    with pytest.raises(KeyboardInterrupt):
        store.batch_get(target_namespace, hashes(1), buffers(1))
    assert order == ["read"]


def test_an_interrupt_in_a_part_wins_over_errors_of_others(
    store: Store,
    backend: RecordingBackend,
    target_namespace: Namespace,
    hashes: Callable[[int], list[str]],
) -> None:
    def spread(count: int, work: Work) -> None:
        quietly(work, slice(0, 1))
        raise KeyboardInterrupt

    spreads(backend, spread)
    backend.fail["batch_get"] = ValueError("broken")
    with pytest.raises(KeyboardInterrupt):
        store.batch_get(target_namespace, hashes(2), buffers(2))
