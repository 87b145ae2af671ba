"""SGLang's plugin: `--hicache-storage-backend` takes every backend of this package by name.

SGLang loads it from the entry-point group `sglang.srt.plugins` in each of its processes: before it
reads the command line, and in each scheduler before it builds the cache. It adds

- to the flag's choices and to SGLang's registry: every backend found whose name SGLang doesn't
  have, and `hicache_storage`, which takes a 'url' and so any backend;
- the making of those backends, since SGLang's factory makes only those that it knows itself;
- the calls that read and write the host pool in place, which SGLang gives to names that it knows;
- the draft's host pool, which some releases don't tell a backend of, and its pages in place.

It imports nothing of SGLang's that isn't imported without it: what belongs to a module is done
when SGLang imports that module. Each step stands alone; where a release has changed, the log says
what doesn't work there and what to use instead.
"""

from __future__ import annotations

import logging
import pkgutil
import sys
from collections.abc import Callable
from typing import Any

from ..discovery import find_backends, offers_one_backend
from .sglang_names import ANY_BACKEND, ANY_NAME, MODULE, class_name
from .when_imported import when_imported

FLAG = "--hicache-storage-backend"
ARGUMENTS = "sglang.srt.server_args"
FACTORY = "sglang.srt.mem_cache.storage.backend_factory"
CONTROLLER = "sglang.srt.managers.cache_controller"
DRAFT_CALLS = (
    ("_draft_page_get", "_draft_page_set"),
    ("draft_page_get_func", "draft_page_set_func"),
)
"""What a controller calls for draft pages, with page hashes and host indices."""
_INSTEAD = {
    "choices": f"{FLAG} takes SGLang's own names alone; use 'dynamic' with module_path "
    f"{MODULE!r} and a class_name such as 'HiCacheS3' in the extra config",
    "factory": f"SGLang can't make these backends by name; use 'dynamic' with module_path "
    f"{MODULE!r} and a class_name such as 'HiCacheS3' in the extra config",
    "in place": "pages are copied on their way; with 'dynamic', 'interface_v1': 1 avoids it",
    "drafts": "draft pages are known once the first one is written: see the option 'pairing'",
}

logger = logging.getLogger("hicache_storage")
_done: set[str] = set()


def register() -> None:
    """Does all of it, once a process. Never raises."""
    if "register" in _done:
        return
    _done.add("register")
    when_imported(ARGUMENTS, _hook_arguments)
    when_imported(FACTORY, _hook_factory)
    when_imported(CONTROLLER, _hook_controller)


def names() -> dict[str, str]:
    """The names that are offered, and the class that each stands for."""
    found = find_backends()
    usable = {name: class_name(name) for name, one in found.items() if offers_one_backend(one)}
    for name in found.keys() - usable.keys():
        logger.warning("hicache-storage: backend %r is not offered: its name is not usable", name)
    return {**usable, ANY_NAME: ANY_BACKEND}


def tells_of_drafts() -> bool:
    """Whether draft pools that SGLang keeps to itself are passed on to backends in this
    process."""
    return "drafts" in _done


def register_backends() -> None:
    """Adds the names to SGLang's registry and makes its factory make them."""
    factory = pkgutil.resolve_name(f"{FACTORY}:StorageBackendFactory")
    new = {name: cls for name, cls in names().items() if name not in factory._registry}
    for name, cls in new.items():
        factory.register_backend(name, MODULE, cls)
    _hook(f"{FACTORY}.StorageBackendFactory._create_builtin_backend", make, "AROUND")
    logger.info("hicache-storage: storage backends %s are known to SGLang", ", ".join(new))


def widen(result: Any, *args: Any, **kwargs: Any) -> None:
    """After ServerArgs.add_cli_args(parser): adds the names to the flag's choices."""

    def add() -> None:
        actions = [
            action
            for parser in (*args, *kwargs.values())
            for action in getattr(parser, "_actions", ())
            if FLAG in action.option_strings
        ]
        if not actions:
            raise LookupError(f"there is no flag {FLAG}")
        choices = actions[0].choices
        if choices is not None and (new := [name for name in names() if name not in choices]):
            actions[0].choices = [*choices, *new]
            logger.info("hicache-storage: %s also takes %s", FLAG, ", ".join(new))

    _step("choices", add)


def make(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Around StorageBackendFactory._create_builtin_backend: makes those of this package."""
    given = (*args, *kwargs.values())
    for cls in given:
        if isinstance(cls, type) and getattr(cls, "__module__", "") == MODULE:
            config = next(one for one in given if hasattr(one, "extra_config"))
            return cls(config, {})
    return original(*args, **kwargs)


def attached(result: Any, controller: Any, *args: Any, **kwargs: Any) -> None:
    """After HiCacheController.attach_storage_backend: gives a backend of this package the calls
    in place. Its threads run by now, and none has anything to do yet."""
    for name in DRAFT_CALLS[0]:  # of a backend that was detached
        vars(controller).pop(name, None)
    if _backend_of(controller) is None:
        return

    def choose() -> None:
        get, put = controller._page_get_zero_copy, controller._page_set_zero_copy
        controller.page_get_func, controller.page_set_func = get, put

    _step("in place", choose)
    told_of_draft(None, controller)


def told_of_draft(result: Any, controller: Any, *args: Any, **kwargs: Any) -> None:
    """After HiCacheController.set_draft_kv_pool: passes the draft's host pool on, and has its
    pages read and written in place too."""
    backend = _backend_of(controller)
    pool = getattr(controller, "mem_pool_host_draft", None)
    if backend is None or pool is None or not backend.register_draft_host_pool(pool):
        return
    # Up to 0.5.12 methods of the controller, from then on functions that it chooses.
    chosen = hasattr(controller, "draft_page_get_func")
    get, put = DRAFT_CALLS[1 if chosen else 0]
    if hasattr(controller, get) and hasattr(controller, put):
        setattr(controller, get, backend.read_drafts)
        setattr(controller, put, backend.write_drafts)


def _backend_of(controller: Any) -> Any:
    """The controller's storage backend if it is one of this package, else None."""
    ours = sys.modules.get("hicache_storage.adapters.sglang_storage")
    if ours is None:
        return None
    backend = getattr(controller, "storage_backend", None)
    backend = getattr(backend, "_backend", backend)  # SGLang's tests wrap one that fails at times
    return backend if isinstance(backend, ours.SGLangStorage) else None


def _hook_arguments() -> None:
    _step("choices", lambda: _hook(f"{ARGUMENTS}.ServerArgs.add_cli_args", widen))
    _step("choices", _apply)


def _hook_factory() -> None:
    _step("factory", register_backends)
    _step("factory", _apply)


def _hook_controller() -> None:
    attach = f"{CONTROLLER}.HiCacheController.attach_storage_backend"
    draft = f"{CONTROLLER}.HiCacheController.set_draft_kv_pool"
    _step("in place", lambda: _hook(attach, attached))
    controller = getattr(sys.modules[CONTROLLER], "HiCacheController", None)
    # Releases without this method register draft pools with the backend themselves.
    if hasattr(controller, "set_draft_kv_pool") and _step(
        "drafts", lambda: _hook(draft, told_of_draft)
    ):
        _done.add("drafts")
    _step("in place", _apply)


def _hook(target: str, hook: Callable[..., Any], kind: str = "AFTER") -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    pkgutil.resolve_name(target)  # fails here, where it is told, if this release has it no more
    HookRegistry.register(target, hook, HookType[kind])


def _apply() -> None:
    """Puts hooks in place that are registered after SGLang's own round."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    HookRegistry.apply_hooks()


def _step(name: str, step: Callable[[], Any]) -> bool:
    """Whether the step worked; if not, the log says what to do."""
    try:
        step()
    except Exception as error:
        logger.warning(
            "hicache-storage: this SGLang release is not as expected (%s: %s): %s",
            type(error).__name__,
            error,
            _INSTEAD[name],
        )
        return False
    return True
