"""One client of a server or a cluster, with bounded waits and connections."""

from __future__ import annotations

from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.cluster import RedisCluster
from redis.retry import Retry

from hicache_storage import ConfigError

from .config import RedisConfig


def connect(config: RedisConfig) -> Any:
    """A client, thread-safe, that connects when it is first used (a cluster at once).

    It repeats nothing by itself but one try on a connection that turns out to be dead: retries
    are middleware, which knows the deadline.
    """
    host, _, port = config.address.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(f"redis: address must be HOST:PORT, got {config.address!r}")
    if config.cluster and config.db:
        raise ConfigError(f"redis: a cluster has only database 0, got db={config.db}")
    options: dict[str, Any] = {
        "host": host.strip("[]"),
        "port": int(port),
        "username": config.username,
        "password": config.password,
        "socket_timeout": config.timeout_s,
        "socket_connect_timeout": config.connect_timeout_s,
        "max_connections": config.connections,
        "ssl": config.tls,
        "protocol": 2,
    }
    if config.tls and config.ca_file:
        options["ssl_ca_certs"] = config.ca_file
    if config.cluster:
        return RedisCluster(**options, retry=Retry(NoBackoff(), 1))
    pool = redis.BlockingConnectionPool(  # type: ignore[no-untyped-call]
        **{name: value for name, value in options.items() if name != "ssl"},
        db=config.db,
        timeout=config.timeout_s,
        retry=Retry(NoBackoff(), 1),
        connection_class=redis.SSLConnection if config.tls else redis.Connection,
    )
    return redis.Redis(connection_pool=pool)
