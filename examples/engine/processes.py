"""Runs a stage in a process of its own and follows what it says."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from progress import Progress
from settings import StageSettings

LIMIT_S = 600.0
TICK_S = 0.1
SHOWN_LINES = 15
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StageFailed(Exception):
    """A stage's process gave no result; the message is its own, or the end of its log."""


def run_stage(settings: StageSettings, progress: Progress, *, verbose: bool) -> dict[str, Any]:
    """The result of one stage. However this returns, the process has ended."""
    with tempfile.TemporaryFile() as log, ExitStack() as cleanup:
        with signals_put_off():
            process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("stage.py"))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=None if verbose else log,
                start_new_session=True,  # Ctrl-C is for this process, which then ends that one
            )
            cleanup.callback(_end, process)
        progress.detail("loading torch and the models")
        assert process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended already; its log says why
            process.stdin.write(json.dumps(asdict(settings)).encode())
            process.stdin.close()
        last = _follow(process, progress)
        process.wait()
        if last.get("event") == "result":
            return last
        if last.get("event") == "error":
            raise StageFailed(last["message"])
        log.seek(0)
        tail = log.read().decode(errors="replace").splitlines()[-SHOWN_LINES:]
        raise StageFailed(
            "\n".join((f"a stage ended with status {process.returncode} and no result", *tail))
        )


@contextmanager
def signals_put_off() -> Iterator[None]:
    """What comes within is handled at the end. One that raised while a process is being started
    would leave a process that nobody knows. For the main thread."""
    came: list[int] = []
    before = {n: signal.signal(n, lambda number, _: came.append(number)) for n in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for number in came[:1]:
            signal.raise_signal(number)


def _follow(process: subprocess.Popen[bytes], progress: Progress) -> dict[str, Any]:
    """Show progress until the process closes its output; the last event."""
    last: dict[str, Any] = {}
    assert process.stdout is not None
    for line in _lines(process.stdout, progress):
        last = json.loads(line)
        if last["event"] == "doing":
            progress.detail(last["text"])
    return last


def _lines(stream: IO[bytes], progress: Progress) -> Iterator[bytes]:
    """Whole lines as they come, with a tick of progress at least every `TICK_S`."""
    started, rest = time.monotonic(), b""
    while time.monotonic() - started < LIMIT_S:
        ready, _, _ = select.select([stream], [], [], TICK_S)
        progress.tick()
        if ready:
            got = os.read(stream.fileno(), 1 << 16)
            if not got:
                return
            *lines, rest = (rest + got).split(b"\n")
            yield from lines
    raise StageFailed(f"a stage took longer than {LIMIT_S:.0f} s")


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with suppress(BrokenPipeError):
                stream.close()
