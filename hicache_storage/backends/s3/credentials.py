"""The credentials of the moment, from the SDK's chain, without ever waiting for a refresh.

The chain (environment, profile, container and instance roles, single sign-on) is the SDK's own.
A refresh may ask a server, so it runs in a thread of its own while requests go on with the
credentials at hand; a caller waits for it only if the store has called those invalid.
"""

from __future__ import annotations

import threading
import time
from typing import Any

from .signing import Keys

LOOK_S = 30.0
"""How often the chain is asked whether its credentials have changed."""


class Credentials:
    """Credentials that renew themselves. Thread-safe.

    `source` is the SDK's credentials object, or None to sign nothing.
    """

    def __init__(self, source: Any) -> None:
        self._source = source
        self._keys: Keys | None = None
        self._renews = hasattr(source, "refresh_needed")
        self._looked_s = float("-inf")
        self._lock = threading.Lock()
        self._renewal: threading.Thread | None = None
        self.error: Exception | None = None
        """Why the last renewal failed."""
        if source is not None:
            self._renew()
            if self._keys is None and self.error is not None:
                raise self.error

    def keys(self) -> Keys | None:
        """What to sign with; the same object for as long as it stays the same."""
        if self._renews and time.monotonic() - self._looked_s > LOOK_S:
            self._start_renewal()
        return self._keys

    def rejected(self, keys: Keys | None, until_s: float) -> bool:
        """Asks the chain for others after the store has refused `keys`; waits up to `until_s`.

        True if there are others.
        """
        if self._keys is keys and self._renews:
            self._start_renewal().join(max(0.0, until_s - time.monotonic()))
        return self._keys is not keys

    def close(self) -> None:
        """Waits for a renewal that is under way, a second at most."""
        if self._renewal is not None:
            self._renewal.join(1.0)

    def _start_renewal(self) -> threading.Thread:
        with self._lock:
            if self._renewal is None or not self._renewal.is_alive():
                self._looked_s = time.monotonic()
                self._renewal = threading.Thread(
                    target=self._renew, name="hicache-s3-credentials", daemon=True
                )
                self._renewal.start()
            return self._renewal

    def _renew(self) -> None:
        try:
            frozen = self._source.get_frozen_credentials()
        except Exception as error:
            self.error = error
            return
        self.error = None
        self._looked_s = time.monotonic()
        keys = Keys(frozen.access_key, frozen.secret_key, frozen.token)
        if keys != self._keys:
            self._keys = keys
