"""A failed load is a value. Nothing at run time rests on an assertion, so -O changes nothing."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import hicache_storage.hicache

PACKAGE = Path(hicache_storage.hicache.__file__).parent

SERVE = """
import random
from hicache.ranks import PROMPTS, look_up
from hicache.rig import Rig

if __debug__:
    raise SystemExit("not optimised")
luck, one = random.Random(12), Rig(device_pages=14, host_pages=16)

def fail(hook, keys):
    if hook == "batch_get" and luck.random() < 0.2:
        raise OSError(5, "told to")

for prompt in PROMPTS:
    lease = one.serve(prompt)
    one.cache.release(lease)
    one.cache.wait_idle(20)
    one.cache.clear()
one.backend.on = fail
got = look_up(one, 5, 100)
one.cache.wait_idle(20)
stats = one.cache.stats()
if one.cache._storages.threads != 3 or len(got) != 100:
    raise SystemExit("a thread died")
if not stats.storage_errors or not stats.storage_hits:
    raise SystemExit(f"nothing happened: {stats}")
one.cache.close(20)
one.cache.clear()
if one.pools.host_allocator.available != 16 or one.pools.device_allocator.available != 14:
    raise SystemExit("pages are missing")
print("served")
"""


@pytest.mark.parametrize("path", sorted(PACKAGE.glob("*.py")), ids=lambda path: path.name)
def test_no_module_asserts(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert not [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Assert)]


def test_with_assertions_off_one_failing_read_in_five_costs_hits_and_nothing_else() -> None:
    done = subprocess.run(
        [sys.executable, "-O", "-c", SERVE],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=Path(__file__).parents[1],
        env={"PYTHONPATH": str(Path(__file__).parents[1]), "PATH": ""},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "served\n"
