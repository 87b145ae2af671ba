"""What the tests of file:// share: keys, pages, children, and a look at the files themselves."""

from __future__ import annotations

import hashlib
import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from backends import children

from hicache_storage.backends.file import FileBackend, FileConfig
from hicache_storage.backends.file.names import page_place
from hicache_storage.page import as_spans, make_header

DIGEST = "0123456789abcdef" * 2


def key(number: int, tag: str = "") -> str:
    """A stored key, as Store makes them."""
    name = hashlib.sha256(str(number).encode()).hexdigest()
    return f"{DIGEST}/{tag}:{name}" if tag else f"{DIGEST}/{name}"


def payload(number: int, size: int, version: int = 0) -> bytes:
    """Bytes that only this page has, all through."""
    seed = hashlib.sha256(f"{number} {version}".encode()).digest()
    return (seed * (size // 32 + 1))[:size]


def page(number: int, size: int = 512, parts: int = 1, version: int = 0) -> tuple[Any, ...]:
    """A stored page in spans: a true header, then the payload in `parts` spans."""
    content = payload(number, size, version)
    step = -(-size // parts)
    spans = as_spans([content[start : start + step] for start in range(0, size, step)])
    header = make_header(spans, bytes.fromhex(DIGEST), key(number)[33:])
    return (memoryview(header), *spans)


def opened(path: Any, **options: Any) -> FileBackend:
    """An open backend; options as of FileConfig, but nothing is kept free."""
    backend = FileBackend(FileConfig(str(path), **{"min_free": 0, **options}))
    backend.open()
    return backend


def store(
    backend: FileBackend, numbers: Iterable[int], size: int = 512, version: int = 0
) -> list[bool]:
    numbers = list(numbers)
    return backend.batch_set(
        [key(number) for number in numbers],
        [page(number, size, version=version) for number in numbers],
    )


def found(
    backend: FileBackend, numbers: Iterable[int], size: int = 512, versions: Iterable[int] = (0,)
) -> list[bool]:
    """Which pages are there; each that is must be a right one, whole."""
    numbers = list(numbers)
    buffers = [(memoryview(bytearray(64)), memoryview(bytearray(size))) for _ in numbers]
    hits = backend.batch_get([key(number) for number in numbers], list(buffers))
    for number, hit, buffer in zip(numbers, hits, buffers, strict=True):
        if hit:
            right = [page(number, size, version=version) for version in versions]
            assert tuple(buffer) in right, f"page {number} came back changed"
    return hits


def path_of(root: Any, number: int) -> Path:
    """Where the page's file lies."""
    place, name = page_place(key(number))
    return Path(root) / place / name


def page_files(root: Any) -> list[Path]:
    """All files outside of the control directory, temporary ones too."""
    return [
        path
        for path in Path(root).rglob("*")
        if path.is_file() and ".hicache-storage" not in path.parts
    ]


def temp_files(root: Any) -> list[Path]:
    return [path for path in page_files(root) if path.name.endswith(".tmp")]


def stored_bytes(root: Any) -> int:
    """Bytes of all pages, counted on the disk. Files may go meanwhile."""
    total = 0
    for folder, _, names in os.walk(root):
        for name in names:
            if ".hicache-storage" not in folder and not name.endswith(".tmp"):
                try:
                    total += os.stat(os.path.join(folder, name)).st_size
                except FileNotFoundError:
                    continue
    return total


def stands_still(pid: int) -> bool:
    """Whether every thread of a stopped process has come to a halt, or is gone."""
    for task in Path(f"/proc/{pid}/task").glob("*/stat"):
        with suppress(OSError):
            if task.read_text().rpartition(")")[2].split()[0] not in "TtZX":
                return False
    return True


def stored_bytes_at_once(root: Any, pids: Iterable[int]) -> int:
    """As `stored_bytes`, while these processes, which write there, stand still."""
    running = []
    try:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
                running.append(pid)
        while not all(map(stands_still, running)):
            time.sleep(0.001)
        return stored_bytes(root)
    finally:
        for pid in running:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


class Child(children.Child):
    rig = "backends.file_rig"
