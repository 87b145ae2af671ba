"""Where a page lies: `<root>/<namespace digest>/<2 hex>/<name>`.

The two hex digits are the first of the page hash, so a namespace has 256 directories. `name` is
the page key with its tag's colon written as "-": `<hash>` for a target, `d-<hash>` for a draft.

Temporary files lie beside the page that they become, as `.<writer>-<number>.tmp`; what the
backend keeps for itself lies under `<root>/.hicache-storage`. Every other name is foreign:
never listed, counted or removed.
"""

from __future__ import annotations

import re

from ...errors import InvalidKey
from ...keys import check_page_key, split_stored_key

CONTROL = ".hicache-storage"
NAMESPACE_NAME = re.compile(r"[0-9a-f]{32}")
SHARD_NAME = re.compile(r"[0-9a-f]{2}")
TEMP_NAME = re.compile(r"\.([0-9a-f]{16})-([0-9]+)\.tmp")
LONGEST_USUAL_NAME = 32 + 1 + 64
"""A pool tag, the dash and a SHA-256; a longer page key is legal and may not fit everywhere."""


def page_place(key: str) -> tuple[str, str]:
    """The directory under the root and the file name of a stored key's page.

    Raises InvalidKey for anything but a stored key, so no key becomes another path.
    """
    namespace, page_key = split_stored_key(key)
    tag, colon, page_hash = page_key.rpartition(":")
    name = f"{tag}-{page_hash}" if colon else page_hash
    return f"{namespace}/{page_hash[:2]}", name


def stored_key_at(namespace: str, shard: str, name: str) -> str | None:
    """The stored key of the page at this place; None if the file there isn't a page."""
    page_key = name.replace("-", ":", 1)
    try:
        check_page_key(page_key)
    except InvalidKey:
        return None
    if page_key[page_key.find(":") + 1 :][:2] != shard:
        return None
    return f"{namespace}/{page_key}"


def temp_name(writer: str, number: int) -> str:
    """The name of a writer's temporary file; at most 40 characters."""
    return f".{writer}-{number}.tmp"
