"""Storage for KV-cache pages of LLM servers, target and draft in pairs."""

from .errors import (
    BackendError,
    BackendTimeout,
    BackendUnavailable,
    CapacityExceeded,
    ConfigError,
    ContractViolation,
    CorruptPage,
    HiCacheStorageError,
    InvalidKey,
    PageSizeMismatch,
    StoreClosed,
    UnknownBackendError,
)
from .hookspecs import StoredPage, Usage, hookimpl
from .namespace import Namespace
from .opening import open_store
from .page import PageSpans
from .pairing import PairedStore
from .store import Store

__all__ = [
    "BackendError",
    "BackendTimeout",
    "BackendUnavailable",
    "CapacityExceeded",
    "ConfigError",
    "ContractViolation",
    "CorruptPage",
    "HiCacheStorageError",
    "InvalidKey",
    "Namespace",
    "PageSizeMismatch",
    "PageSpans",
    "PairedStore",
    "Store",
    "StoreClosed",
    "StoredPage",
    "Usage",
    "UnknownBackendError",
    "hookimpl",
    "open_store",
]
__version__ = "0.1.0"
