"""`hicache-storage new-backend`: a plugin package that passes the kit from the start."""

from __future__ import annotations

import argparse
import re
import shutil
import tempfile
from pathlib import Path
from string import Template

from .. import __version__
from ..discovery import PLUGINS, find_backends
from ..errors import ConfigError
from .output import Answer

_NAME = re.compile(r"[a-z][a-z0-9]*([.+-][a-z0-9]+)*")
_LONGEST_NAME = 30

_PYPROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "$package"
version = "0.1.0"
description = "KV-cache pages in $name: a storage backend for hicache-storage"
readme = "README.md"
requires-python = ">=3.10"
dependencies = ["hicache-storage>=$version"]

[project.optional-dependencies]
test = ["hicache-storage[testing]"]

[project.entry-points."hicache_storage.backends"]
"$name" = "$module:$cls"

[tool.hatch.build.targets.wheel]
packages = ["src/$module"]

[tool.pytest.ini_options]
testpaths = ["tests"]
filterwarnings = ["error"]
"""

_BACKEND = '''\
"""$name://: KV-cache pages as files; put your own store in their place."""

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from hicache_storage import BackendUnavailable, PageSpans, StoredPage, hookimpl
from hicache_storage.config import option

NAME = "$name"


@dataclass(frozen=True)
class ${stem}Config:
    """Options of $name://."""

    path: str = option(url="location", doc="The directory; created if missing.")


class $cls:
    """A directory for each namespace, a file for each page."""

    Config = ${stem}Config

    def __init__(self, config: ${stem}Config) -> None:
        self._root = Path(config.path)

    @hookimpl
    def open(self) -> None:
        with _translated("open"):
            self._root.mkdir(parents=True, exist_ok=True)

    @hookimpl
    def batch_set(self, keys: list[str], pages: list[PageSpans]) -> list[bool]:
        with _translated("batch_set"):
            return [self._write(key, page) for key, page in zip(keys, pages, strict=True)]

    @hookimpl
    def batch_get(self, keys: list[str], buffers: list[PageSpans]) -> list[bool]:
        with _translated("batch_get"):
            return [self._read(key, spans) for key, spans in zip(keys, buffers, strict=True)]

    @hookimpl
    def exists(self, keys: list[str]) -> int:
        missing = (i for i, key in enumerate(keys) if not (self._root / key).is_file())
        return next(missing, len(keys))

    @hookimpl
    def delete(self, keys: list[str]) -> list[bool]:
        with _translated("delete"):
            for key in keys:
                (self._root / key).unlink(missing_ok=True)
        return [True] * len(keys)

    @hookimpl
    def scan(self, prefix: str) -> Iterator[StoredPage]:
        for path in self._root.glob("[!.]*/[!.]*"):  # a new page's name starts with a dot
            key = path.relative_to(self._root).as_posix()
            with suppress(FileNotFoundError):
                if key.startswith(prefix):
                    yield StoredPage(key, path.stat().st_size)

    def _write(self, key: str, page: PageSpans) -> bool:
        """Under another name first, so that no reader ever sees part of a page."""
        path = self._root / key
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, new = tempfile.mkstemp(prefix=".new-", dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.writelines(page)
            os.replace(new, path)
        except BaseException as error:
            os.unlink(new)
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                return False  # a full store refuses pages; it doesn't fail
            raise
        return True

    def _read(self, key: str, spans: PageSpans) -> bool:
        """Into the spans themselves; False if it is missing or has another length."""
        try:
            with (self._root / key).open("rb") as file:
                if os.fstat(file.fileno()).st_size != sum(map(len, spans)):
                    return False
                return all(file.readinto(span) == len(span) for span in spans)
        except FileNotFoundError:
            return False


@contextmanager
def _translated(operation: str) -> Iterator[None]:
    """The one place where the client's errors become those of the contract."""
    try:
        yield
    except OSError as error:
        raise BackendUnavailable(str(error), backend=NAME, operation=operation) from error
'''

_TEST = """\
from hicache_storage.testing import BackendContract


class Test$stem(BackendContract):
    url = "$name://{tmp_path}/pages"
"""

_README = """\
# $package

Keeps KV-cache pages of LLM servers in $name, for hicache-storage.

```console
$$ pip install -e '.[test]'
$$ pytest
$$ hicache-storage list $name
$$ hicache-storage check $name:///tmp/$module --report markdown
```

`pytest` runs the conformance kit: a test for each clause of the backend contract that applies.
Put the report of the last line here.
"""

_FILES = {
    "pyproject.toml": _PYPROJECT,
    "README.md": _README,
    "src/$module/__init__.py": _BACKEND,
    "src/$module/py.typed": "",
    "tests/test_contract.py": _TEST,
}


def run_new_backend(arguments: argparse.Namespace) -> Answer:
    """Writes all of the package or nothing. Raises ConfigError for a name that can't be used and
    for a directory that exists."""
    name = arguments.name
    _check_name(name)
    words = re.split(r"[.+-]", name)
    stem = "".join(word.capitalize() for word in words)
    values = {
        "name": name,
        "package": "-".join(["hicache-storage", *words]),
        "module": "_".join(["hicache_storage", *words]),
        "stem": stem,
        "cls": f"{stem}Backend",
        "version": __version__,
    }
    directory = Path(arguments.dir or values["package"])
    files = {
        Template(path).substitute(values): Template(text).substitute(values)
        for path, text in _FILES.items()
    }
    _write_all(directory, files)
    text = "\n".join(
        [
            f"{directory}: a package with a backend that works, {name}://",
            *(f"  {path}" for path in files),
            "",
            "next:",
            f"  pip install -e '{directory}[test]'",
            f"  pytest -c {directory / 'pyproject.toml'} {directory}",
            f"then replace what {values['cls']} does by calls to your own store.",
        ]
    )
    return Answer(True, {"directory": str(directory), "name": name, "files": [*files]}, text)


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name) or len(name) > _LONGEST_NAME:
        raise ConfigError(
            f"{name!r} can't be the name of a backend: it is the scheme of URLs and part of a "
            f"package's name. Write at most {_LONGEST_NAME} lower-case letters and digits, a "
            "letter first, with single '-', '.' or '+' between them"
        )
    found = find_backends()
    taken = found[name].distribution if name in found else PLUGINS.get(name)
    if taken is not None:
        raise ConfigError(f"backend {name!r} is offered by {taken} already; choose another name")


def _write_all(directory: Path, files: dict[str, str]) -> None:
    """Makes the directory, which must not exist, with all files in it."""
    if directory.exists() or directory.is_symlink():
        raise ConfigError(f"{directory} exists; name another directory with --dir")
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        new = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
        try:
            package = new / "package"
            for path, text in files.items():
                (package / path).parent.mkdir(parents=True, exist_ok=True)
                (package / path).write_text(text, encoding="utf-8")
            package.rename(directory)
        finally:
            shutil.rmtree(new, ignore_errors=True)
    except OSError as error:
        raise ConfigError(f"{directory} can't be written: {error}") from error
