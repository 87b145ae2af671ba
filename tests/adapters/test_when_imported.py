"""when_imported: a module is imported as ever, and what waits for it is done once, right after."""

from __future__ import annotations

import importlib
import inspect
import sys
from pathlib import Path

import pytest

from hicache_storage.adapters.when_imported import when_imported


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a package with a module `inner`, not imported yet."""
    folder = tmp_path / "awaited_package"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "inner.py").write_text("VALUE = 1\n\n\ndef doubled():\n    return 2 * VALUE\n")
    (folder / "broken.py").write_text("raise RuntimeError('broken')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return "awaited_package"


def test_nothing_happens_before_the_import_and_once_after_it(package: str) -> None:
    done: list[str] = []
    name = f"{package}.inner"
    when_imported(name, lambda: done.append(str(sys.modules[name].VALUE)))
    importlib.import_module(package)
    assert done == []
    assert name not in sys.modules
    module = importlib.import_module(name)
    importlib.import_module(name)
    assert done == ["1"]
    assert "2 * VALUE" in inspect.getsource(module.doubled)
    importlib.reload(module)
    assert module.doubled() == 2


def test_a_module_that_is_there_already_is_not_waited_for(package: str) -> None:
    importlib.import_module(f"{package}.inner")
    done: list[int] = []
    when_imported(f"{package}.inner", lambda: done.append(1))
    assert done == [1]


def test_several_may_wait_for_one_module(package: str) -> None:
    done: list[int] = []
    for number in range(3):
        when_imported(f"{package}.inner", lambda number=number: done.append(number))  # type: ignore[misc]
    importlib.import_module(f"{package}.inner")
    assert sorted(done) == [0, 1, 2]


@pytest.mark.parametrize(("name", "error"), [("broken", RuntimeError), ("absent", ImportError)])
def test_an_import_that_fails_fails_as_ever(
    package: str, name: str, error: type[Exception]
) -> None:
    done: list[int] = []
    when_imported(f"{package}.{name}", lambda: done.append(1))
    with pytest.raises(error):
        importlib.import_module(f"{package}.{name}")
    assert done == []
