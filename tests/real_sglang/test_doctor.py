"""doctor --sglang beside a real installation."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

pytest.importorskip("sglang.srt", reason="needs a real SGLang wheel: make sglang")

from hicache_storage.cli.doctor_sglang import sglang_checks

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_a_server_that_would_use_its_store_has_nothing_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = "import sglang_stand_ins\nsglang_stand_ins.install()\n"
    (tmp_path / "sitecustomize.py").write_text(start)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(BENCHMARKS)]))
    config = json.dumps({"path": str(tmp_path / "kv"), "revision": "1"})
    command = [
        "--model-path", "m", "--enable-hierarchical-cache", "--page-size", "64",
        "--hicache-ratio", "2", "--hicache-storage-backend", "lmdb",
        "--hicache-storage-backend-extra-config", config,
    ]  # fmt: skip
    checks, options = sglang_checks(command)
    found = {one["what"].removeprefix("sglang: "): one for one in checks}
    assert {name: one["found"] for name, one in found.items() if one["state"] == "wrong"} == {}
    assert "lmdb" in found["flag"]["found"], found["flag"]
    assert options is not None
    assert options.backend == "lmdb"
