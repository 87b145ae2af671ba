"""Progress of the demo, on stderr."""

from __future__ import annotations

import itertools
import shutil
import sys
import time
from typing import TextIO


class Progress:
    """Lines about what is done. On a terminal the last one turns and counts seconds meanwhile."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self.stream = stream or sys.stderr
        self.lively = self.stream.isatty()
        self._turning = itertools.cycle("|/-\\")
        self._text = self._detail = ""
        self._started = 0.0

    def begin(self, text: str) -> None:
        """Say what is being done now."""
        self._text, self._detail, self._started = text, "", time.monotonic()
        if self.lively:
            self.tick()
        else:
            self._write(f"{text} ...\n")

    def detail(self, text: str) -> None:
        """Say more closely what is being done; only a terminal shows it."""
        self._detail = f", {text}"
        self.tick()

    def tick(self) -> None:
        """Show that it still goes on; call it a few times a second."""
        if self.lively:
            seconds = time.monotonic() - self._started
            line = f"{next(self._turning)} {self._text}{self._detail} ({seconds:.0f} s)"
            self._write(f"\r\x1b[K{line[: shutil.get_terminal_size().columns - 1]}")

    def end(self, result: str) -> None:
        """Say what came of it."""
        seconds = time.monotonic() - self._started
        if self.lively:
            self._write(f"\r\x1b[K{self._text}: {result} ({seconds:.1f} s)\n")
        else:
            self._write(f"  {result} ({seconds:.1f} s)\n")
        self._text = ""

    def note(self, text: str) -> None:
        """Say something besides."""
        self._write(f"{text}\n")

    def drop(self) -> None:
        """Clear an unfinished line, before an error is shown."""
        if self.lively and self._text:
            self._write("\r\x1b[K")

    def _write(self, text: str) -> None:
        self.stream.write(text)
        self.stream.flush()
