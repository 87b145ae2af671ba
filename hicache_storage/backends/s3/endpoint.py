"""Where objects of a bucket are asked for."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

_DEFAULT_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True)
class Endpoint:
    """The host that serves a bucket, and the path in front of its object names."""

    scheme: str
    host: str
    port: int
    path: str
    """Quoted, with a slash at both ends: "/" or "/bucket/"."""
    region: str

    @property
    def host_header(self) -> str:
        """As the Host header gives it: the port only where it isn't the usual one."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _DEFAULT_PORTS[self.scheme] else f"{host}:{self.port}"

    @property
    def shown(self) -> str:
        """For messages."""
        return f"{self.scheme}://{self.host_header}{self.path.rstrip('/')}"


def endpoint_of(object_url: str, object_name: str, region: str) -> Endpoint:
    """The endpoint behind the URL of one object, as the SDK resolves it."""
    parts = urlsplit(object_url)
    if not parts.hostname or not parts.path.endswith(f"/{object_name}"):
        raise ValueError(f"not the URL of an object {object_name!r}: {object_url!r}")
    return Endpoint(
        parts.scheme,
        parts.hostname,
        parts.port or _DEFAULT_PORTS[parts.scheme],
        parts.path[: -len(object_name)],
        region,
    )
