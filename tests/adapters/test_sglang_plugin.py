"""The plugin with doubles of SGLang's modules: each step stands alone, and none raises."""

from __future__ import annotations

import argparse
import logging
import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from adapters.fake_sglang import MhaHostPool, SlotsOnlyPool, StorageConfig, storage_class

from hicache_storage.adapters import sglang, sglang_plugin
from hicache_storage.adapters.sglang_plugin import ARGUMENTS, CONTROLLER, FACTORY, FLAG


class Hooks:
    """SGLang's registry of hooks, as far as it matters here."""

    hooks: list[tuple[str, Any, str]]
    applied: int

    @classmethod
    def register(cls, target: str, hook: Any, kind: str) -> None:
        cls.hooks.append((target, hook, kind))

    @classmethod
    def apply_hooks(cls) -> None:
        cls.applied += 1


class Factory:
    _registry: dict[str, Any]

    @classmethod
    def register_backend(cls, name: str, module: str, class_name: str) -> None:
        cls._registry[name] = (module, class_name)

    @classmethod
    def _create_builtin_backend(cls, *args: Any) -> str:
        return "SGLang's own"


class Controller:
    def attach_storage_backend(self) -> None: ...
    def set_draft_kv_pool(self) -> None: ...
    def _page_get_zero_copy(self) -> None: ...
    def _page_set_zero_copy(self) -> None: ...


class Arguments:
    @staticmethod
    def add_cli_args(parser: Any) -> None: ...


@pytest.fixture(autouse=True)
def modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    """SGLang's modules; the plugin as in a new process."""
    Hooks.hooks, Hooks.applied = [], 0
    Factory._registry = {"file": ("sglang.own", "HiCacheFile")}
    found: dict[str, ModuleType] = {}
    contents = {
        ARGUMENTS: {"ServerArgs": Arguments},
        FACTORY: {"StorageBackendFactory": Factory},
        CONTROLLER: {"HiCacheController": Controller},
        "sglang.srt.plugins.hook_registry": {
            "HookRegistry": Hooks,
            "HookType": {"AFTER": "after", "AROUND": "around"},
        },
    }
    for name, content in contents.items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            path = ".".join(parts[:end])
            if path not in found:
                found[path] = ModuleType(path)
                found[path].__path__ = []
                monkeypatch.setitem(sys.modules, path, found[path])
                if end > 1:
                    setattr(found[".".join(parts[: end - 1])], parts[end - 1], found[path])
        vars(found[name]).update(content)
    monkeypatch.setattr(sglang_plugin, "_done", set())
    meta_path = list(sys.meta_path)
    yield found
    sys.meta_path[:] = meta_path


def parser_with(choices: Any) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("--other", choices=["file"])
    parser.add_argument(FLAG, choices=choices)
    return parser


def test_each_step_is_done_once_however_often_it_is_asked_for() -> None:
    for _ in range(3):
        sglang_plugin.register()
    targets = [target.rpartition(".")[2] for target, _, _ in Hooks.hooks]
    assert targets == [
        "add_cli_args", "_create_builtin_backend", "attach_storage_backend", "set_draft_kv_pool",
    ]  # fmt: skip
    assert sglang_plugin.tells_of_drafts()
    assert Factory._registry["file"] == ("sglang.own", "HiCacheFile")
    assert Factory._registry["s3"] == ("hicache_storage.adapters.sglang", "HiCacheS3")
    assert Factory._registry["hicache_storage"][1] == "HiCacheStore"


def test_the_flag_takes_new_names_in_addition(caplog: pytest.LogCaptureFixture) -> None:
    parser = parser_with(["file", "dynamic"])
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            sglang_plugin.widen(None, parser)
    assert parser.parse_args([FLAG, "s3"]) is not None
    choices = parser._actions[2].choices
    assert choices is not None
    assert list(choices)[:2] == ["file", "dynamic"]
    assert len(set(choices)) == len(list(choices))
    assert list(parser._actions[1].choices or ()) == ["file"]
    assert caplog.text.count("also takes") == 1


def test_a_flag_that_takes_anything_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    parser = parser_with(None)
    sglang_plugin.widen(None, parser=parser)
    assert parser.parse_args([FLAG, "anything"]) is not None
    assert caplog.text == ""


def test_the_factory_makes_ours_and_leaves_its_own_to_sglang(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cls = storage_class()
    config = StorageConfig(extra_config={"model": "m"})
    made = sglang_plugin.make(Factory._create_builtin_backend, Factory, "x", cls, config, "pool")
    assert isinstance(made, cls)
    made.close()
    keywords = {"backend_class": cls, "storage_config": config, "mem_pool_host": None}
    sglang_plugin.make(Factory._create_builtin_backend, Factory, "x", **keywords).close()
    other = sglang_plugin.make(Factory._create_builtin_backend, "file", dict, config, "pool")
    assert other == "SGLang's own"


@pytest.mark.parametrize(
    ("gone", "said"),
    [
        (f"{ARGUMENTS}.ServerArgs", "takes SGLang's own names alone; use 'dynamic'"),
        (f"{FACTORY}.StorageBackendFactory", "can't make these backends by name; use 'dynamic'"),
        (f"{CONTROLLER}.HiCacheController", "'interface_v1': 1 avoids it"),
    ],
)
def test_a_release_that_has_changed_is_told_of_with_what_to_do(
    modules: dict[str, ModuleType], caplog: pytest.LogCaptureFixture, gone: str, said: str
) -> None:
    module, _, name = gone.rpartition(".")
    delattr(modules[module], name)
    with caplog.at_level(logging.WARNING):
        sglang_plugin.register()
    assert said in caplog.text
    assert len(caplog.records) == 1
    assert len(Hooks.hooks) >= 2


def test_a_parser_without_the_flag_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        sglang_plugin.widen(None, argparse.ArgumentParser())
    assert "there is no flag" in caplog.text


def test_a_factory_called_in_another_way_is_left_to_fail_by_itself() -> None:
    assert sglang_plugin.make(lambda *_, **__: "theirs", "s3") == "theirs"


def controller_with(backend: Any, **values: Any) -> Any:
    controller = Controller()
    vars(controller).update(storage_backend=backend, page_get_func="flat", **values)
    return controller


def test_only_backends_of_this_package_get_the_calls_in_place() -> None:
    ours = storage_class()(StorageConfig(extra_config={"model": "m"}))
    for backend, changed in (
        (ours, True),
        (SimpleNamespace(_backend=ours), True),
        (SimpleNamespace(), False),
        (None, False),
    ):
        controller = controller_with(backend)
        sglang_plugin.attached(None, controller, storage_backend="x")
        assert (controller.page_get_func != "flat") is changed
    ours.close()


def test_a_draft_pool_is_passed_on_whether_it_comes_before_or_after_the_storage() -> None:
    target, draft = MhaHostPool(), MhaHostPool(layers=1)
    for event in (sglang_plugin.attached, sglang_plugin.told_of_draft):
        ours = storage_class()(StorageConfig(extra_config={"model": "m"}))
        ours.register_mem_pool_host(target)
        event(None, controller_with(ours, mem_pool_host_draft=draft))
        assert ours.server.get("draft").pages.pool is draft
        assert ours.server.pairing == "required"
        ours.close()


@pytest.mark.parametrize("names", sglang_plugin.DRAFT_CALLS)
def test_draft_pages_are_read_and_written_in_place(names: tuple[str, str]) -> None:
    ours = storage_class()(StorageConfig(extra_config={"model": "m"}))
    ours.register_mem_pool_host(MhaHostPool())
    other = dict.fromkeys(names, "flat")
    controller = controller_with(ours, mem_pool_host_draft=MhaHostPool(layers=1), **other)
    sglang_plugin.told_of_draft(None, controller)
    assert [getattr(controller, name) for name in names] == [ours.read_drafts, ours.write_drafts]
    ours.close()


def test_a_detached_backend_gets_no_draft_pages_any_more() -> None:
    class Old(Controller):
        def _draft_page_get(self) -> None: ...
        def _draft_page_set(self) -> None: ...

    ours = storage_class()(StorageConfig(extra_config={"model": "m"}))
    ours.register_mem_pool_host(MhaHostPool())
    controller = Old()
    vars(controller).update(storage_backend=ours, mem_pool_host_draft=MhaHostPool(layers=1))
    sglang_plugin.attached(None, controller)
    assert controller._draft_page_get == ours.read_drafts
    vars(controller)["storage_backend"] = SimpleNamespace()
    sglang_plugin.attached(None, controller)
    assert controller._draft_page_get == Old._draft_page_get.__get__(controller)
    ours.close()


def test_a_draft_pool_that_cant_be_stored_keeps_sglangs_own_calls() -> None:
    ours = storage_class()(StorageConfig(extra_config={"model": "m"}))
    ours.register_mem_pool_host(MhaHostPool())
    names = {"mem_pool_host_draft": SlotsOnlyPool(), "draft_page_get_func": "flat"}
    controller = controller_with(ours, **names)
    sglang_plugin.told_of_draft(None, controller)
    assert controller.draft_page_get_func == "flat"
    ours.close()


def test_a_controller_without_the_calls_in_place_is_told_of(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(Controller, "_page_get_zero_copy")
    ours = storage_class()(StorageConfig(extra_config={"model": "m"}))
    with caplog.at_level(logging.WARNING):
        sglang_plugin.attached(None, controller_with(ours))
    assert "'interface_v1': 1" in caplog.text
    ours.close()


def test_classes_have_names_that_users_can_read() -> None:
    assert [sglang.class_name(name) for name in ("s3", "lmdb", "redis", "file", "my-own")] == [
        "HiCacheS3", "HiCacheLmdb", "HiCacheRedis", "HiCacheFiles", "HiCacheMyOwn",
    ]  # fmt: skip
    with pytest.raises(AttributeError, match="HiCacheNobodys"):
        sglang.HiCacheNobodys  # noqa: B018


@pytest.mark.parametrize("module", ["sglang_plugin", "sglang_options", "sglang_keys"])
def test_the_plugin_itself_needs_neither_torch_nor_sglang_nor_a_client_library(module: str) -> None:
    heavy = ("torch", "numpy", "sglang", "boto3", "lmdb")
    code = (
        f"import sys; from hicache_storage.adapters import {module} as m; "
        f"getattr(m, 'register', lambda: None)(); "
        f"print(*(name for name in {heavy!r} if name in sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split() == []
