"""The examples in docs/pools.md run, and its tables name what there is."""

from __future__ import annotations

import re
from pathlib import Path

from hicache_storage.pools.layouts import LAYOUTS, token_order

TEXT = (Path(__file__).parents[2] / "docs" / "pools.md").read_text()


def test_the_examples_run() -> None:
    examples = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    assert len(examples) == 2
    names: dict[str, object] = {}
    for example in examples:
        exec(example, names)


def test_every_layout_is_in_the_table_with_its_order() -> None:
    for layout in LAYOUTS:
        assert re.search(rf"\| `{layout}` \|.*\| `{token_order(layout)}` \|", TEXT)
