"""Names of pages are the same in every process; errors stay errors under `python -O`."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import hicache_storage

PACKAGE = Path(hicache_storage.__file__).parent

DERIVE = """
import json, sys
from hicache_storage import Namespace
from hicache_storage.config import build_config
from hicache_storage.backends.memory import MemoryConfig
from hicache_storage.keys import draft_key, page_hashes, stored_key
from hicache_storage.page import make_header

fields = dict(json.loads(sys.argv[1]))
namespace = Namespace(**fields)
hashes = page_hashes(range(33), 8, mode="pairs")
keys = [stored_key(namespace.digest, key) for one in hashes for key in (one, draft_key(one))]
header = make_header((memoryview(b"x" * 64),), bytes.fromhex(namespace.digest), hashes[0])
options = dict(json.loads(sys.argv[2]))
config = build_config(MemoryConfig, "memory", options)
print(json.dumps([namespace.canonical, namespace.digest, keys, header.hex(), repr(config)]))
print(hash("a text"), file=sys.stderr)
"""
FIELDS = {
    "model": "org/módel",
    "pool": "mha",
    "dtype": "bfloat16",
    "page_size": 8,
    "page_bytes": 64,
    "layers": 2,
    "heads": 2,
    "head_dim": 8,
    "v_head_dim": 8,
    "order": "token_layer",
    "tenant": "a b",
    "tp_size": 2,
    "tp_rank": 1,
}


def test_names_of_pages_depend_on_no_process_hash_seed_or_order() -> None:
    answers, seeds = set(), set()
    for seed in ("random", "0", "1", "4294967295"):
        for turn in (1, -1):
            fields = list(FIELDS.items())[::turn]
            options = [("url:host", ""), ("capacity", "1MiB"), ("url:location", "")][::turn]
            done = subprocess.run(
                [sys.executable, "-c", DERIVE, json.dumps(fields), json.dumps(options)],
                capture_output=True,
                text=True,
                check=True,
                timeout=60,
                env={**os.environ, "PYTHONHASHSEED": seed, "TZ": "Asia/Tokyo", "LC_ALL": "C"},
            )
            answers.add(done.stdout)
            seeds.add(done.stderr)
    assert len(answers) == 1
    assert len(seeds) > 1  # the processes did hash in different ways


def _modules() -> Iterator[Path]:
    yield from sorted(PACKAGE.rglob("*.py"))


def test_no_name_is_made_from_the_builtin_hash_id_or_pid() -> None:
    """`hash` and `id` differ by process; a pid may name a temporary file, never a page."""
    for path in _modules():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id != "hash", f"{path}:{node.lineno}"
                if node.func.id == "id":
                    assert "testing" not in path.parts, f"{path}:{node.lineno}"
    for name in ("keys.py", "namespace.py", "page.py"):
        source = (PACKAGE / name).read_text()
        assert "getpid" not in source
        assert "uuid" not in source
        assert "random" not in source


UNDER_O = """
import sys
from hicache_storage import BackendUnavailable, Namespace, PairedStore, Store
from hicache_storage.backends.memory import MemoryBackend, MemoryConfig
from hicache_storage.edge import StorageEdge
from hicache_storage.testing.bench import kit_namespace
from hicache_storage.testing.faults import FaultyBackend, FlipBit, NoneResult, Raise, Refuse

try:
    assert False
except AssertionError:
    sys.exit("asserts are on: this proves nothing")

faulty = FaultyBackend(MemoryBackend(MemoryConfig()))
target, draft = kit_namespace(64, "t"), kit_namespace(32, "d")
edge = StorageEdge(PairedStore(Store(faulty), target, draft))
hashes = [format(i, "064x") for i in range(8)]
targets = [bytes([i]) * 64 for i in range(8)]
drafts = [bytes([i]) * 32 for i in range(8)]
edge.batch_set(hashes, targets, drafts)
# A fifth of the calls fail as a whole, a fifth of the pages by themselves, in three ways.
down = Raise(lambda: BackendUnavailable("x", backend="x", operation="g"))
faulty.inject("batch_get", down, every=5)
faulty.inject("batch_get", NoneResult(), skip=2, every=7)
faulty.inject("batch_get", FlipBit(70), skip=1, every=11)
faulty.inject("batch_get", Refuse(), every=5)
whole = short = 0
for _ in range(200):
    edge.batch_set(hashes, targets, drafts)
    into = [bytearray(b"\\xab" * 64) for _ in hashes]
    beside = [bytearray(b"\\xab" * 32) for _ in hashes]
    found = edge.batch_get(hashes, into, beside)
    if len(found.target) != 8 or len(found.draft) != 8:
        sys.exit("a short answer")
    for i in range(8):
        if found.target[i] and bytes(into[i]) != targets[i]:
            sys.exit("a wrong target page")
        if found.draft[i] and bytes(beside[i]) != drafts[i]:
            sys.exit("a wrong draft page")
    for i in range(found.usable_pages):
        if not found.draft[i] and any(beside[i]):
            sys.exit("a lost draft that is not zero")
    whole += found.usable_pages == 8
    short += found.usable_pages < 8
print(whole, short, edge.counts.errors)
"""


def optimized(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-O", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )


def test_optimized_failing_reads_are_misses_and_nothing_dies() -> None:
    done = optimized("-c", UNDER_O)
    assert done.returncode == 0, done.stderr
    whole, short, errors = map(int, done.stdout.split())
    assert whole + short == 200
    assert short > 20
    assert errors > 20


def test_optimized_the_kit_still_finds_faults(tmp_path: Path) -> None:
    good = optimized("-m", "hicache_storage", "check", f"file://{tmp_path}/pages")
    assert good.returncode == 0, good.stdout + good.stderr
    (tmp_path / "spoiled.py").write_text(
        "import sys\n"
        "from hicache_storage import hookimpl\n"
        "from hicache_storage.backends.memory import MemoryBackend\n"
        "MemoryBackend.exists = hookimpl(lambda self, keys: len(keys))\n"
        "from hicache_storage.cli import main\n"
        "sys.exit(main(['check', 'memory://', '--clause', '3']))\n"
    )
    bad = optimized(str(tmp_path / "spoiled.py"))
    assert bad.returncode == 1, bad.stderr
    assert "3.1  FAILED" in bad.stdout


@pytest.mark.parametrize("path", list(_modules()), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_asserts_only_tell_the_type_checker_what_is_so(path: Path) -> None:
    """None of them tests what a store, an engine or a user did: that would vanish under -O."""
    if path.name == "stateful.py":
        return  # a test itself
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Assert):
            shown = ast.unparse(node.test)
            assert " is not None" in shown or shown.startswith("isinstance("), f"{path}: {shown}"
