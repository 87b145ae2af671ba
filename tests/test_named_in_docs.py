"""What documents name is there: tests by path and name, and files that a link leads to."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOTS = (ROOT, ROOT / "examples" / "plugin")
"""Of what a page names: this package, and the plugin that a page has its reader write."""
PAGES = sorted([ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/**/*.md")])
TEST = re.compile(r"`(tests/[\w/.-]+\.py)(?:::(\w+))?")
LINK = re.compile(r"\]\((?!\w+:|#)([^)#\s]+)(?:#[^)]*)?\)")


def by_name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def defines(text: str, name: str) -> bool:
    return re.search(rf"^\s*(?:def|async def|class) {name}\b|^{name} =", text, re.M) is not None


@pytest.mark.parametrize("page", PAGES, ids=by_name)
def test_every_test_that_a_page_names_exists(page: Path) -> None:
    missing = []
    for path, name in TEST.findall(page.read_text()):
        found = [root / path for root in ROOTS if (root / path).is_file()]
        if not found:
            missing.append(path)
        elif name and not defines(found[0].read_text(), name):
            missing.append(f"{path}::{name}")
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=by_name)
def test_every_file_that_a_page_links_to_exists(page: Path) -> None:
    missing = [
        target for target in LINK.findall(page.read_text()) if not (page.parent / target).exists()
    ]
    assert not missing


def test_the_rules_name_tests() -> None:
    assert len(TEST.findall((ROOT / "docs/rules.md").read_text())) > 100
