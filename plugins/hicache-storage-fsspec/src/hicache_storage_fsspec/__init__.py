"""fsspec:// - KV-cache pages in any file system that fsspec knows."""

from .backend import FsspecBackend
from .config import FsspecConfig

__all__ = ["FsspecBackend", "FsspecConfig"]
