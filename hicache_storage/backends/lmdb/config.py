"""Options of lmdb://."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from ...config import option
from ...errors import ConfigError

Durability = Literal["ordered", "sync", "async"]

MOST_MAP_BYTES = 1 << 46
"""64 TiB: half of what a process can address on x86-64."""
LEAST_MAP_BYTES = 1 << 20


@dataclass(frozen=True)
class LmdbConfig:
    """Options of lmdb://."""

    path: str = option(url="location", doc="Directory of the LMDB files; made if missing.")
    capacity: int | None = option(
        None,
        unit="bytes",
        doc="Most bytes of pages to hold; the least recently used go first. None: no limit.",
    )
    durability: Durability = option(
        "ordered",
        doc="ordered: each commit reaches the disk, a power cut undoes the last one at most. "
        "sync: a page answered True survives a power cut. "
        "async: nothing waits for the disk; after a power cut the file is checked before use "
        "and given up if it is damaged.",
    )
    map_size: int = option(
        1 << 30, unit="bytes", doc="Address space to begin with; it grows by itself, never shrinks."
    )
    max_size: int = option(
        MOST_MAP_BYTES,
        unit="bytes",
        doc="Most bytes that the file may grow to, free room in it included; full beyond.",
    )
    max_readers: int = option(
        2048, doc="Reads under way at once, all processes together; the first process decides."
    )
    recency_s: float = option(
        60.0,
        unit="seconds",
        doc="With a capacity: how stale a page's recorded last use may be; 0: every read counts.",
    )
    read_only: bool = option(False, doc="Never write; every set answers False.")
    allow_network: bool = option(
        False,
        doc="Open on a network file system. Safe only if one host uses it and it keeps the order "
        "of writes; LMDB gives no guarantee there.",
    )

    def __post_init__(self) -> None:
        if not self.path:
            raise ConfigError("backend 'lmdb' needs a path: lmdb:///var/cache/kv")
        if self.capacity is not None and self.capacity < 1:
            raise ConfigError(f"backend 'lmdb': capacity must be above 0, got {self.capacity}")
        if not LEAST_MAP_BYTES <= self.map_size <= self.max_size <= MOST_MAP_BYTES:
            raise ConfigError(
                f"backend 'lmdb': expected {LEAST_MAP_BYTES} <= map_size <= max_size <= "
                f"{MOST_MAP_BYTES}, got map_size={self.map_size}, max_size={self.max_size}"
            )
        if not 1 <= self.max_readers <= 1 << 16:
            raise ConfigError(
                f"backend 'lmdb': max_readers must be 1 to 65536, got {self.max_readers}"
            )
        if self.recency_s < 0:
            raise ConfigError(
                f"backend 'lmdb': recency_s must not be negative, got {self.recency_s}"
            )

    @property
    def flags(self) -> dict[str, Any]:
        """How `durability` is said to LMDB. A writable map is never used: on a full disk it
        kills the process, and without sync it loses the order of writes."""
        return {
            "sync": self.durability != "async",
            "metasync": self.durability == "sync",
            "writemap": False,
            "map_async": False,
        }

    def conflicts(self, other: LmdbConfig) -> list[str]:
        """The options in which two stores on one environment of one process differ and may not,
        as "name: ours, theirs"."""
        return [
            f"{name}: {getattr(self, name)!r}, {getattr(other, name)!r}"
            for name in ("durability", "max_size", "read_only")
            if getattr(self, name) != getattr(other, name)
        ]
