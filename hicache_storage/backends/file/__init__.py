"""file://: pages as files in a directory."""

from .backend import FileBackend
from .config import FileConfig

__all__ = ["FileBackend", "FileConfig"]
