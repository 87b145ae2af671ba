"""Real Redis servers on loopback, alone and as a cluster, for the tests."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import redis

BINARY = shutil.which("redis-server") or shutil.which("valkey-server")


def free_port() -> int:
    """A port that was free a moment ago, with room for the cluster bus above it."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        if port < 50000:
            return port


class Server:
    """One redis-server in a directory of its own."""

    def __init__(self, directory: Path, *options: str, port: int = 0) -> None:
        self.directory = directory
        self.port = port or free_port()
        self.options = options
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        assert BINARY is not None
        self.directory.mkdir(exist_ok=True)
        self.process = subprocess.Popen(
            [
                BINARY, "--port", str(self.port), "--bind", "127.0.0.1", "--save", "",
                "--dir", str(self.directory), "--appendonly", "no", *self.options,
            ],
            stdout=subprocess.DEVNULL,
        )  # fmt: skip
        for _ in range(200):
            try:
                with redis.Redis(port=self.port, socket_timeout=1) as client:
                    client.ping()
                return
            except redis.RedisError as error:
                if isinstance(error, redis.AuthenticationError):
                    return
                time.sleep(0.05)
        self.stop()
        raise RuntimeError(f"redis-server did not answer on port {self.port}")

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait(10)
            self.process = None


@contextmanager
def one_server(directory: Path, *options: str) -> Iterator[Server]:
    server = Server(directory, *options)
    server.start()
    try:
        yield server
    finally:
        server.stop()


@contextmanager
def cluster_of(count: int, directory: Path) -> Iterator[list[Server]]:
    """A cluster without replicas, its slots shared out evenly."""
    servers = [
        Server(directory / str(i), "--cluster-enabled", "yes", "--cluster-node-timeout", "2000")
        for i in range(count)
    ]
    try:
        for server in servers:
            server.start()
        edges = [16384 * i // count for i in range(count + 1)]
        for i, server in enumerate(servers):
            with redis.Redis(port=server.port) as client:
                client.execute_command("CLUSTER ADDSLOTSRANGE", edges[i], edges[i + 1] - 1)
                client.execute_command("CLUSTER SET-CONFIG-EPOCH", i + 1)
                if i:
                    client.execute_command("CLUSTER MEET", "127.0.0.1", servers[0].port)
        for server in servers:
            wait_for_cluster(server, count)
        yield servers
    finally:
        for server in servers:
            server.stop()


def wait_for_cluster(server: Server, count: int) -> None:
    with redis.Redis(port=server.port) as client:
        for _ in range(200):
            state = client.cluster("INFO")
            known = int(state["cluster_known_nodes"])
            if state["cluster_state"] == "ok" and known == count:
                return
            time.sleep(0.1)
    raise RuntimeError("the cluster did not form")
