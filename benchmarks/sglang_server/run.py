"""What all parts of one run share: its time, its rows, its servers."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from .arguments import Start
from .server import LAUNCHER, Server
from .stores import Shelf

START_S = 240.0
"""The longest that a server may take until it answers; the first one of a release compiles."""
Row = dict[str, Any]


class OutOfTime(BaseException):
    """The run's time is over: what is measured by now is all."""


class Run:
    """One run of the program in `folder`; rows go to the file `results`, a JSON object a line."""

    def __init__(
        self,
        release: str,
        folder: Path,
        results: Path,
        *,
        seconds: float,
        launcher: Sequence[str] = LAUNCHER,
    ) -> None:
        self.release = release
        self.folder = folder
        self.logs = folder / "logs"
        self.logs.mkdir(parents=True, exist_ok=True)
        self.shelf = Shelf(folder / "stores")
        self.rows: list[Row] = []
        self._results = results
        results.write_text("")
        self._launcher = launcher
        self._began = time.monotonic()
        self._end = self._began + seconds
        self._servers: list[Server] = []
        # Apart from what another run of this machine counts through.
        self._port = 30100 + os.getpid() % 200 * 100

    @property
    def gone_s(self) -> float:
        return time.monotonic() - self._began

    @property
    def left_s(self) -> float:
        return self._end - time.monotonic()

    def add(self, part: str, **values: Any) -> Row:
        """Adds a row: written and shown at once."""
        row: Row = {"part": part, "release": self.release, "at_s": round(self.gone_s, 1), **values}
        self.rows.append(row)
        line = json.dumps(row)
        with self._results.open("a") as results:
            results.write(line + "\n")
        print(line if len(line) < 600 else line[:597] + "...", flush=True)
        return row

    def port(self) -> int:
        """The first of two ports that no other server of this run has, and nobody else's either."""
        self._port += 10
        while not (_free(self._port) and _free(self._port + 1)):
            self._port += 10
        return self._port

    def launch(self, starts: Iterable[Start]) -> dict[str, Server]:
        """Starts servers, all at once; by name."""
        made = {start.name: Server(start, self.logs, self._launcher) for start in starts}
        self._servers += made.values()
        return made

    def ready(self, servers: dict[str, Server]) -> dict[str, Server]:
        """Those of the servers that answer in time; a row for each, and for each that doesn't."""
        until = time.monotonic() + max(1.0, min(START_S, self.left_s))
        found = {}
        for name, server in servers.items():
            if self.tried(name, lambda server=server: server.wait(until)):  # type: ignore[misc]
                found[name] = server
                self.add("start", server=name, ready_s=round(server.ready_after_s or 0.0, 1))
            else:
                server.stop()
        return found

    def tried(self, what: str, action: Callable[[], object]) -> bool:
        """Whether it worked; a row says why not."""
        try:
            action()
        except Exception as error:  # whatever it is, the other stores are measured
            self.add("failure", what=what, why=f"{type(error).__name__}: {error}")
            return False
        return True

    def for_each(self, servers: dict[str, Server], action: Callable[[str, Server], object]) -> None:
        """`action` of all servers at once; a row for each that fails."""
        if servers:
            with ThreadPoolExecutor(len(servers)) as threads:
                list(threads.map(lambda one: self._one(action, *one), servers.items()))

    def _one(self, action: Callable[[str, Server], object], name: str, server: Server) -> None:
        self.tried(name, lambda: action(name, server))

    def stop(self, servers: Iterable[Server]) -> None:
        """Stops servers, all at once."""
        stopped = list(servers)
        if stopped:
            with ThreadPoolExecutor(len(stopped)) as threads:
                list(threads.map(lambda server: server.stop(), stopped))
        self._servers = [server for server in self._servers if server not in stopped]

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self.stop(list(self._servers))


def _free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
