"""SGLang's storage backends by class name: `HiCacheS3`, `HiCacheLmdb`, ..., and `HiCacheStore`.

SGLang names a backend by module and class. Each class of this module is made when it is first
asked for: SGLang's own base class joined with `SGLangStorage`, for one backend of this package.
`HiCacheStore` takes any backend: its extra config has a 'url'.

    --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{
        "backend_name": "s3", "module_path": "hicache_storage.adapters.sglang",
        "class_name": "HiCacheS3", "interface_v1": 1, "bucket": "kv"}'

With the plugin (`sglang_plugin`), the backend's name is enough: `--hicache-storage-backend s3`.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

from ..discovery import find_backends
from ..errors import ConfigError
from .sglang_names import ANY_BACKEND, class_name
from .sglang_options import read_options
from .sglang_plugin import tells_of_drafts
from .sglang_storage import SGLangStorage

_lock = threading.RLock()
_classes: dict[str, type[Any]] = {}


def backend_class(backend: str) -> type[Any]:
    """SGLang's storage backend for one backend of this package, or for any of them ("").

    Raises ConfigError if SGLang's base class asks for what this release doesn't have.
    """
    with _lock:
        if backend not in _classes:
            _classes[backend] = _class_for_any() if not backend else _class_for(backend)
        return _classes[backend]


def _class_for(backend: str) -> type[Any]:
    parent = backend_class("")
    body = {"backend_name": backend, "__module__": __name__}
    metaclass: Any = type(parent)
    found: type[Any] = metaclass(class_name(backend), (parent,), body)
    return found


def _class_for_any() -> type[Any]:
    from sglang.srt.mem_cache import hicache_storage as base
    from sglang.version import __version__ as release

    def choose(cls: type[Any], storage_config: Any, kwargs: Any = None) -> Any:
        """An instance of the backend's own class, so that SGLang shows its name."""
        if cls.backend_name:
            return object.__new__(cls)
        backend = read_options("", getattr(storage_config, "extra_config", None)).backend
        return object.__new__(backend_class(backend))

    return bind(base, release, {"__new__": choose})


def bind(base: Any, release: str, body: dict[str, Any]) -> type[Any]:
    """`SGLangStorage` joined with the base class in SGLang's module `base`."""
    fields = {
        **body,
        "__module__": __name__,
        "release": release,
        "lookup_result": base.PoolTransferResult,
        "target_pool": base.PoolName.KV,
        "drafts_untold": classmethod(lambda cls: _drafts_untold()),
    }
    metaclass: Any = type(base.HiCacheStorage)
    found: type[Any] = metaclass(ANY_BACKEND, (SGLangStorage, base.HiCacheStorage), fields)
    missing = sorted(getattr(found, "__abstractmethods__", ()))
    if missing:
        raise ConfigError(
            f"SGLang {release} asks a storage backend for {', '.join(missing)}, which this release "
            "of hicache-storage doesn't have: it is newer than tested; upgrade hicache-storage"
        )
    return found


def _drafts_untold() -> bool:
    controller = getattr(
        sys.modules.get("sglang.srt.managers.cache_controller"), "HiCacheController", None
    )
    return hasattr(controller, "set_draft_kv_pool") and not tells_of_drafts()


def __getattr__(name: str) -> Any:
    if name == ANY_BACKEND:
        return backend_class("")
    if name.startswith("HiCache"):
        for backend in find_backends():
            if class_name(backend) == name:
                return backend_class(backend)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
