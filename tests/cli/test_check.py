"""`hicache-storage check`: whose pages it touches, and what it says of a backend that fails."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli.prefix import Ran

Run = Callable[..., Ran]


def test_check_needs_no_pytest(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "for name in ('pytest', 'hypothesis', '_pytest'):\n    sys.modules[name] = None\n"
        "from hicache_storage.cli import main\n"
        f"sys.exit(main(['check', 'file://{tmp_path}/pages', '--clause', '1', '--clause', '7.4']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "9 passed" in done.stdout
    assert done.stderr == ""


def test_check_leaves_the_pages_of_others_and_none_of_its_own(tmp_path: Path, run: Run) -> None:
    from cli.prefix import DRAFT, HASHES, TARGET, put

    from hicache_storage import open_store

    url = f"file://{tmp_path}/pages"
    with open_store(url) as store:
        put(store)
        before = {page.key: page.stored_bytes for page in store._caller.scan("")}
        ran = run("check", url, "--clause", "1", "--clause", "8", "--clause", "11", "--json")
        assert ran.status == 0, ran.out
        after = {page.key: page.stored_bytes for page in store._caller.scan("")}
        assert after == before
        assert store.exists(TARGET, HASHES) == 10
        assert store.exists(DRAFT, [f"d:{one}" for one in HASHES]) == 10
    results = {one["clause"]: one for one in ran.document["clauses"]}
    assert results["8.5"]["result"] == "not selected"
    assert "a store that holds nothing (or --destructive)" in results["8.5"]["reason"]
    assert "nobody else uses (or --destructive)" in results["8.6"]["reason"]


def test_check_clears_an_empty_store_but_not_once_others_write(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"file://{tmp_path}/pages"
    results = run("check", url, "--clause", "8.5", "--json").document["clauses"]
    assert results[0]["result"] == "passed"

    from cli.prefix import put

    from hicache_storage import open_store
    from hicache_storage.testing import running

    probing = running.probe

    def probe_and_write(subject: object) -> frozenset[str]:
        found = probing(subject)  # type: ignore[arg-type]
        with open_store(url) as store:
            put(store)
        return found

    monkeypatch.setattr(running, "probe", probe_and_write)
    results = run("check", url, "--clause", "8.5", "--json").document["clauses"]
    assert results[0]["result"] == "not selected"
    assert "pages that the kit did not write" in results[0]["reason"]
    with open_store(url) as store:
        assert len(list(store.scan())) == 20


def test_check_refuses_a_store_that_would_push_pages_out(tmp_path: Path, run: Run) -> None:
    from cli.prefix import put

    from hicache_storage import open_store

    url = f"file://{tmp_path}/pages?capacity=100MiB"
    with open_store(url) as store:
        put(store)
    ran = run("check", url)
    assert ran.status == 2
    assert "the store holds 22 pages and has" in ran.err
    assert "say --destructive" in ran.err
    ran = run("check", url, "--destructive", "--clause", "8.6", "--clause", "8.5", "--json")
    assert [one["result"] for one in ran.document["clauses"]] == ["passed", "passed"]


@pytest.fixture
def spoiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """memory:// with a fault."""
    from hicache_storage import hookimpl
    from hicache_storage.backends.memory import MemoryBackend

    @hookimpl
    def batch_get(self, keys, buffers):  # type: ignore[no-untyped-def]
        hits = [self._get(key, spans) for key, spans in zip(keys, buffers, strict=True)]
        return hits if all(hits) else [False] * len(hits)

    monkeypatch.setattr(MemoryBackend, "batch_get", batch_get)


def test_a_bug_of_the_backend_is_shown_with_its_place_and_with_debug_its_traceback(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hicache_storage import hookimpl
    from hicache_storage.backends.memory import MemoryBackend

    @hookimpl
    def batch_get(self: Any, keys: list[str], buffers: list[Any]) -> list[bool]:
        raise TypeError("a bug")

    monkeypatch.setattr(MemoryBackend, "batch_get", batch_get)
    line = batch_get.__code__.co_firstlineno + 2
    for debug in ([], ["--debug"]):
        ran = run("check", "memory://", "--clause", "1.3", *debug)
        assert ran.status == 1
        assert f"batch_get: TypeError: a bug ({__file__}:{line})" in ran.out
        assert ("Traceback" in ran.err) == bool(debug)


@pytest.mark.usefixtures("spoiled")
def test_a_failed_clause_is_in_the_report_and_in_the_exit_status(run: Run, tmp_path: Path) -> None:
    ran = run("check", "memory://", "--clause", "1.3", "--clause", "2.4")
    assert ran.status == 1
    assert "1.3  FAILED" in ran.out
    assert "batch_get with a miss at 0: expected FTTTTTTTT, found FFFFFFFFF" in ran.out
    assert "memory (hicache-storage 0." in ran.out
    assert "BREAKS the backend contract: 1 passed, 1 failed." in ran.out
    report = tmp_path / "report.md"
    ran = run("check", "memory://", "--clause", "1.3", "--report", "markdown", "--output", report)
    assert ran.status == 1
    assert "| 1.3 | A miss does not spoil its neighbours | failed |" in ran.out
    assert report.read_text() == ran.out


@pytest.mark.usefixtures("spoiled")
def test_a_declared_deviation_is_no_failure_until_it_is_gone(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("check", "memory://", "--clause", "1.3", "--deviation", "1.3=all or nothing")
    ran = run(*arguments)
    assert ran.status == 0
    assert "1.3  deviates" in ran.out
    assert "(all or nothing)" in ran.out
    monkeypatch.undo()
    ran = run(*arguments)
    assert ran.status == 1
    assert "DEVIATION GONE" in ran.out
    assert "it holds now; take the deviation out (all or nothing)" in ran.out


def test_the_json_report_is_complete(run: Run) -> None:
    document = run("check", "memory://", "--clause", "1", "--report", "json").document
    assert document == run("check", "memory://", "--clause", "1", "--json").document | {
        "clauses": document["clauses"]
    }
    assert document["passed"] is True
    assert document["counts"] == {"passed": 8}
    assert document["store"] == "memory://"
    assert document["scope"] == "process"
    assert {"clause", "title", "result", "seconds", "reason"} == document["clauses"][0].keys()
