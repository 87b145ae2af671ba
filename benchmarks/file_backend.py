"""How fast file:// writes and reads pages, beside SGLang's file backend and bare system calls.

    python benchmarks/file_backend.py [--peer-python PYTHON] [--directory DIR]

`--peer-python` names an interpreter whose environment has SGLang, torch, pluggy and xxhash; the
program then runs there and measures both, else only file://. Each round writes the same number
of new pages with either, in an order that alternates, then reads them back while they are in the
page cache; all bytes are compared. `calls` is what the bare system calls for one file a page
take. Results go to `benchmarks/results/`.

On ext4 give it a fresh file system (mkfs.ext4 of a file of 40 GB, mount -o loop): the kernel
looks at every inode that was freed there in the last minutes before it makes a file, which can
cost five times as much as all else.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import xxhash

Took = dict[str, dict[str, list[tuple[float, float]]]]
REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY), str(Path(__file__).parent)]
KIB, MIB = 1 << 10, 1 << 20
# page bytes: number of pages, and the MLA and MHA geometries that have such pages.
SIZES = {
    64 * KIB: (128, {"layers": 4, "page_size": 16}, {"page_size": 4, "heads": 2, "head_dim": 64}),
    MIB: (128, {"layers": 16, "page_size": 64}, {"page_size": 16, "heads": 8, "head_dim": 64}),
    8 * MIB: (32, {"layers": 64, "page_size": 128}, {"page_size": 64, "heads": 8, "head_dim": 128}),
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--peer-python", help="interpreter of an environment that has SGLang")
    parser.add_argument("--directory", help="where to write the pages; default: a temporary one")
    parser.add_argument("--rounds", type=int, default=15, help="rounds that count (default 15)")
    parser.add_argument("--results", default=str(REPOSITORY / "benchmarks" / "results"))
    parser.add_argument("--name", help="name of the result files (default: after what is measured)")
    options = parser.parse_args()
    if options.peer_python:
        inner = [a for a in sys.argv if not a.startswith("--peer-python")]
        if options.peer_python in inner:
            inner.remove(options.peer_python)
        os.environ["HICACHE_STORAGE_BENCHMARK_PEER"] = options.peer_python
        os.execv(options.peer_python, [options.peer_python, *inner])
    return options


class Ours:
    """A host pool of this package and a file store in `directory`."""

    def __init__(
        self, directory: Path, geometry: Any, num_pages: int, layout: str, **options: Any
    ) -> None:
        from hicache_storage import Store
        from hicache_storage.backends.file import FileBackend, FileConfig
        from hicache_storage.pools.host import HostPool

        self.pool = HostPool(geometry, num_pages, layout, pin=False)
        self.namespace = geometry.namespace(model="benchmark", order=self.pool.order)
        self.backend = FileBackend(FileConfig(str(directory), **options))
        self.store = Store(self.backend, name="file")
        self.store.open()
        # A store in use has all its directories; a new namespace pays for them once.
        for shard in range(256):
            (directory / self.namespace.digest / f"{shard:02x}").mkdir(parents=True)
        for part in self.pool.parts:
            part.view(torch.uint8).random_(0, 256)

    def write(self, keys: list[str], pages: list[int]) -> bool:
        return all(self.store.batch_set(self.namespace, keys, self._spans(pages)))

    def read(self, keys: list[str], pages: list[int]) -> bool:
        return all(self.store.batch_get(self.namespace, keys, self._spans(pages)))

    def _spans(self, pages: list[int]) -> list[Any]:
        return [self.pool.spans(page) for page in pages]


class Calls:
    """The system calls that one file a page takes, and nothing else."""

    def __init__(self, ours: Ours, directory: Path) -> None:
        from hicache_storage.page import as_spans

        self._pool = ours.pool
        self._spans = [as_spans(self._pool.spans(page)) for page in range(self._pool.num_pages)]
        self._directory = directory
        for shard in range(256):
            (directory / f"{shard:02x}").mkdir(parents=True)

    def write(self, keys: list[str], pages: list[int]) -> bool:
        header = memoryview(bytes(64))
        for key, page in zip(keys, pages, strict=True):
            path = f"{self._directory}/{key[:2]}/{key}"
            fd = os.open(f"{path}.tmp", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            os.pwritev(fd, (header, *self._spans[page]), 0)
            os.close(fd)
            os.rename(f"{path}.tmp", path)
        return True

    def read(self, keys: list[str], pages: list[int]) -> bool:
        header = memoryview(bytearray(64))
        for key, page in zip(keys, pages, strict=True):
            fd = os.open(f"{self._directory}/{key[:2]}/{key}", os.O_RDONLY | os.O_CLOEXEC)
            os.preadv(fd, (header, *self._spans[page]), 0)
            os.close(fd)
        return True


class Bare:
    """The backend alone: pages with ready-made headers, nothing checked on the way back."""

    def __init__(self, ours: Ours, keys: list[str]) -> None:
        from hicache_storage.keys import stored_key
        from hicache_storage.page import as_spans, make_header

        self.keys = keys
        self._backend = ours.backend
        digest = bytes.fromhex(ours.namespace.digest)
        spans = [as_spans(ours.pool.spans(page)) for page in range(len(keys))]
        self._names = [stored_key(ours.namespace.digest, key) for key in keys]
        self._frames = [
            (memoryview(make_header(page, digest, key)), *page)
            for key, page in zip(keys, spans, strict=True)
        ]
        self._buffers = [(memoryview(bytearray(64)), *page) for page in spans]

    def write(self) -> bool:
        return all(self._backend.batch_set(self._names, self._frames))

    def read(self) -> bool:
        return all(self._backend.batch_get(self._names, self._buffers))


def new_keys(count: int) -> list[str]:
    return [hashlib.sha256(os.urandom(16)).hexdigest() for _ in range(count)]


def timed(call: Callable[..., bool], *arguments: Any) -> tuple[float, float]:
    """Seconds that the call took, and processor seconds of the whole process meanwhile."""
    start, cpu_start = time.perf_counter(), time.process_time()
    done = call(*arguments)
    took = time.perf_counter() - start, time.process_time() - cpu_start
    if not done:
        raise SystemExit("a page was refused or missed: the directory may be full")
    return took


def measure_pair(
    directory: Path, page_bytes: int, shape: str, rounds: int, peer_class: Any
) -> Took:
    """What each batch took: {"write" or "read": {"file": [(seconds, of them CPU), ...], ...}}."""
    count, geometry, layout = case(page_bytes, shape)
    ours = Ours(directory / "file", geometry, count, layout)
    systems: dict[str, Any] = {"file": ours}
    if peer_class is not None:
        systems["sglang"] = peer_class(directory / "sglang", geometry, count, layout)
    systems["calls"] = Calls(ours, directory / "calls")
    took: Took = {verb: {name: [] for name in systems} for verb in ("write", "read")}
    pages = list(range(count))
    keys: list[str] = []
    for number in range(rounds + 1):
        keys, written = new_keys(count), keys
        # Every system comes first, second and last equally often.
        turns = list(itertools.permutations(systems))
        order = turns[number % len(turns)]
        for name in order:
            forget(directory / name, written)
            took_s = timed(systems[name].write, keys, pages)
            if number:  # the first round warms up
                took["write"][name].append(took_s)
        for name in order:
            before = checksum(systems[name])
            memory(systems[name])[:] = 0
            took_s = timed(systems[name].read, keys, pages)
            if checksum(systems[name]) != before:
                raise SystemExit(f"{name} read other bytes than it wrote")
            if number:
                took["read"][name].append(took_s)
        os.sync()  # what piled up is not the next round's affair
    ours.store.close()
    return took


def forget(directory: Path, keys: list[str]) -> None:
    """Empties files that are on the disk. Called right before a batch is written, so that the batch
    finds as much free memory, and a virtual machine's host has it all in place: to get a page that
    was given back to the host costs more than to write it. The files stay: ext4 passes over
    inodes that were freed in the last minutes one by one, which costs more than all else."""
    wanted = set(keys)
    for folder, _, names in os.walk(directory):
        for name in names:
            if name[:64] in wanted:
                os.truncate(os.path.join(folder, name), 0)


def checksum(system: Any) -> str:
    return xxhash.xxh3_128_hexdigest(memory(system))


def memory(system: Any) -> Any:
    if isinstance(system, Ours):
        return system.pool._memory.tensor.numpy()
    if isinstance(system, Calls):
        return system._pool._memory.tensor.numpy()
    return system.buffer.view(torch.uint8).numpy().reshape(-1)


def measure_header(directory: Path, rounds: int) -> Took:
    """Store against the backend alone, 1 MiB pages, on one thread."""
    took: Took = {verb: {"store": [], "backend": []} for verb in ("write", "read")}
    count, geometry, layout = case(MIB, "contiguous")
    ours = Ours(directory / "file", geometry, count, layout, io_threads=1)
    pages = list(range(count))
    written: dict[str, list[str]] = {"store": [], "backend": []}
    for number in range(rounds + 1):
        bare, keys = Bare(ours, new_keys(count)), new_keys(count)
        for verb in took:
            names = keys if verb == "write" else bare.keys
            if verb == "read":
                bare.read()  # both read the same files, and neither for the first time
            calls = [("store", getattr(ours, verb), names, pages), ("backend", getattr(bare, verb))]
            for name, call, *arguments in calls if number % 2 else calls[::-1]:
                if verb == "write":
                    forget(directory / "file", written[name])
                took_s = timed(call, *arguments)
                if number:
                    took[verb][name].append(took_s)
        written = {"store": keys, "backend": bare.keys}
        os.sync()
    ours.store.close()
    return took


def case(page_bytes: int, shape: str) -> tuple[int, Any, str]:
    """Number of pages, geometry and layout: one span a page (MLA) or 64 (MHA, 32 layers)."""
    from hicache_storage.pools.geometry import PageGeometry

    count, mla, mha = SIZES[page_bytes]
    if shape == "contiguous":
        geometry = PageGeometry(
            kind="mla", heads=1, head_dim=512, v_head_dim=0, dtype=torch.bfloat16, **mla
        )
    else:
        geometry = PageGeometry(
            kind="mha", layers=32, v_head_dim=mha["head_dim"], dtype=torch.bfloat16, **mha
        )
    assert geometry.page_bytes == page_bytes, geometry
    return count, geometry, "page_first" if shape == "contiguous" else "layer_first"


def main() -> None:
    options = arguments()
    import file_report

    peer_class, peer = None, ""
    if os.environ.get("HICACHE_STORAGE_BENCHMARK_PEER"):
        import sglang_file

        peer_class, peer = sglang_file.SGLangFile, f"SGLang {version('sglang')}"
    options.name = options.name or ("file_backend" if peer else "file_backend_alone")
    torch.set_num_threads(1)  # one thread copies faster than several where cores are busy
    rows = []
    scratch = Path(tempfile.mkdtemp(prefix="file-backend-", dir=options.directory))
    try:
        for page_bytes in SIZES:
            for shape in ("contiguous", "scattered"):
                place = scratch / f"{page_bytes}-{shape}"
                place.mkdir()
                took = measure_pair(place, page_bytes, shape, options.rounds, peer_class)
                rows += file_report.rows(took, page_bytes, shape, SIZES[page_bytes][0])
                file_report.show(rows[-2:])
        place = scratch / "header"
        place.mkdir()
        header = measure_header(place, options.rounds)
        ceilings = file_report.ceilings(scratch, SIZES, options.rounds)
        file_report.write(options, rows, header, ceilings, peer, scratch)
    finally:
        shutil.rmtree(scratch)


if __name__ == "__main__":
    main()
