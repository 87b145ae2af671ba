"""Page hashes that are easy to name."""

from __future__ import annotations

import hashlib


def page_hash(number: int) -> str:
    """SHA-256 of the number's decimal digits."""
    return hashlib.sha256(str(number).encode()).hexdigest()
