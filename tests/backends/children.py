"""Child: a process of a test's own, to be told things, waited for or killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

TESTS = Path(__file__).parents[1]
WAIT_S = 60.0


def own_mounts() -> tuple[str, ...]:
    """A command prefix for a child that may mount for itself."""
    import pytest  # here, as children import this module too

    if os.geteuid() == 0:
        prefix: tuple[str, ...] = ("unshare", "--mount", "--propagation", "private")
    else:
        prefix = ("unshare", "--user", "--map-root-user", "--mount")
    try:
        done = subprocess.run([*prefix, "true"], capture_output=True, timeout=30, check=False)
    except FileNotFoundError:
        pytest.skip("needs unshare, to mount a small file system")
    if done.returncode:
        pytest.skip(f"may not mount a small file system here: {done.stderr!r}")
    return prefix


class Child:
    """A Python process that runs `source`, with the names of `rig`, a module, imported."""

    rig = ""

    def __init__(
        self,
        source: str,
        *arguments: object,
        prefix: tuple[str, ...] = (),
        variables: dict[str, str] | None = None,
    ) -> None:
        head = f"import os, sys, time, threading, random\nfrom {self.rig} import *\n"
        paths = [path for path in (*sys.path, str(TESTS)) if path]
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-c", head + textwrap.dedent(source), *map(str, arguments)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), **(variables or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def line(self) -> str:
        """The next line that it prints."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise AssertionError(f"the child ended with {self.process.wait(WAIT_S)}")
        return line.rstrip("\n")

    def tell(self, text: str = "go") -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()

    def end(self) -> str:
        """Waits for its end, which must be a good one; what it printed."""
        output, _ = self.process.communicate(timeout=WAIT_S)
        assert self.process.returncode == 0, f"exit status {self.process.returncode}: {output}"
        return output

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate(timeout=WAIT_S)

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *error: object) -> None:
        if self.process.poll() is None:
            self.kill()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()
