"""Reading stored pages to look at them: nothing is counted, put aside or deleted by it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from ..errors import BackendError, CorruptPage
from ..keys import split_stored_key
from ..page import HEADER_BYTES, check_page
from ..store import Store

BATCH_BYTES = 64 << 20
BATCH_PAGES = 128

State = Literal["good", "bad", "missing", "unreadable"]


@dataclass(frozen=True)
class Verdict:
    """What one stored page is."""

    name: str
    """Stored key."""
    state: State
    """"missing": gone, or of another length than asked for; "unreadable": the store failed."""
    reason: str = ""


def read_and_check(store: Store, names: Sequence[tuple[str, int]]) -> Iterator[Verdict]:
    """Checks pages given as (stored key, payload bytes), in batches of at most 64 MiB."""
    batch: list[tuple[str, int]] = []
    total = 0
    for name, payload_bytes in names:
        if batch and (total + payload_bytes > BATCH_BYTES or len(batch) == BATCH_PAGES):
            yield from _check_batch(store, batch)
            batch, total = [], 0
        batch.append((name, payload_bytes))
        total += payload_bytes
    if batch:
        yield from _check_batch(store, batch)


def _check_batch(store: Store, batch: list[tuple[str, int]]) -> Iterator[Verdict]:
    buffers = [memoryview(bytearray(HEADER_BYTES + max(1, wanted))) for _, wanted in batch]
    spans = [(buffer[:HEADER_BYTES], buffer[HEADER_BYTES:]) for buffer in buffers]
    try:
        arrived = store._caller.batch_get([name for name, _ in batch], list(spans), None)
    except BackendError as error:
        if len(batch) > 1:
            for one in batch:
                yield from _check_batch(store, [one])
        else:
            yield Verdict(batch[0][0], "unreadable", str(error))
        return
    for (name, _), hit, (header, payload) in zip(batch, arrived, spans, strict=True):
        if not hit:
            yield Verdict(name, "missing")
            continue
        digest, key = split_stored_key(name)
        try:
            check_page(header, (payload,), bytes.fromhex(digest), key)
        except CorruptPage as error:
            yield Verdict(name, "bad", error.reason)
        else:
            yield Verdict(name, "good")
