"""The docs for backend authors: complete, in the words of the code, and their code runs."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from distributions import install

from hicache_storage import Store, hookspecs
from hicache_storage.backends.memory import MemoryBackend, MemoryConfig
from hicache_storage.hookspecs import OPTIONAL_HOOKS, REQUIRED_HOOKS
from hicache_storage.testing.clauses import CLAUSES
from hicache_storage.testing.doubles import CountingBackend
from hicache_storage.testing.report import clauses_markdown

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
EXAMPLE = ROOT / "examples" / "plugin"
HOOKS = REQUIRED_HOOKS + OPTIONAL_HOOKS
FENCE = re.compile(r"```(\w+)\n(.*?)\n```", re.DOTALL)
NAMED = re.compile(r"^`([\w/.-]+)`:\n\n```\w+\n(.*?)\n```", re.DOTALL | re.MULTILINE)


def text(name: str) -> str:
    return (DOCS / name).read_text()


def command(
    *arguments: object, cwd: Path, path: Path, status: int = 0
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(path)},
    )
    assert done.returncode == status, done.stdout[-3000:] + done.stderr[-3000:]
    return done


# -- the contract in the docs ------------------------------------------------------------------


def test_the_page_has_every_hook_of_the_contract_and_no_other() -> None:
    shown = re.findall(r"^### `(\w+)` \((required|optional)\)$", text("writing-a-backend.md"), re.M)
    assert shown == [(name, "required") for name in REQUIRED_HOOKS] + [
        (name, "optional") for name in OPTIONAL_HOOKS
    ]


@pytest.mark.parametrize("name", HOOKS)
def test_every_hook_stands_in_the_docs_with_its_exact_signature_and_words(name: str) -> None:
    hook = getattr(hookspecs, name)
    signature = str(inspect.signature(hook)).replace("'", "")
    assert f"def {name}{signature}: ..." in text("writing-a-backend.md")
    assert (inspect.getdoc(hook) or "?") in text("writing-a-backend.md")


def test_the_guarantees_and_duties_stand_in_the_docs_word_for_word() -> None:
    module = inspect.getdoc(hookspecs) or ""
    assert module[module.index("What the framework guarantees") :] in text("writing-a-backend.md")


def test_the_list_of_clauses_in_the_docs_is_the_one_that_is_run() -> None:
    page = text("conformance.md")
    assert page[page.index("## The clauses") :] == clauses_markdown()


def test_clauses_that_the_docs_name_exist() -> None:
    known = {clause.number for clause in CLAUSES}
    for name in ("conformance.md", "writing-a-backend.md"):
        prose = re.sub(r"```.*?```", "", text(name), flags=re.DOTALL)
        for number in re.findall(r"(?<![\w.])(\d{1,2}\.\d{1,2})(?![\w.])", prose):
            assert number in known, f"{name} names clause {number}"


def test_clauses_that_a_scope_leaves_out_are_those_of_the_docs() -> None:
    scopes = {"shared": (), "exclusive": ("shared",), "process": ("shared", "persistent")}
    for scope, lost in scopes.items():
        left = [one.number for one in CLAUSES if set(one.needs) & set(lost)]
        row = next(line for line in text("conformance.md").splitlines() if f'| `"{scope}"`' in line)
        assert row.rstrip(" |").rpartition("|")[2].strip() == (", ".join(left) or "none")


# -- each hook does something ------------------------------------------------------------------


def arguments_of(name: str) -> dict[str, Any]:
    key = "0" * 32 + "/" + "1" * 64
    spans = (memoryview(bytearray(64)), memoryview(bytearray(8)))
    every = {"keys": [key], "pages": [spans], "buffers": [spans], "prefix": "", "prefix_keys": None}
    return {one: every[one] for one in inspect.signature(getattr(hookspecs, name)).parameters}


@pytest.mark.parametrize("name", HOOKS)
def test_every_hook_reaches_the_backend(name: str) -> None:
    class Complete(MemoryBackend):
        """With the hooks that memory:// lacks."""

    for hook in HOOKS:
        if getattr(Complete, hook, None) is None:
            method = hookspecs.hookimpl(lambda self: None)
            setattr(Complete, hook, method)
    counting = CountingBackend(Complete(MemoryConfig()))
    store = Store(counting)
    answer = getattr(store._caller, name)(**arguments_of(name))
    if name == "scan":
        list(answer)
    assert counting.calls == {name: 1}


@pytest.mark.parametrize("name", HOOKS)
def test_every_hook_is_tried_by_a_clause(name: str) -> None:
    """By one that needs it, or, for the hooks of every store, by its code."""
    if name in ("delete", "scan", "usage", "flush", "clear"):
        assert any(name in clause.needs for clause in CLAUSES)
    else:
        assert any(f".{name}(" in inspect.getsource(clause.try_on) for clause in CLAUSES)


# -- the code in the docs ----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["conformance.md", "writing-a-backend.md"])
def test_the_python_of_a_page_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one go, as a reader would type it; bodies of hooks included, as definitions."""
    scope: dict[str, Any] = {"__name__": "a_page"}
    exec("from hicache_storage import *\nfrom collections.abc import Iterator", scope)
    blocks = [body for language, body in FENCE.findall(text(name)) if language == "python"]
    assert blocks
    for body in blocks:
        monkeypatch.setitem(sys.modules, "a_page", type(sys)("a_page"))
        exec(compile(body, f"docs/{name}", "exec"), scope)


def test_the_files_of_the_page_are_those_of_the_example() -> None:
    files = dict(NAMED.findall(text("writing-a-backend.md")))
    assert files.keys() == {
        "pyproject.toml",
        "src/hicache_storage_example/__init__.py",
        "tests/test_sqlite.py",
    }
    for name, body in files.items():
        assert body + "\n" == (EXAMPLE / name).read_text()


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package that the page builds, from the page alone, installed into a directory."""
    package = tmp_path_factory.mktemp("mybackend")
    for name, body in NAMED.findall(text("writing-a-backend.md")):
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(body + "\n")
    command(
        *("-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"),
        *("--no-index", "--target", package / "site", "."),
        cwd=package,
        path=package,
    )
    return package


def test_the_package_of_the_page_is_listed_as_the_page_says(installed: Path) -> None:
    done = command(
        "-m", "hicache_storage", "list", "sqlite", cwd=installed, path=installed / "site"
    )
    page = text("writing-a-backend.md")
    assert f"$ hicache-storage list sqlite\n{done.stdout.rstrip()}\n```" in page


def test_the_package_of_the_page_passes_the_kit_as_the_page_says(installed: Path) -> None:
    done = command("-m", "pytest", "-p", "no:cacheprovider", cwd=installed, path=installed / "site")
    summary = next(line for line in done.stdout.splitlines() if "TestSqlite: " in line)
    assert summary in text("writing-a-backend.md")


def test_the_package_of_the_page_passes_the_check_as_the_page_says(installed: Path) -> None:
    report = installed / "report.md"
    url = f"sqlite://{installed}/pages.db"
    done = command(
        *("-m", "hicache_storage", "check", url, "--output", report, "--report", "markdown"),
        cwd=installed,
        path=installed / "site",
    )
    summary = done.stdout.splitlines()[2]
    assert summary in text("writing-a-backend.md")
    assert report.read_text() == done.stdout
    assert done.stdout.count("| passed |") == 51


def test_a_broken_package_beside_it_does_not_disturb_it(installed: Path) -> None:
    site = installed / "site"
    install(site, "plug-bad", {"bad": "plug_bad:Backend"}, {"plug_bad": "raise SystemExit(9)"})
    url = f"sqlite://{installed}/pages.db"
    for arguments in (("check", url, "--clause", "1"), ("stat", url), ("list", "sqlite")):
        command("-m", "hicache_storage", *arguments, cwd=installed, path=site)
