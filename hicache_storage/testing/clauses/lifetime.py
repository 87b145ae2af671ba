"""Section 9, opening and closing; section 10, secrets."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ...errors import StoreClosed
from ...opening import build_from
from ..bench import Bench, buffers_for
from ..clause import ClauseFailed, NotSelected, clause, expect, expect_equal
from ..secrets import secret_values

SETTLE_S = 3.0


def _fill(bench: Bench, store: Any, count: int = 8) -> tuple[Any, list[str], list[bytes]]:
    namespace = bench.namespace(1024)
    keys, pages = bench.keys(count), bench.pages(count, 1024)
    expect_equal(store.batch_set(namespace, keys, pages), [True] * count, "batch_set")
    return namespace, keys, pages


@clause("9.1", "Pages survive closing and opening again", needs=["persistent"])
def reopen(bench: Bench) -> None:
    """In the same process and in another one; also those of several openings, and what was
    deleted stays deleted."""
    first = bench.open()
    namespace, keys, pages = _fill(bench, first)
    deleted = "delete" in first.capabilities
    if deleted:
        first.delete(namespace, keys[7:])
    first.close()
    second = bench.open()
    there = 7 if deleted else 8
    expect_equal(second.exists(namespace, keys), there, "exists after opening again")
    buffers = buffers_for(namespace, there)
    hits = second.batch_get(namespace, keys[:there], buffers)
    expect_equal(hits, [True] * there, "batch_get after opening again")
    expect([bytes(b) for b in buffers] == pages[:there], "other bytes after opening again")
    _, more, _ = _fill(bench, second)
    second.close()
    read = bench.spawn(
        "read_pages", namespace=namespace.canonical, keys=[*keys, *more], first_seed=0
    ).answer()
    wanted = [i < there or i >= 8 for i in range(16)]
    expect_equal(read["hits"], wanted, "batch_get in another process after closing")


@clause("9.2", "Closing twice is closing once")
def close_twice(bench: Bench) -> None:
    """The second call does nothing; so does the end of a `with` after a close. The backend's own
    `close` is called once, with nothing stored as well as after use."""
    unused = bench.open()
    unused.close()
    unused.close()
    with bench.open() as used:
        _fill(bench, used)
        used.close()
    used.close()


@clause("9.3", "After close every call is refused with StoreClosed")
def use_after_close(bench: Bench) -> None:
    """No verb reaches the closed backend, and none answers as if pages were missing."""
    store = bench.open()
    namespace, keys, pages = _fill(bench, store)
    store.close()
    calls: dict[str, Callable[[], object]] = {
        "batch_set": lambda: store.batch_set(namespace, keys, pages),
        "batch_get": lambda: store.batch_get(namespace, keys, buffers_for(namespace, 8)),
        "exists": lambda: store.exists(namespace, keys),
        "delete": lambda: store.delete(namespace, keys),
        "scan": lambda: list(store.scan()),
        "usage": store.usage,
        "flush": store.flush,
        "clear": store.clear,
    }
    for name, call in calls.items():
        try:
            call()
        except StoreClosed:
            continue
        raise ClauseFailed(f"{name} on a closed store did not raise StoreClosed")


@clause("9.4", "Opening and closing leaves no file descriptor behind")
def no_descriptor_left(bench: Bench) -> None:
    """Five times opened, used and closed, after one time to warm up. A scan that is dropped half
    way and an error of the caller inside of a `with` leave none either."""

    def once() -> None:
        store = bench.open()
        namespace, keys, _ = _fill(bench, store)
        store.batch_get(namespace, keys, buffers_for(namespace, 8))
        if "scan" in store.capabilities:
            next(iter(store.scan()), None)
        store.close()
        with suppress(ZeroDivisionError), bench.open() as store:
            raise ZeroDivisionError

    once()
    before = _descriptors()
    for _ in range(5):
        once()
    _settle(lambda: _descriptors() <= before)
    after = _descriptors()
    expect(after <= before, f"{after - before} more open file descriptors after 5 openings")


@clause("9.5", "After close no thread of the backend is left")
def no_thread_left(bench: Bench) -> None:
    """Within three seconds of the close, also while another store of the same backend stays open
    and keeps its own (unless the scope is "exclusive")."""
    bench.open().close()
    if bench.open().scope == "exclusive":
        bench.close_all()
    before = set(threading.enumerate())
    for _ in range(3):
        store = bench.open()
        namespace, keys, _ = _fill(bench, store)
        store.batch_get(namespace, keys, buffers_for(namespace, 8))
        store.close()
    _settle(lambda: not set(threading.enumerate()) - before)
    left = sorted(thread.name for thread in set(threading.enumerate()) - before)
    expect(not left, f"threads left {SETTLE_S} s after close: {', '.join(left)}")


@clause("9.6", "Making a backend opens nothing", needs=["named"])
def making_opens_nothing(bench: Bench) -> None:
    """The constructor neither connects nor starts threads nor touches the store: configurations
    are made and thrown away by tools that only look. `open` does all that."""
    build_from(bench.subject.where)  # imports what it imports
    files, threads = _descriptors(), set(threading.enumerate())
    backends = [build_from(bench.subject.where) for _ in range(3)]
    expect(_descriptors() <= files, "constructing a backend opened a file or a connection")
    left = sorted(thread.name for thread in set(threading.enumerate()) - threads)
    expect(not left, f"constructing a backend started threads: {', '.join(left)}")
    expect(len(backends) == 3, "three backends were made")


def _descriptors() -> int:
    if not os.path.isdir("/proc/self/fd"):
        raise NotSelected("it counts file descriptors by way of /proc/self/fd, which isn't there")
    return len(os.listdir("/proc/self/fd"))


def _settle(done: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + SETTLE_S
    while not done() and time.monotonic() < deadline_s:
        time.sleep(0.02)


@clause("10.1", "No text shows a secret", needs=["secrets"])
def no_secret_shown(bench: Bench) -> None:
    """The repr and str of the backend, its config and the store, of the error for another option
    of the same URL that is wrong, and of what comes of a secret that is wrong itself, don't
    contain the value of a secret option."""
    secrets = secret_values(bench.subject)
    store = bench.store
    backend = bench.raw().backend
    shown = {
        "repr of the store": repr(store),
        "repr of the backend": repr(backend),
        "str of the backend": str(backend),
    }
    for name, value in vars(backend).items():
        shown[f"repr of the backend's {name}"] = repr(value)
    try:
        bench.subject.open(no_such_option="x")
    except Exception as error:
        shown["an error about another option"] = f"{error} {error!r} {error.__cause__}"
    else:
        raise ClauseFailed("the option 'no_such_option' was accepted")
    for name, secret in list(secrets.items()):
        secrets[f"{name}, given wrong"] = secret[::-1] + "Wrong1"
        shown[f"an error about a wrong {name}"] = _tried_with(bench, name, secret[::-1] + "Wrong1")
    for place, text in shown.items():
        for name, secret in secrets.items():
            expect(secret not in text, f"{place} shows the secret option {name!r}")


def _tried_with(bench: Bench, name: str, wrong: str) -> str:
    """What the errors say, if there are any, of opening and reading with another secret."""
    said = []
    try:
        store = bench.open(**{name: wrong})
        namespace = bench.namespace()
        store.batch_get(namespace, bench.keys(1), buffers_for(namespace, 1))
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None:
            said.append(f"{cause} {cause!r}")
            cause = cause.__cause__ or cause.__context__
    return " ".join(said)
