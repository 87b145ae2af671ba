"""Options of file://."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ...config import option
from ...errors import ConfigError

Durability = Literal["none", "fsync"]


@dataclass(frozen=True)
class FileConfig:
    """Options of file://."""

    path: str = option(url="location", doc="Directory that holds the pages; made if missing.")
    capacity: int | None = option(
        None,
        unit="bytes",
        doc="Most bytes of pages to hold; the least recently used go first. None: no limit.",
    )
    low_watermark: float = option(
        0.9, doc="Share of the capacity down to which a full store is evicted, above 0, at most 1."
    )
    min_free: int = option(
        1 << 30, unit="bytes", doc="Bytes of the file system that stay free; pages are evicted."
    )
    durability: Durability = option(
        "none",
        doc="none: a crash of the process loses nothing, a power cut may lose the newest pages. "
        "fsync: pages are on the disk before they count as stored.",
    )
    read_only: bool = option(False, doc="Never write; every set answers False.")
    io_threads: int | None = option(
        None,
        doc="Threads that serve one batch, the caller's among them; more help on cold disks. "
        "None: 1 to write pages below 64 KiB and to read those below 256 KiB, else 2, or 4 from "
        "8 cores on.",
    )
    recency_s: float = option(
        60.0, unit="seconds", doc="How stale a page's recorded last use may be; 0: exact."
    )
    temp_age_s: float = option(
        60.0, unit="seconds", doc="Age from which a dead writer's temporary file is removed."
    )
    resync_s: float = option(
        600.0, unit="seconds", doc="How often the bytes in use are counted anew, with a capacity."
    )
    network_eviction: bool = option(
        False,
        doc="Evict on a network file system too: safe only if one host alone writes to it.",
    )

    def __post_init__(self) -> None:
        if not self.path:
            raise ConfigError("backend 'file' needs a path: file:///var/cache/kv")
        if self.capacity is not None and self.capacity < 1:
            raise ConfigError(f"backend 'file': capacity must be above 0, got {self.capacity}")
        if not 0 < self.low_watermark <= 1:
            raise ConfigError(
                f"backend 'file': low_watermark must be above 0 and at most 1, "
                f"got {self.low_watermark}"
            )
        for name in ("min_free", "recency_s", "temp_age_s"):
            if getattr(self, name) < 0:
                raise ConfigError(
                    f"backend 'file': {name} must not be negative, got {getattr(self, name)}"
                )
        if self.io_threads is not None and not 1 <= self.io_threads <= 32:
            raise ConfigError(f"backend 'file': io_threads must be 1 to 32, got {self.io_threads}")
        if self.resync_s <= 0:
            raise ConfigError(f"backend 'file': resync_s must be above 0, got {self.resync_s}")
