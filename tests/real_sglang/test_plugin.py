"""SGLang's own parser, plugin loader and factory take this package's backends by name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sglang.srt", reason="needs a real SGLang wheel: make sglang")

from sglang.srt.mem_cache import hicache_storage as theirs

from hicache_storage.adapters.sglang import backend_class, class_name
from hicache_storage.discovery import find_backends

PROGRAM = Path(__file__).with_name("launching.py")


def run(*arguments: str, **environment: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(PROGRAM), *arguments],
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "HF_HUB_OFFLINE": "1", **environment},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", ["s3", "hicache_storage"])
def test_the_flag_takes_the_name_once_plugins_are_loaded(name: str) -> None:
    found = run("parse", name)
    assert found == {
        "before": None,
        "after": name,
        "prepared": name,
        "keywords": name,
        "builtin": "file",
        "unknown": None,
    }


def test_a_scheduler_that_is_spawned_or_forked_makes_the_backend(tmp_path: Path) -> None:
    found = run("spawn", "lmdb", f"lmdb://{tmp_path}/kv")
    assert found["spawn"] == {"before": False, "class": "HiCacheLmdb"}
    assert found["fork"]["class"] == "HiCacheLmdb"


@pytest.mark.parametrize("modules", [(), ("sglang.srt.server_args",)])
def test_loading_the_plugin_imports_nothing_of_weight(modules: tuple[str, ...]) -> None:
    assert run("imports", *modules)["heavy"] == []


def test_a_plugin_that_is_switched_off_changes_nothing() -> None:
    with pytest.raises(AssertionError, match="s3"):
        run("parse", "s3", SGLANG_PLUGINS="other")


def test_every_backend_has_a_class_that_sglang_accepts() -> None:
    for backend in find_backends():
        cls = backend_class(backend)
        assert issubclass(cls, theirs.HiCacheStorage)
        assert not cls.__abstractmethods__
        assert cls.__name__ == class_name(backend)
        assert not hasattr(theirs, cls.__name__)


def test_sglangs_own_names_are_not_taken_over() -> None:
    from sglang.srt.mem_cache.storage import StorageBackendFactory
    from sglang.srt.plugins import load_plugins

    load_plugins()
    entry = StorageBackendFactory._registry["file"]
    assert entry["module_path"].startswith("sglang.")
