"""Jobs that clauses run in another process, on the same store.

`python -m hicache_storage.testing.worker` reads one line of JSON from its input (it may hold
secrets, so it isn't an argument): the subject, the job's name and its arguments. It prints one
line of JSON for each thing that the clause waits for.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import random
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from typing import IO, Any

from ..errors import CorruptPage
from ..keys import stored_key
from ..namespace import Namespace
from ..page import HEADER_BYTES, check_page
from ..store import Store
from .clause import ClauseFailed
from .subject import Subject

ANSWER_S = 60.0


class Worker:
    """Another process at work on the same store. Not thread-safe."""

    def __init__(self, subject: Subject, job: str, arguments: dict[str, Any]) -> None:
        self.job = job
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "hicache_storage.testing.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._errors = ""
        self._readers = [
            threading.Thread(target=target, daemon=True)
            for target in (self._read_answers, self._read_errors)
        ]
        for reader in self._readers:
            reader.start()
        self._say(json.dumps({"subject": subject.to_json(), "job": job, "arguments": arguments}))

    def answer(self, timeout_s: float = ANSWER_S) -> Any:
        """The next thing that the job reports. Raises ClauseFailed if it failed or hangs."""
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            self.kill()
            raise ClauseFailed(
                f"another process ({self.job}) did not answer within {timeout_s} s"
            ) from None
        if line is None:
            self._process.wait(timeout_s)
            self._readers[1].join(timeout_s)
            raise ClauseFailed(
                f"another process ({self.job}) ended with status {self._process.returncode}: "
                f"{self._errors.strip()[-2000:] or 'it said nothing'}"
            )
        return json.loads(line)

    def stop(self, timeout_s: float = ANSWER_S) -> Any:
        """Tells a job that runs until told to end, and gives its last answer."""
        self._say("stop")
        return self.answer(timeout_s)

    def kill(self) -> None:
        """Ends it at once, as kill -9 does."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        for reader in self._readers:
            reader.join(ANSWER_S)
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()

    def _say(self, line: str) -> None:
        stream = self._process.stdin
        if stream is not None:
            with contextlib.suppress(BrokenPipeError):
                stream.write(line + "\n")
                stream.flush()

    def _read_answers(self) -> None:
        stream: IO[str] | None = self._process.stdout
        for line in stream or ():
            if line.startswith("{"):
                self._lines.put(line)
        self._lines.put(None)

    def _read_errors(self) -> None:
        stream: IO[str] | None = self._process.stderr
        for line in stream or ():
            self._errors = self._errors[-20_000:] + line


# -- in the other process ----------------------------------------------------------------------


def report(**answer: Any) -> None:
    print(json.dumps(answer), flush=True)


def told_to_stop() -> threading.Event:
    """Set once the clause says stop, or is gone."""
    event = threading.Event()

    def wait() -> None:
        sys.stdin.readline()
        event.set()

    threading.Thread(target=wait, daemon=True).start()
    return event


def content(seed: int, size: int) -> bytes:
    """The page that a job writes under its `seed`."""
    return random.Random(seed).randbytes(size)


def write_pages(store: Store, namespace: Namespace, keys: list[str], first_seed: int) -> None:
    """Stores `content(first_seed + i)` under key i, and closes the store."""
    pages = [content(first_seed + i, namespace.page_bytes) for i in range(len(keys))]
    stored = store.batch_set(namespace, keys, pages)
    store.flush()
    store.close()
    report(stored=stored)


def read_pages(store: Store, namespace: Namespace, keys: list[str], first_seed: int) -> None:
    """Reports hits, and which of them hold `content(first_seed + i)`."""
    buffers = [bytearray(namespace.page_bytes) for _ in keys]
    hits = store.batch_get(namespace, keys, buffers)
    right = [
        hit and buffer == content(first_seed + i, namespace.page_bytes)
        for i, (hit, buffer) in enumerate(zip(hits, buffers, strict=True))
    ]
    store.close()
    report(hits=hits, right=right)


def write_until_killed(store: Store, namespace: Namespace, keys: list[str], batch: int) -> None:
    """Stores batch after batch, and says so after each; the first one it also flushes."""
    # Made beforehand, so that the process spends its time writing.
    pages = [content(i, namespace.page_bytes) for i in range(len(keys))]
    for start in range(0, len(keys), batch):
        part = keys[start : start + batch]
        store.batch_set(namespace, part, pages[start : start + batch])
        if start == 0:
            store.flush()
        report(done=start + len(part))
    # Everything is written: stay, so that the clause kills a live process in any case.
    time.sleep(ANSWER_S)


def rewrite_until_stopped(store: Store, namespace: Namespace, keys: list[str]) -> None:
    """Rewrites the same pages again and again, all their bytes changing at once."""
    stop = told_to_stop()
    rounds = 0
    while not stop.is_set():
        fill = bytes([rounds % 2 * 0xFF]) * namespace.page_bytes
        store.batch_set(namespace, keys, [fill] * len(keys))
        rounds += 1
        if rounds == 1:
            report(started=True)
    store.close()
    report(rounds=rounds)


def read_until_stopped(store: Store, namespace: Namespace, keys: list[str]) -> None:
    """Reads the same pages again and again; reports how many reads were hits and how many of
    those were not one whole page."""
    stop = told_to_stop()
    counts = {"reads": 0, "hits": 0, "mixtures": 0}
    report(started=True)
    while not stop.is_set():
        for key in keys:
            whole = read_whole(store, namespace, key)
            counts["reads"] += 1
            counts["hits"] += whole is not None
            counts["mixtures"] += whole is False
    store.close()
    report(**counts)


def read_whole(store: Store, namespace: Namespace, key: str) -> bool | None:
    """Whether the backend gave one whole page; None for a miss. Looks at the backend's own
    answer, since Store would make a miss of a mixture."""
    buffer = memoryview(bytearray(HEADER_BYTES + namespace.page_bytes))
    spans = (buffer[:HEADER_BYTES], buffer[HEADER_BYTES:])
    if not store._caller.batch_get([stored_key(namespace.digest, key)], [spans], None)[0]:
        return None
    try:
        check_page(spans[0], spans[1:], bytes.fromhex(namespace.digest), key)
    except CorruptPage:
        return False
    return True


def fork_and_use(store: Store, namespace: Namespace, keys: list[str], child_uses: bool) -> None:
    """Uses the store, forks, lets the child use it (or not) and end, and uses it again."""
    own, childs = keys[: len(keys) // 2], keys[len(keys) // 2 :]
    _fill_and_check(store, namespace, own, 0)
    process = os.fork()
    if process == 0:
        status = 1
        try:
            if child_uses:
                _check(store, namespace, own, 0)
                _fill_and_check(store, namespace, childs, 1000)
                store.close()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    deadline_s = time.monotonic() + ANSWER_S / 2
    while True:
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            break
        if time.monotonic() > deadline_s:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
            raise ClauseFailed(f"the forked child did not end within {ANSWER_S / 2} s")
        time.sleep(0.01)
    if status != 0:
        raise ClauseFailed(f"the forked child failed (wait status {status})")
    _check(store, namespace, own, 0)
    if child_uses and store.scope == "shared":
        _check(store, namespace, childs, 1000)
    _fill_and_check(store, namespace, own, 2000)
    store.close()
    report(done=True)


def _fill_and_check(store: Store, namespace: Namespace, keys: list[str], seed: int) -> None:
    pages = [content(seed + i, namespace.page_bytes) for i in range(len(keys))]
    stored = store.batch_set(namespace, keys, pages)
    if not all(stored):
        raise ClauseFailed(f"batch_set answered {stored}")
    _check(store, namespace, keys, seed)


def _check(store: Store, namespace: Namespace, keys: list[str], seed: int) -> None:
    buffers = [bytearray(namespace.page_bytes) for _ in keys]
    hits = store.batch_get(namespace, keys, buffers)
    for i, (hit, buffer) in enumerate(zip(hits, buffers, strict=True)):
        if not hit or buffer != content(seed + i, namespace.page_bytes):
            raise ClauseFailed(f"page {i} is {'wrong' if hit else 'missing'} after the fork")


JOBS = {
    job.__name__: job
    for job in (
        write_pages,
        read_pages,
        write_until_killed,
        rewrite_until_stopped,
        read_until_stopped,
        fork_and_use,
    )
}


def _decoded(arguments: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in arguments.items():
        yield name, Namespace.from_record(value.encode()) if name == "namespace" else value


def main() -> None:
    task = json.loads(sys.stdin.readline())
    subject = Subject.from_json(task["subject"])
    job: Any = JOBS[task["job"]]
    job(subject.open(), **dict(_decoded(task["arguments"])))


if __name__ == "__main__":
    main()
