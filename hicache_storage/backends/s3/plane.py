"""The data plane of one process: everything that its calls share."""

from __future__ import annotations

import base64
import os
import ssl
import threading
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ...errors import ConfigError
from ...failures import FailureLog
from .config import S3Config
from .connections import Connections
from .gate import Gate
from .messages import Request
from .signing import UNSIGNED_PAYLOAD, Signer, payload_digest

if TYPE_CHECKING:
    from .session import Session

_CHECKSUM = "x-amz-checksum-crc32"


@dataclass
class S3Counts:
    """What the backend has done since it was made. Bodies only are counted as bytes."""

    requests: Counter[str] = field(default_factory=Counter)
    """Requests sent, by verb; LIST for a page of a listing, POST for a bulk delete."""
    retries: int = 0
    throttles: int = 0
    """Answers that asked for fewer requests."""
    connects: int = 0
    hedges: int = 0
    """Reads that were asked for a second time because the first was slow."""
    sent_bytes: int = 0
    received_bytes: int = 0


class Plane:
    """Signer, connections, gate and counts. Thread-safe; belongs to the process that made it."""

    def __init__(
        self, config: S3Config, session: Session, counts: S3Counts, failures: FailureLog
    ) -> None:
        self.config = config
        self.conditional_writes = config.conditional_writes
        self._failures = failures
        self.endpoint = session.endpoint
        self.credentials = session.credentials
        self.counts = counts
        self.gate = Gate(config.concurrency)
        self.closed = False
        self.forbidden_until_s = float("-inf")
        """Until when 403 to a HEAD is known to mean a missing object."""
        self._write_checksums = session.write_checksums
        self._tls = _tls_context(config, session.ca_file) if self._is_tls else None
        self.connections = Connections(session.endpoint, self._tls)
        self._signer = Signer(
            session.endpoint.host_header, session.endpoint.region, session.credentials.keys
        )
        self._lock = threading.Lock()

    @property
    def _is_tls(self) -> bool:
        return self.endpoint.scheme == "https"

    def head(self, request: Request) -> bytes:
        """The request's first lines, signed now."""
        if self._write_checksums and request.verb == "PUT" and not _has_checksum(request):
            request.extra += ((_CHECKSUM, crc32_text(request.body)),)
        payload = UNSIGNED_PAYLOAD
        if self.config.sign_payload:
            payload = payload_digest(request.body)
        lines = self._signer.lines(request.verb, request.path, request.extra, payload)
        length = ""
        if request.verb == "PUT":
            length = f"content-length: {sum(map(len, request.body))}\r\n"
            if request.expect_continue:
                length += "expect: 100-continue\r\n"
        return (
            f"{request.verb} {request.path} HTTP/1.1\r\n{lines}{length}"
            f"user-agent: hicache-storage\r\naccept-encoding: identity\r\n\r\n"
        ).encode("latin-1")

    def count(self, changes: Mapping[str, int], verbs: Mapping[str, int]) -> None:
        """Adds what one call has done."""
        with self._lock:
            self.counts.requests.update(verbs)
            for name, change in changes.items():
                setattr(self.counts, name, getattr(self.counts, name) + change)

    def give_up_conditional_writes(self, reason: str) -> None:
        """Writes plainly from now on."""
        if self.conditional_writes:
            self.conditional_writes = False
            self._failures.note("conditional writes", f"{reason}; pages are written plainly")

    def close(self) -> None:
        """Breaks off what is under way and closes every connection."""
        self.closed = True
        self.connections.close()
        self.credentials.close()


def _has_checksum(request: Request) -> bool:
    return any(name == _CHECKSUM for name, _ in request.extra)


def crc32_text(spans: Iterable[memoryview]) -> str:
    """CRC-32 of the spans as S3 writes it: base64 of 4 bytes, the highest first."""
    checksum = 0
    for span in spans:
        checksum = zlib.crc32(span, checksum)
    return base64.b64encode(checksum.to_bytes(4, "big")).decode()


def _tls_context(config: S3Config, ca_file: str | None) -> ssl.SSLContext:
    if not config.verify_tls:
        context = ssl.create_default_context()
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        return context
    if ca_file is not None and not os.path.isfile(ca_file):
        raise ConfigError(f"backend 's3': ca_file {ca_file!r} is not a file")
    try:
        return ssl.create_default_context(cafile=ca_file)
    except (ssl.SSLError, OSError) as error:
        raise ConfigError(f"backend 's3': ca_file {ca_file!r} holds no CAs: {error}") from error
