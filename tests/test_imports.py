"""Imports point down only, and the core needs neither torch nor a client library."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import hicache_storage

PACKAGE = Path(hicache_storage.__file__).parent
LOWER_FIRST = (
    ("errors", "forking"),
    ("keys", "page", "namespace", "failures", "config", "parts"),
    ("hookspecs", "staging"),
    ("calling", "discovery"),
    ("store",),
    ("middleware", "backends", "opening", "pairing"),
    ("edge", "pools"),
    ("hicache",),
    ("adapters",),
)
LEVEL = {name: level for level, names in enumerate(LOWER_FIRST) for name in names}
HEAVY = [
    "torch",
    "numpy",
    "boto3",
    "botocore",
    "lmdb",
    "fsspec",
    "s3fs",
    "redis",
    "pytest",
    "hypothesis",
    "sglang",
]


def own_imports(path: Path) -> set[str]:
    """The top-level parts of this package that a module imports, anywhere in it."""
    package = ("hicache_storage", *path.relative_to(PACKAGE).parts[:-1])
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            whole = (*base, *(node.module or "").split("."))
            names = [(*whole, alias.name) for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [tuple(alias.name.split(".")) for alias in node.names]
        else:
            continue
        for name in names:
            parts = [part for part in name if part]
            if parts[0] == "hicache_storage" and len(parts) > 1:
                found.add(parts[1])
    return found


@pytest.mark.parametrize(
    "path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE))
)
def test_imports_point_down_only(path: Path) -> None:
    own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if own not in LEVEL:  # the public face, the command and the kit may use everything
        assert own in {"__init__", "__main__", "cli", "testing"}
        return
    above = {
        name
        for name in own_imports(path)
        if name != own and name in LEVEL and LEVEL[name] > LEVEL[own]
    }
    assert not above, f"{own} imports {sorted(above)}, which stand above it"


@pytest.mark.parametrize("path", sorted((PACKAGE / "backends").rglob("*.py")), ids=lambda p: p.stem)
def test_a_backend_knows_keys_spans_and_errors_only(path: Path) -> None:
    allowed = {
        "backends",
        "config",
        "errors",
        "failures",
        "forking",
        "hookspecs",
        "keys",
        "page",
        "parts",
        "middleware",
    }
    assert own_imports(path) <= allowed


@pytest.mark.parametrize(
    "statement",
    [
        "import hicache_storage",
        "import hicache_storage.cli",
        "import hicache_storage.edge, hicache_storage.middleware.metrics",
        "from hicache_storage import open_store; open_store('memory://').close()",
        "from hicache_storage.discovery import find_backends; find_backends()",
    ],
)
def test_the_core_imports_neither_torch_nor_a_client_library(statement: str) -> None:
    code = f"import sys; {statement}; print(*(name for name in {HEAVY!r} if name in sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split() == []
