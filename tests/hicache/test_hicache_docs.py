"""docs/hicache.md: its code runs, and it names what there is."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path

from hicache_storage.hicache import HiCache, HiCacheStats

PAGE = (Path(__file__).parents[2] / "docs" / "hicache.md").read_text(encoding="utf-8")
NAMES = set(re.findall(r"`(\w+)[`(]", PAGE))
STATS = {field.name for field in dataclasses.fields(HiCacheStats)}


def test_the_code_of_the_page_runs() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(compile(code, "docs/hicache.md", "exec"), {"__name__": "page"})


def test_every_count_that_the_page_names_exists() -> None:
    table = PAGE[PAGE.index("## What to look at") : PAGE.index("## Limits")]
    named = set(re.findall(r"`(\w+)`", table))
    assert named <= STATS
    assert len(named & STATS) > 15


def test_every_call_of_the_cache_is_on_the_page() -> None:
    calls = {name for name, _ in inspect.getmembers(HiCache, inspect.isfunction) if name[0] != "_"}
    code = set(re.findall(r"\b(?:cache\.)(\w+)\(", PAGE))
    assert calls <= NAMES | code
