"""Page keys as SGLang's releases write them, and the pool that each belongs to.

A target's page has its bare hash. A draft's page is `d:<hash>` up to 0.5.12, `<hash>.draft` up
to 0.5.18, and in the pool calls the bare hash beside the pool's name. Whatever the form, a page
has one key in the store: the hash of a target's, `d:<hash>` of a draft's, `<pool>:<hash>` of any
other pool's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from ..errors import InvalidKey
from ..keys import DRAFT_TAG, split_page_key

TARGET = "kv"
DRAFT = "draft"
_FORM = re.compile(r"(?P<tag>d:)?(?P<hash>[0-9a-f]{16,128})(?P<suffix>\.draft)?")
_POOL = re.compile(r"[a-z][a-z0-9_]{0,31}")


def pool_name(name: Any) -> str:
    """A pool's name as text: SGLang gives text or a member of an enumeration of texts."""
    found = getattr(name, "value", name)
    if not isinstance(found, str) or _POOL.fullmatch(found) is None:
        raise InvalidKey(f"{name!r:.100} is not the name of a pool")
    return found


def key_tag(pool: str) -> str:
    """The tag of a pool's page keys; "" for the target's."""
    return {TARGET: "", DRAFT: DRAFT_TAG}.get(pool, pool)


def parse_key(key: Any) -> tuple[str, str]:
    """A key of the calls without pool names as (pool, page hash).

    Raises InvalidKey for any other form: what isn't understood must not become a target page.
    """
    found = _FORM.fullmatch(key) if isinstance(key, str) else None
    if found is None or (found["tag"] and found["suffix"]):
        raise InvalidKey(
            f"page key {key!r:.100} has none of the forms <hash>, d:<hash> and <hash>.draft"
        )
    return (DRAFT if found["tag"] or found["suffix"] else TARGET), found["hash"]


def check_hash(page_hash: Any) -> str:
    """Returns a bare page hash, else raises InvalidKey."""
    if isinstance(page_hash, str) and ":" not in page_hash:
        return split_page_key(page_hash)[1]
    raise InvalidKey(f"{page_hash!r:.100} is not a page hash")


def keys_by_pool(
    keys: Sequence[Any], refuse: Callable[[InvalidKey], None]
) -> list[tuple[str, list[int], list[str]]]:
    """Keys of the calls without pool names as (pool, places in `keys`, page hashes).

    Keys of no known form are handed to `refuse` and left out.
    """
    found: dict[str, tuple[list[int], list[str]]] = {}
    for i, key in enumerate(keys):
        try:
            pool, page_hash = parse_key(key)
        except InvalidKey as error:
            refuse(error)
            continue
        places, hashes = found.setdefault(pool, ([], []))
        places.append(i)
        hashes.append(page_hash)
    return [(pool, places, hashes) for pool, (places, hashes) in found.items()]


def prefix_of(extra_info: Any) -> list[str] | None:
    """The page hashes before a call's own, if SGLang passes them; some releases pass (None,)."""
    prefix = getattr(extra_info, "prefix_keys", None)
    if not isinstance(prefix, (list, tuple)) or not all(isinstance(key, str) for key in prefix):
        return None
    return list(prefix)
