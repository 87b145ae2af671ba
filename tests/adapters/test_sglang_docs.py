"""The how-to for SGLang: its options are the code's, and each extra config in it is accepted."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest

from hicache_storage.adapters import sglang, sglang_plugin
from hicache_storage.adapters.sglang_options import SGLANGS_OWN, AdapterConfig, read_options
from hicache_storage.cli.sglang_command import read_launch
from hicache_storage.discovery import PLUGINS, find_backends
from hicache_storage.opening import build_from

TEXT = (Path(__file__).parents[2] / "docs" / "sglang.md").read_text()
ROW = re.compile(r"^\| .* \| `(\w+)` \| `(\{.*\})` \|$", re.MULTILINE)


def section(title: str) -> str:
    return TEXT.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def test_the_options_are_those_of_the_code_with_their_defaults() -> None:
    shown = dict(re.findall(r"^\| `(\w+)`[^|]*\| (.+?) \|", section("Options"), re.MULTILINE))
    fields = {field.name: field.default for field in dataclasses.fields(AdapterConfig)}
    assert set(shown) == {*fields, "url", "retry"}
    assert shown["pairing"] == f"`{fields['pairing']}`"


@pytest.mark.parametrize(("name", "config"), ROW.findall(section("Each backend")))
def test_each_backends_extra_config_is_accepted(name: str, config: str) -> None:
    if name not in find_backends() and name in PLUGINS:
        pytest.skip(f"needs {PLUGINS[name]}")
    assert name in sglang_plugin.names()
    backend = "" if name == sglang_plugin.ANY_NAME else name
    options = read_options(backend, config)
    _, built = build_from(options.url, **options.overrides)
    assert built == options.backend


def test_the_examples_cover_the_backends_with_their_classes() -> None:
    rows = {name for name, _ in ROW.findall(section("Each backend"))}
    assert {"s3", "lmdb", "redis", "tier", "hicache_storage"} <= rows
    named = set(re.findall(r"`(HiCache\w+)`", section("Which calls are used")))
    backends = ("s3", "lmdb", "redis", "tier", "file")
    assert named == {*map(sglang.class_name, backends), "HiCacheStore"}


def test_the_command_at_the_top_is_whole() -> None:
    command = TEXT.partition("sglang.launch_server")[2].partition("```")[0]
    words = [
        word.strip("'") for word in re.findall(r"'[^']*'|[^\s\\]+", command.replace("\\\n", " "))
    ]
    launch = read_launch(words)
    assert launch.hierarchical
    assert launch.backend == "s3"
    assert read_options("s3", dict(launch.extra_config)).adapter.revision


def test_the_dynamic_route_is_whole() -> None:
    (found,) = re.findall(r"```json\n(.*?)\n```", section("Which calls are used"), re.DOTALL)
    config = json.loads(found)
    assert config["module_path"] == sglang.__name__
    assert config["class_name"] == sglang.class_name("s3")
    assert {"backend_name", "module_path", "class_name", "interface_v1"} <= SGLANGS_OWN
    assert read_options("s3", config).backend == "s3"
