"""Options of s3://."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

from ...config import option
from ...errors import ConfigError

Addressing = Literal["auto", "path", "virtual"]
Checksums = Literal["auto", "when_required", "when_supported"]

OBJECT_NAME_BYTES = 1024
"""Longest object name in S3, in bytes of UTF-8."""
OWN_NAME_BYTES = 4 + 194
"""What this backend puts after the prefix: "hh/" and a stored key, and the slash before."""


@dataclass(frozen=True)
class S3Config:
    """Options of s3://bucket/prefix?endpoint=...&region=..."""

    bucket: str = option(url="host", doc="Bucket name, or an access point's ARN.")
    prefix: str = option("", url="path", doc="Folder in the bucket; nothing outside is touched.")
    endpoint: str | None = option(
        None, doc="URL of the store, http:// or https://; AWS or what its variables say if unset."
    )
    region: str | None = option(None, doc="Region to sign for; the usual AWS settings if unset.")
    profile: str | None = option(None, doc="Profile of the AWS configuration files.")
    access_key: str | None = option(None, doc="Access key; the usual AWS chain if unset.")
    secret_key: str | None = option(None, secret=True, doc="Secret of `access_key`.")
    session_token: str | None = option(None, secret=True, doc="Token of temporary keys.")
    anonymous: bool = option(False, doc="Send requests without a signature.")
    addressing: Addressing = option(
        "auto",
        doc="Where the bucket's name stands: in the host (virtual) or in the path. auto: host on "
        "AWS, path elsewhere.",
    )
    concurrency: int = option(32, unit="requests", doc="Most requests and connections at a time.")
    deadline_s: float = option(
        15.0, unit="s", doc="Longest time a call may take, its waiting and retries included."
    )
    connect_timeout_s: float = option(
        2.0, unit="s", doc="Longest time to connect; also what an unreachable store costs a call."
    )
    stall_timeout_s: float = option(
        5.0, unit="s", doc="Silence after which a request is tried again on another connection."
    )
    attempts: int = option(8, unit="tries", doc="Most tries of one request.")
    hedge_after_s: float | None = option(
        None, unit="s", doc="Wait for a read's answer before it is asked for a second time; off."
    )
    conditional_writes: bool = option(
        False, doc="Leave a page alone that is stored already with the same header."
    )
    sign_payload: bool = option(False, doc="Sign the pages too; costs a SHA-256 of every byte.")
    checksums: Checksums = option(
        "auto",
        doc="Whether writes carry a CRC-32 for the store to check. auto: the usual AWS settings, "
        "else when_supported on AWS and when_required (none) on other stores.",
    )
    verify_tls: bool = option(True, doc="Verify the store's certificate.")
    ca_file: str | None = option(None, doc="PEM file of the CAs to trust; the system's if unset.")
    create_bucket: bool = option(False, doc="Create the bucket if it doesn't exist.")

    def __post_init__(self) -> None:
        if not self.bucket or "/" in self.bucket.partition("arn:")[0]:
            raise ConfigError(
                f"backend 's3': expected a bucket, s3://BUCKET/PREFIX, got {self.bucket!r}"
            )
        prefix = self.prefix.strip("/")
        object.__setattr__(self, "prefix", prefix)
        _check_prefix(prefix)
        if self.endpoint is not None:
            _check_endpoint(self.endpoint)
        if (self.access_key is None) != (self.secret_key is None):
            raise ConfigError("backend 's3': access_key and secret_key go together, give both")
        for name in ("deadline_s", "connect_timeout_s", "stall_timeout_s", "hedge_after_s"):
            seconds = getattr(self, name)
            if seconds is not None and not 0 < seconds < 86400:
                raise ConfigError(
                    f"backend 's3': {name} must be above 0 and below 86400 seconds, got {seconds}"
                )
        for name, most in (("concurrency", 1024), ("attempts", 100)):
            if not 1 <= getattr(self, name) <= most:
                raise ConfigError(
                    f"backend 's3': {name} must be from 1 to {most}, got {getattr(self, name)}"
                )


def _check_prefix(prefix: str) -> None:
    if any(part in ("", ".", "..") for part in prefix.split("/")) and prefix:
        raise ConfigError(
            f"backend 's3': prefix {prefix!r} has an empty, '.' or '..' part; many stores change "
            "or refuse such names"
        )
    if re.search(r"[\x00-\x1f\x7f\\]", prefix):
        raise ConfigError(f"backend 's3': prefix {prefix!r} has control characters or backslashes")
    longest = OBJECT_NAME_BYTES - OWN_NAME_BYTES
    if (found := len(prefix.encode())) > longest:
        raise ConfigError(
            f"backend 's3': prefix has {found} bytes, at most {longest} leave room for a page's "
            f"name within S3's {OBJECT_NAME_BYTES}; shorten it"
        )


def _check_endpoint(endpoint: str) -> None:
    parts = urlsplit(endpoint)
    try:
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        good = False
    if not good or parts.query or parts.fragment:
        raise ConfigError(
            f"backend 's3': endpoint must look like https://host:port, got "
            f"{endpoint.rpartition('@')[2]!r}"
        )
    if parts.username or parts.password:
        raise ConfigError(
            "backend 's3': endpoint has a user or password in it; use access_key and secret_key"
        )
