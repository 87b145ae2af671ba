"""The cache hierarchy as a library: device, host and storage, target and draft in pairs."""

from .controller import HiCache
from .lease import Lease
from .stats import HiCacheStats

__all__ = ["HiCache", "HiCacheStats", "Lease"]
