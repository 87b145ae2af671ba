"""lmdb://: pages in one LMDB file, shared by all processes of a host. Needs the extra `lmdb`."""

from .backend import LmdbBackend
from .config import LmdbConfig
from .inspection import Compacted, EnvironmentReport, compact, inspect

__all__ = ["Compacted", "EnvironmentReport", "LmdbBackend", "LmdbConfig", "compact", "inspect"]
