"""Options of redis://."""

from __future__ import annotations

from dataclasses import dataclass

from hicache_storage.config import option


@dataclass(frozen=True)
class RedisConfig:
    """Options of redis://HOST:PORT."""

    address: str = option(
        "localhost:6379", url="host", doc="Server, as HOST:PORT; of a cluster, any node."
    )
    prefix: str = option(
        "hicache", url="path", doc="What names of pages begin with; no braces or globs."
    )
    username: str | None = option(None, doc="User of an access list; None for the default user.")
    password: str | None = option(None, secret=True, doc="Password of the user.")
    db: int = option(0, doc="Database number; a cluster has only 0.")
    cluster: bool = option(False, doc="The server is a cluster: pages spread over its nodes.")
    tls: bool = option(False, doc="Encrypt the connection and verify the server's certificate.")
    ca_file: str | None = option(
        None, doc="Certificate authorities to trust instead of the system's."
    )
    ttl_s: int | None = option(
        None, unit="s", doc="How long a page lives after it was written or read; None for ever."
    )
    timeout_s: float = option(2.0, unit="s", doc="Longest wait for one answer of the server.")
    connect_timeout_s: float = option(1.0, unit="s", doc="Longest wait for a connection.")
    connections: int = option(16, doc="Connections at most, for each server.")
    pipeline: int = option(
        16 << 20, unit="bytes", doc="Most bytes of pages sent or received in one pipeline."
    )
