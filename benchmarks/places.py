"""Stores of every kind for the programs beside this one; servers on loopback, started at need.

Needs the packages of both plugins, those of `hicache-storage[lmdb,s3,servers,testing]`, and
redis-server on the PATH; for Ceph its ceph-mon, ceph-osd and radosgw.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

ROOT = Path(__file__).resolve().parents[1]
for tests in ("tests", "plugins/hicache-storage-redis/tests"):
    sys.path.insert(0, str(ROOT / tests))


class Places:
    """Makes URLs of new, empty stores under one folder; `close` stops the servers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._stack = contextlib.ExitStack()
        self._servers: dict[str, object] = {}

    def close(self) -> None:
        self._stack.close()

    def new(self) -> Path:
        return self.folder / uuid.uuid4().hex

    def memory(self) -> str:
        return "memory://"

    def file(self, **options: object) -> str:
        return f"file://{self.new()}{query(options)}"

    def lmdb(self, **options: object) -> str:
        return f"lmdb://{self.new()}{query(options)}"

    def moto(self) -> str:
        from s3_servers import start_moto

        return str(start_moto().store_url())

    def seaweedfs(self) -> str:
        from s3_servers import start_seaweedfs

        return str(start_seaweedfs().store_url())

    def ceph(self) -> str:
        from ceph_server import start_ceph

        return str(start_ceph().store_url())

    def tier(self) -> str:
        return f"tier://?upper={quote(self.lmdb(), '')}&lower={quote(self.seaweedfs(), '')}"

    def fsspec_file(self) -> str:
        return f"fsspec://file{self.new()}"

    def fsspec_memory(self) -> str:
        return f"fsspec://memory/{uuid.uuid4().hex}"

    def fsspec_s3(self) -> str:
        from s3_servers import ACCESS_KEY, SECRET_KEY, start_seaweedfs

        from hicache_storage import open_store

        server = start_seaweedfs()
        open_store(server.store_url()).close()  # makes the bucket
        options = {
            "key": ACCESS_KEY,
            "secret": SECRET_KEY,
            "endpoint_url": server.url,
            "client_kwargs": {"region_name": "us-east-1"},
        }
        path = f"fsspec://s3/pages/fsspec-{uuid.uuid4().hex}"
        return path + query({"storage_options": json.dumps(options)})

    def redis(self, *arguments: str) -> str:
        from redis_servers import one_server

        return f"redis://{self._server('one', one_server, *arguments)}/{uuid.uuid4().hex}"

    def redis_cluster(self) -> str:
        from redis_servers import cluster_of

        address = self._server("three", lambda folder: cluster_of(3, folder))
        return f"redis://{address}/{uuid.uuid4().hex}?cluster=true"

    def _server(self, kind: str, start: Callable[..., object], *arguments: str) -> str:
        """The address of a Redis server or of a cluster's first one."""
        name = " ".join([kind, *arguments])
        if name not in self._servers:
            folder = self.new()
            folder.mkdir()
            started = self._stack.enter_context(start(folder, *arguments))  # type: ignore[arg-type]
            self._servers[name] = started[0] if isinstance(started, list) else started
        return str(self._servers[name].address)  # type: ignore[attr-defined]


@contextmanager
def places(folder: Path) -> Iterator[Places]:
    made = Places(folder)
    try:
        yield made
    finally:
        made.close()


def query(options: dict[str, object]) -> str:
    return "?" * bool(options) + "&".join(f"{n}={quote(str(v), '')}" for n, v in options.items())


def machine() -> str:
    """Processor, cores, kernel, Python."""
    text = Path("/proc/cpuinfo").read_text()
    model = next(
        (line.partition(":")[2].strip() for line in text.splitlines() if "model name" in line),
        platform.machine(),
    )
    return (
        f"{model}, {os.cpu_count()} cores, Linux {platform.release()}, "
        f"Python {platform.python_version()}"
    )


def version(command: str, *arguments: str) -> str:
    """First line of what a program says of its version; "" if it isn't there."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            [command, *arguments], capture_output=True, text=True, timeout=30, check=False
        )
        return (done.stdout or done.stderr).strip().partition("\n")[0]
    return ""
