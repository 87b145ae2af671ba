"""Page keys: the chained page hash, the draft's `d:` tag, and the name a backend sees.

Three forms, each made from the one before exactly once:

- page hash: 64 hex digits, SHA-256 chained over the tokens up to the end of the page;
- page key: the page hash, tagged with the pool it came from unless that is the target's
  (`d:` for a draft); what `Store` takes;
- stored key: `<namespace digest>/<page key>`; what a backend takes.
"""

from __future__ import annotations

import hashlib
import itertools
import operator
import re
import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from .errors import InvalidKey

HashMode = Literal["tokens", "pairs"]

DRAFT_TAG = "d"
RECORD_TAG = "n"
"""Tag of a namespace's readable record, which `Store` keeps beside the pages as if it were one;
a backend that evicts does better to let records go last."""
_PAGE_KEY = re.compile(r"(?:([a-z][a-z0-9_]{0,31}):)?([0-9a-f]{16,128})")
_STORED_KEY = re.compile(rf"([0-9a-f]{{32}})/({_PAGE_KEY.pattern})")


def hash_page(tokens: Sequence[int] | Sequence[tuple[int, int]], prior_hash: str | None) -> str:
    """The SHA-256 of one page's tokens, chained to the hash of the page before it.

    `tokens` are token ids below 2**32 or pairs of them, `prior_hash` is None for the first
    page. Gives the hashes of SGLang's `get_hash_str`: the prior digest's bytes, then every id
    as 4 bytes, little-endian. Raises ValueError for an id out of range, TypeError for one that
    is no integer.
    """
    flat: Iterable[Any] = tokens
    if len(tokens) and isinstance(tokens[0], tuple):
        flat = itertools.chain.from_iterable(tokens)  # type: ignore[arg-type]
    try:
        ids = array("I", map(operator.index, flat))
    except OverflowError as error:
        raise ValueError("token ids must be 0 to 2**32 - 1") from error
    if sys.byteorder == "big":
        ids.byteswap()
    digest = hashlib.sha256(bytes.fromhex(prior_hash) if prior_hash else b"")
    digest.update(ids.tobytes())
    return digest.hexdigest()


def page_hashes(
    tokens: Sequence[int],
    page_size: int,
    *,
    mode: HashMode,
    prior_hash: str | None = None,
) -> list[str]:
    """The page hashes of all whole pages of `tokens`, in order.

    `mode` has no default, since both ends must agree on it. "tokens" hashes the page's own
    tokens. "pairs" hashes (token, next token) pairs, as SGLang does for EAGLE: the draft's
    entry for a token is made from the token after it, so a page is whole only once the first
    token beyond it is known. `len(tokens) // page_size` pages, or
    `(len(tokens) - 1) // page_size` for pairs.
    """
    if page_size < 1:
        raise ValueError(f"page_size must be at least 1 token, got {page_size}")
    units: Sequence[int] | Sequence[tuple[int, int]]
    if mode == "tokens":
        units = tokens
    elif mode == "pairs":
        units = list(itertools.pairwise(tokens))
    else:
        raise ValueError(f"mode must be 'tokens' or 'pairs', got {mode!r}")
    hashes: list[str] = []
    for end in range(page_size, len(units) + 1, page_size):
        prior_hash = hash_page(units[end - page_size : end], prior_hash)
        hashes.append(prior_hash)
    return hashes


def check_page_key(key: str) -> str:
    """Returns `key` if it is a page key, else raises InvalidKey.

    The form is 16 to 128 lower-case hex digits, after an optional pool tag and colon
    (`d:<hash>`). So no key can be, or become, a path.
    """
    if not isinstance(key, str) or _PAGE_KEY.fullmatch(key) is None:
        raise InvalidKey(
            f"page key {key!r:.100} is not 16 to 128 lower-case hex digits, optionally after a "
            "pool tag like 'd:'; hash other names first (hashlib.sha256(name).hexdigest())"
        )
    return key


def tagged_key(tag: str, page_hash: str) -> str:
    """`tag:page_hash`; the hash must not carry a tag already."""
    if ":" in page_hash:
        raise InvalidKey(f"page key {page_hash!r:.100} already has a pool tag")
    return check_page_key(f"{tag}:{page_hash}")


def draft_key(page_hash: str) -> str:
    """The draft page's key, `d:` + hash."""
    return tagged_key(DRAFT_TAG, page_hash)


def split_page_key(key: str) -> tuple[str, str]:
    """A page key as (pool tag, page hash); the tag is "" for the target."""
    match = _PAGE_KEY.fullmatch(key)
    if match is None:
        check_page_key(key)
        raise AssertionError("unreachable")
    return match[1] or "", match[2]


def stored_key(namespace_digest: str, page_key: str) -> str:
    """The name that a backend sees: `<namespace digest>/<page key>`."""
    return f"{namespace_digest}/{check_page_key(page_key)}"


def split_stored_key(key: str) -> tuple[str, str]:
    """A stored key as (namespace digest, page key); raises InvalidKey for any other string."""
    match = _STORED_KEY.fullmatch(key)
    if match is None:
        raise InvalidKey(f"{key!r:.100} is not '<32 hex digits>/<page key>'")
    return match[1], match[2]
