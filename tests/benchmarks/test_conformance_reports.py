"""The page of conformance reports: of today's clauses, on every store, faults noted."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from hicache_storage.testing.clauses import CLAUSES

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "conformance-reports.md"


@pytest.fixture
def reports(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    program = ROOT / "benchmarks" / "conformance_reports.py"
    spec = importlib.util.spec_from_file_location("conformance_reports", program)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_store_has_a_report_of_every_clause(reports: ModuleType) -> None:
    sections = dict(
        re.findall(r"^## ([^\n]*)\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    )
    assert list(sections) == list(reports.STORES)
    today = [(clause.number, clause.title) for clause in CLAUSES]
    for name, section in sections.items():
        shown = re.findall(r"^\| (\d+\.\d+) \| ([^|]*) \|", section, re.MULTILINE)
        assert shown == today, f"the report of {name} is of other clauses; run `make reports`"


def test_no_clause_fails_in_the_reports_shown() -> None:
    results = re.findall(r"^\| \d+\.\d+ \| [^|]* \| ([^|]*) \|", PAGE.read_text(), re.MULTILINE)
    assert set(results) == {"passed", "not selected"}


def test_a_clause_that_fails_or_deviates_is_counted_and_shown(reports: ModuleType) -> None:
    clauses = [
        {"clause": "1.1", "title": "A | B", "result": "failed", "seconds": 1.0, "reason": "x\ny"},
        {"clause": "1.2", "title": "C", "result": "deviates", "seconds": 1.0, "reason": "z"},
        {"clause": "1.3", "title": "D", "result": "passed", "seconds": 1.0, "reason": ""},
    ]
    counts = {"failed": 1, "deviates": 1, "passed": 1}
    report = {
        "distribution": "d 1", "kit": "1", "scope": "shared", "capabilities": ["scan"],
        "counts": counts, "clauses": clauses, "wall_s": 3.0, "made": "then",
    }  # fmt: skip
    page = reports.page({"memory": report})
    assert "| memory:// | d 1 | 1 | 1 | 0 | 3 |" in page
    assert "| 1.1 | A \\| B | failed | 1.00 | x y |" in page
    assert "1 failed, 1 deviates, 1 passed" in page
