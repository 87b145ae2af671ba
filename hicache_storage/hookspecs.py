"""The backend contract: the hooks that a storage backend implements.

A backend is a class whose methods carry `@hookimpl`. Required: `batch_set`, `batch_get`,
`exists`. Each optional hook that it implements is a capability. A method declares only the
arguments that it wants (pluggy passes those by name), and never gives one a default.

What the framework guarantees:

- keys are stored keys (`keys.stored_key`): at most 194 characters of `[0-9a-z_:/]`, one slash;
- `keys` is never empty, and `pages` or `buffers` has its length;
- spans are flat, contiguous memoryviews of bytes; those of `buffers` are writable; every page
  starts with a 64-byte header span, so a page has two spans or more;
- arguments are not changed while the call runs.

What a backend must do:

- answer with one bool a key, in the order of `keys`; a miss is False, never an error;
- store a page whole or not at all: no reader sees part of one, also after a kill at any moment;
- answer True from `batch_set` only once `batch_get` would find the page;
- keep no span after the call returns, write nothing outside of `buffers`, and leave the lists
  that it is given as they are;
- take calls from any thread, several at once, also after a fork;
- raise errors of `hicache_storage.errors` (`BackendError` and below) when the store as a whole
  fails, and answer False where only one page does.

What a backend may declare, as a class or instance attribute `scope`, is who shares its pages:

- "shared" (the default): whoever opens the same location, also several processes at once;
- "exclusive": pages survive closing, but one process at a time has the store open;
- "process": pages live in this one backend object and end with it, as with memory://.

A backend may say how Store cuts a batch into calls, and lend it threads for them, by a method
`spread(hook, page_bytes, count, work)`. It calls `work` with slices that together are the batch
of `count` pages (each of `page_bytes` and a header), each page in one of them, in any order, on
whatever threads, and returns once all calls have; what one of them raises, it raises. Each call
of `work` makes the checksums of its pages, copies what has to be copied, and calls `hook`
("batch_set" or "batch_get"): a few pages at a time are still in the processor's cache from one
step to the next. Store waits for a call that is under way when `spread` is back, refuses one that
comes later, and raises what a call raised even if `spread` doesn't; pages that no call was given
are not stored or not read. Without `spread` a batch is one call.
"""

# The bodies are empty on purpose: pluggy reads the signatures.
# mypy: disable-error-code="empty-body"

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

import pluggy

from .page import PageSpans

PROJECT = "hicache_storage"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)

Scope = Literal["shared", "exclusive", "process"]

REQUIRED_HOOKS = ("batch_set", "batch_get", "exists")
OPTIONAL_HOOKS = ("open", "delete", "scan", "usage", "flush", "clear", "close")


class StoredPage(NamedTuple):
    """One entry of a scan."""

    key: str
    """Stored key."""
    stored_bytes: int
    """Bytes that the page takes in the store, its header included."""
    used_s: float | None = None
    """When it was last used or written, in seconds since the epoch; None if not known."""


class Usage(NamedTuple):
    """What a store holds."""

    pages: int
    stored_bytes: int
    capacity_bytes: int | None = None
    """None if the store sets no limit of its own."""


@hookspec(firstresult=True)
def batch_set(keys: list[str], pages: list[PageSpans], prefix_keys: list[str] | None) -> list[bool]:
    """Stores each page under its key, replacing what was there. True where it is stored.

    A page that is stored already with the same header (its first span) need not be written
    again. `prefix_keys` are the stored keys before `keys[0]` in the request, for stores that
    place or evict by prefix; None if the engine doesn't pass them.
    """


@hookspec(firstresult=True)
def batch_get(
    keys: list[str], buffers: list[PageSpans], prefix_keys: list[str] | None
) -> list[bool]:
    """Reads each page into its buffers. True where all of the page has arrived.

    A page whose stored length isn't that of its buffers is a miss. After False the contents of
    that key's buffers are undefined; those of other keys are untouched by it.
    """


@hookspec(firstresult=True)
def exists(keys: list[str], prefix_keys: list[str] | None) -> int:
    """The length of the leading run of stored keys: n if `keys[:n]` are stored and `keys[n]`
    is not. The keys may be of two namespaces in turn, a target's and its draft's."""


@hookspec(firstresult=True)
def open() -> None:
    """Connects, creates what is missing, recovers from a crash. Called once, before any other
    call; a constructor does no I/O."""


@hookspec(firstresult=True)
def delete(keys: list[str]) -> list[bool]:
    """Deletes pages. True where the key is not stored any more, also if it never was."""


@hookspec(firstresult=True)
def scan(prefix: str) -> Iterator[StoredPage]:
    """All stored pages whose key starts with `prefix`, in any order; "" for all of them.

    Pages set or deleted meanwhile may or may not be among them.
    """


@hookspec(firstresult=True)
def usage() -> Usage:
    """What the store holds now; may lag behind other processes."""


@hookspec(firstresult=True)
def flush() -> None:
    """Returns once every page acknowledged before the call survives a power cut."""


@hookspec(firstresult=True)
def clear() -> None:
    """Deletes all pages of this store, and nothing that isn't a page."""


@hookspec(firstresult=True)
def close() -> None:
    """Releases threads, files and connections. Called once; no call follows."""
