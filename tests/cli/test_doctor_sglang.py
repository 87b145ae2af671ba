"""doctor --sglang: whether SGLang, started like this, will use its store."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from hicache_storage import ConfigError
from hicache_storage.adapters import sglang_plugin
from hicache_storage.cli import doctor_sglang, main
from hicache_storage.cli.sglang_command import read_launch, token_bytes
from hicache_storage.pools import memory

START = ["--model-path", "m", "--enable-hierarchical-cache", "--hicache-storage-backend"]


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """SGLang 0.5.23 with the plugin, as far as the doctor looks."""
    facts: dict[str, Any] = {"version": "0.5.23", "choices": ["file", "s3", "hicache_storage"]}
    real = metadata.version

    def version(name: str) -> str:
        if name != "sglang":
            return real(name)
        if facts["version"] is None:
            raise metadata.PackageNotFoundError(name)
        found: str = facts["version"]
        return found

    monkeypatch.setattr(doctor_sglang.metadata, "version", version)
    monkeypatch.delenv("SGLANG_PLUGINS", raising=False)
    real_run = doctor_sglang.subprocess.run
    program = "import sys; print(sys.argv[1])"

    def run(command: list[str], **options: Any) -> Any:
        if facts["choices"] is None:
            return real_run([*command[:1], "-c", "raise ImportError('no triton')"], **options)
        return real_run([command[0], "-c", program, json.dumps(facts["choices"])], **options)

    monkeypatch.setattr(doctor_sglang.subprocess, "run", run)
    return facts


def checks(*command: str) -> dict[str, tuple[str, str]]:
    """What the doctor says, by subject: (state, text)."""
    found, _ = doctor_sglang.sglang_checks(command)
    return {one["what"].removeprefix("sglang: "): (one["state"], one["found"]) for one in found}


def test_a_good_installation_has_nothing_wrong_and_its_store_is_tried(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.dumps({"url": f"file://{tmp_path}/kv", "revision": "1"})
    command = [*START, "hicache_storage", "--hicache-storage-backend-extra-config", config]
    status = main(["doctor", "--json", "--sglang", *command, "--some-other-flag", "7"])
    found = json.loads(capsys.readouterr().out)["checks"]
    wrong = [one for one in found if one["state"] == "wrong" and "sglang" in one["what"].lower()]
    assert wrong == []
    tried = [one for one in found if one["what"] == "store of SGLang: file"]
    assert [one["state"] for one in tried] == ["ok"]
    assert status in (0, 1)  # other lines are about this environment


@pytest.mark.parametrize(
    ("version", "state", "said"),
    [
        (None, "wrong", "not installed"),
        ("0.5.10.post1", "wrong", "oldest supported is 0.5.11"),
        ("0.5.11", "ok", "0.5.11"),
        ("0.5.15.post1", "ok", "0.5.15.post1"),
        ("0.6.0", "note", "newer than 0.5.23"),
    ],
)
def test_the_version_is_judged(
    installed: dict[str, Any], version: str | None, state: str, said: str
) -> None:
    installed["version"] = version
    found = checks()["version"]
    assert found[0] == state
    assert said in found[1]


def test_a_plugin_that_is_left_out_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_PLUGINS", "other, another")
    assert checks()["plugin"] == (
        "wrong",
        "SGLANG_PLUGINS leaves it out; add 'hicache_storage' to its list",
    )
    monkeypatch.setenv("SGLANG_PLUGINS", "other,hicache_storage")
    assert checks()["plugin"][0] == "ok"


def test_the_plugin_is_this_packages_entry_point() -> None:
    (found,) = [
        e
        for e in metadata.entry_points(group=doctor_sglang.GROUP)
        if e.name == doctor_sglang.PLUGIN
    ]
    assert found.load() is sglang_plugin.register


@pytest.mark.parametrize(
    ("choices", "backend", "state"),
    [
        (["file", "s3", "hicache_storage"], "s3", "ok"),
        (["file", "s3", "hicache_storage"], "lmdb", "wrong"),
        (["file", "dynamic"], "s3", "wrong"),
        (["*"], "s3", "ok"),
        (None, "s3", "note"),
    ],
)
def test_the_flags_choices_are_sglangs_own_answer(
    installed: dict[str, Any], choices: Any, backend: str, state: str
) -> None:
    installed["choices"] = choices
    assert checks(*START, backend)["flag"][0] == state


@pytest.mark.parametrize(
    ("version", "arguments", "state"),
    [
        ("0.5.11", ["--hicache-ratio", "1"], "wrong"),
        ("0.5.14", ["--hicache-ratio", "0.5"], "wrong"),
        ("0.5.11", ["--hicache-ratio", "2"], None),
        ("0.5.11", [], None),
        ("0.5.14", ["--hicache-ratio", "1", "--hicache-size", "30"], "note"),
        ("0.5.15", ["--hicache-ratio", "1"], None),
    ],
)
def test_a_prefetch_capacity_of_zero_is_wrong(
    installed: dict[str, Any], version: str, arguments: list[str], state: str | None
) -> None:
    installed["version"] = version
    found = checks(*START, "s3", *arguments).get("prefetch capacity")
    assert (found and found[0]) == state


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--page-size", "64"], "256 tokens (4 pages of 64)"),
        (["--page-size", "512"], "512 tokens (1 pages of 512)"),
        (
            ["--hicache-storage-backend-extra-config", '{"prefetch_threshold": 100}'],
            "100 tokens (100 pages of 1)",
        ),
    ],
)
def test_the_threshold_is_said_in_pages(arguments: list[str], said: str) -> None:
    assert said in checks(*START, "s3", *arguments)["prefetch threshold"][1]


def test_a_server_without_a_hierarchical_cache_has_no_storage() -> None:
    assert checks("--model-path", "m", "--hicache-storage-backend", "s3")["cache"][0] == "wrong"


def checkpoint(folder: Path, **config: Any) -> str:
    folder.mkdir()
    fields = {
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "hidden_size": 4096, "torch_dtype": "bfloat16", **config,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(fields))
    return str(folder)


@pytest.mark.parametrize(
    ("config", "dtype", "tp", "wanted"),
    [
        ({}, "auto", 1, 2 * 32 * 8 * 128 * 2),
        ({}, "fp8_e4m3", 2, 2 * 32 * 4 * 128),
        ({"head_dim": 64}, "auto", 16, 2 * 32 * 1 * 64 * 2),
        ({"kv_lora_rank": 512, "qk_rope_head_dim": 64}, "auto", 8, 32 * 576 * 2),
        ({"num_hidden_layers": "x"}, "auto", 1, None),
    ],
)
def test_a_tokens_bytes_are_those_of_the_checkpoint(
    tmp_path: Path, config: Any, dtype: str, tp: int, wanted: int | None
) -> None:
    assert token_bytes(checkpoint(tmp_path / "m", **config), dtype, tp) == wanted


@pytest.mark.parametrize(
    ("available_gb", "draft", "state"),
    [(25, False, "ok"), (25, True, "wrong"), (19, False, "wrong")],
)
def test_host_memory_is_that_of_all_ranks_and_the_draft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, available_gb: int, draft: bool, state: str
) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: available_gb * 10**9)
    arguments = [
        *START, "s3", "--tp", "2", "--hicache-size", "10", "--model-path",
        checkpoint(tmp_path / "target"),
    ]  # fmt: skip
    if draft:
        path = checkpoint(tmp_path / "draft", num_hidden_layers=16)
        arguments += ["--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", path]
    found = checks(*arguments)["host memory"]
    assert found[0] == state
    assert ("for the draft" in found[1]) is draft


@pytest.mark.parametrize(
    ("backend", "config", "state", "said"),
    [
        ("s3", '{"bukcet": "b"}', "wrong", "did you mean 'bucket'"),
        ("s3", '{"bucket": "b", "revision": "1"}', "ok", "backend s3"),
        ("hicache_storage", '{"url": "lmdb:///x", "revision": "1"}', "ok", "backend lmdb"),
        (
            "dynamic",
            '{"module_path": "hicache_storage.adapters.sglang", "class_name": "HiCacheS3", '
            '"backend_name": "x", "bucket": "b", "revision": "1"}',
            "ok",
            "backend s3",
        ),
    ],
)
def test_the_extra_config_is_judged_as_the_server_would(
    backend: str, config: str, state: str, said: str
) -> None:
    found = checks(*START, backend, "--hicache-storage-backend-extra-config", config)
    assert found["extra config"][0] == state
    assert said in found["extra config"][1]


@pytest.mark.parametrize("backend", ["file", "mooncake"])
def test_sglangs_own_backends_are_said_to_be(backend: str) -> None:
    assert checks(*START, backend)["backend"][0] == "note"


def test_weights_known_by_name_alone_are_a_note() -> None:
    config = '{"url": "file:///x"}'
    found = checks(*START, "hicache_storage", "--hicache-storage-backend-extra-config", config)
    assert found["extra config"][0] == "note"


def test_a_config_file_is_read_as_sglang_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "kv.json"
    path.write_text('{"url": "file:///x", "prefetch_threshold": 7}')
    launch = read_launch(["--hicache-storage-backend-extra-config", f"@{path}"])
    assert launch.threshold_tokens == 7
    (tmp_path / "kv.ini").write_text("")
    for name in ("absent.json", "kv.ini"):
        with pytest.raises(ConfigError):
            read_launch(["--hicache-storage-backend-extra-config", f"@{tmp_path / name}"])


def test_a_config_that_cant_be_read_shows_no_secret() -> None:
    with pytest.raises(ConfigError) as raised:
        read_launch(["--hicache-storage-backend-extra-config", '{"secret_key": "hunter2"'])
    assert "hunter2" not in repr(raised.value)
