"""How fast file:// writes and reads pages, beside SGLang's file backend and what the machine can do.

    python benchmarks/file_backend.py [--peer-python PYTHON] [--directory DIR]

`--peer-python` names an interpreter whose environment has SGLang, torch, pluggy and xxhash; the
program then runs there and measures both, else only file://. Each round writes the same number
of new pages with either, in an order that alternates, then reads them back while they are in the
page cache; all bytes are compared. Results go to `benchmarks/results/`.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import xxhash

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
    parser.add_argument("--name", default="file_backend", help="name of the result files")
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

    def __init__(self, directory: Path, geometry: Any, num_pages: int, layout: str) -> None:
        from hicache_storage import Store
        from hicache_storage.backends.file import FileBackend, FileConfig
        from hicache_storage.pools.host import HostPool

        self.pool = HostPool(geometry, num_pages, layout, pin=False)
        self.namespace = geometry.namespace(model="benchmark", order=self.pool.order)
        self.backend = FileBackend(FileConfig(str(directory)))
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


class Bare:
    """The backend alone: pages with ready-made headers, nothing checked on the way back."""

    def __init__(self, ours: Ours, keys: list[str]) -> None:
        from hicache_storage.keys import stored_key
        from hicache_storage.page import make_header

        self._backend = ours.backend
        digest = bytes.fromhex(ours.namespace.digest)
        spans = [ours.pool.spans(page) for page in range(len(keys))]
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


def timed(call: Callable[[], bool]) -> float:
    start = time.perf_counter()
    done = call()
    took = time.perf_counter() - start
    if not done:
        raise SystemExit("a page was refused or missed: the directory may be full")
    return took


def measure_pair(
    directory: Path, page_bytes: int, shape: str, rounds: int, peer_class: Any
) -> dict[str, dict[str, list[float]]]:
    """Seconds per batch: {"write" or "read": {"file": [...], "sglang": [...]}}."""
    count, geometry, layout = case(page_bytes, shape)
    systems: dict[str, Any] = {"file": Ours(directory / "file", geometry, count, layout)}
    if peer_class is not None:
        systems["sglang"] = peer_class(directory / "sglang", geometry, count, layout)
    took: dict[str, dict[str, list[float]]] = {
        verb: {name: [] for name in systems} for verb in ("write", "read")
    }
    pages = list(range(count))
    for number in range(rounds + 1):
        keys = new_keys(count)
        order = list(systems) if number % 2 else list(systems)[::-1]
        for verb in ("write", "read"):
            for name in order:
                system = systems[name]
                call = system.write if verb == "write" else system.read
                if verb == "read":
                    before = checksum(system)
                    wipe(system)
                took_s = timed(lambda call=call: call(keys, pages))
                if verb == "read" and checksum(system) != before:
                    raise SystemExit(f"{name} read other bytes than it wrote")
                if number:  # the first round warms up
                    took[verb][name].append(took_s)
        tidy(directory)
    systems["file"].store.close()
    return took


def checksum(system: Any) -> str:
    return xxhash.xxh3_128_hexdigest(memory(system))


def wipe(system: Any) -> None:
    memory(system)[:] = 0


def memory(system: Any) -> Any:
    if isinstance(system, Ours):
        return system.pool._memory.tensor.numpy()
    return system.buffer.view(torch.uint8).numpy().reshape(-1)


def measure_header(directory: Path, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Store against the backend alone, 1 MiB pages; seconds per batch."""
    took: dict[str, dict[str, list[float]]] = {
        verb: {"store": [], "backend": []} for verb in ("write", "read")
    }
    count, geometry, layout = case(MIB, "contiguous")
    ours = Ours(directory / "file", geometry, count, layout)
    pages = list(range(count))
    for number in range(rounds + 1):
        bare = Bare(ours, new_keys(count))
        keys = new_keys(count)
        calls: dict[str, dict[str, Callable[[], bool]]] = {
            "write": {"store": lambda k=keys: ours.write(k, pages), "backend": bare.write},
            "read": {"store": lambda k=keys: ours.read(k, pages), "backend": bare.read},
        }
        for verb, both in calls.items():
            for name in sorted(both, reverse=bool(number % 2)):
                took_s = timed(both[name])
                if number:
                    took[verb][name].append(took_s)
        tidy(directory)
    ours.store.close()
    return took


def tidy(directory: Path) -> None:
    """Removes the pages and waits for the disk, so that rounds don't slow each other."""
    for folder, _, names in os.walk(directory):
        for name in names:
            if ".hicache-storage" not in folder:
                os.unlink(os.path.join(folder, name))
    os.sync()


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

        peer_class, peer = sglang_file.SGLangFile, f"SGLang {sglang_file.VERSION}"
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
                shutil.rmtree(place)
        place = scratch / "header"
        place.mkdir()
        header = measure_header(place, options.rounds)
        ceilings = file_report.ceilings(scratch, SIZES, options.rounds)
        file_report.write(options, rows, header, ceilings, peer, scratch)
    finally:
        shutil.rmtree(scratch)


if __name__ == "__main__":
    main()
