"""The command, run in this process, and a file store."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cli.prefix import Ran

from hicache_storage import Store, open_store
from hicache_storage.cli import main


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """`run("stat", url)`: the command's exit status and output."""

    def run_command(*arguments: object) -> Ran:
        capsys.readouterr()
        try:
            status = main([str(argument) for argument in arguments])
        except SystemExit as error:  # argparse
            status = error.code if isinstance(error.code, int) else 1
        captured = capsys.readouterr()
        return Ran(status, captured.out, captured.err)

    return run_command


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/pages"


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    with open_store(url) as store:
        yield store
