"""redis:// - KV-cache pages in Redis or Valkey, alone or as a cluster."""

from .backend import RedisBackend
from .config import RedisConfig

__all__ = ["RedisBackend", "RedisConfig"]
