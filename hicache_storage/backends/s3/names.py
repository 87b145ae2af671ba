"""Object names: `<prefix>/<hh>/<stored key>`, where hh are the first two digits of the page hash.

A store splits a bucket by name ranges. Page hashes are evenly spread, so with their first digits
in front every namespace, also a new one, is spread over whatever ranges the store has split.
"""

from __future__ import annotations

from urllib.parse import quote

from ...errors import InvalidKey
from ...keys import split_stored_key


class Names:
    """Stored keys as object names under one prefix, and back."""

    def __init__(self, prefix: str) -> None:
        self.root = f"{prefix}/" if prefix else ""
        """What every object name of this store starts with."""
        self.quoted_root = quote(self.root, safe="/-_.~")

    def object_name(self, key: str) -> str:
        return f"{self.root}{key[_hash_start(key) :][:2]}/{key}"

    def quoted(self, key: str) -> str:
        """The object name as it stands in a URL's path and in the signature."""
        start = _hash_start(key)
        return f"{self.quoted_root}{key[start : start + 2]}/{key.replace(':', '%3A')}"

    def stored_key(self, object_name: str) -> str | None:
        """The stored key of an object name; None if no page of this store has that name."""
        key = object_name[len(self.root) + 3 :]
        try:
            split_stored_key(key)
        except InvalidKey:
            return None
        return key if self.object_name(key) == object_name else None


def _hash_start(key: str) -> int:
    return max(key.rfind(":"), key.rfind("/")) + 1
