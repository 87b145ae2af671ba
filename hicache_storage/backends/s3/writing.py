"""Writing pages: plain writes, or conditional ones that leave equal pages alone."""

from __future__ import annotations

from collections.abc import Sequence

from ...page import HEADER_BYTES, PageSpans, spans_bytes
from .answers import Answer, Meaning
from .call import Batch, Call, Result
from .messages import Request, Response
from .plane import Plane

MOST_PAGE_BYTES = 5 << 30
"""S3's limit for an object written by one request."""
_IF_MISSING = ("if-none-match", "*")


def write_pages(
    plane: Plane, paths: Sequence[str], pages: Sequence[PageSpans], until_s: float
) -> list[Result]:
    """What became of each page, in order. A page over S3's limit is refused unsent.

    Every write is one request, which S3 makes visible as a whole or not at all.
    """
    results: list[Result | None] = [None] * len(paths)
    sent = []
    for i, page in enumerate(pages):
        if (found := spans_bytes(page)) > MOST_PAGE_BYTES:
            reason = f"a page of {found} bytes is over S3's {MOST_PAGE_BYTES} for one write"
            results[i] = Answer(Meaning.REFUSED, Response(0, b""), reason)
        else:
            sent.append(i)
    if plane.conditional_writes and sent:
        sent = _write_missing(plane, paths, pages, sent, until_s, results)
    if sent:
        requests = [Request("PUT", paths[i], body=pages[i]) for i in sent]
        for i, result in zip(sent, _run(plane, requests, until_s), strict=True):
            results[i] = result
    return [result for result in results if result is not None]


def _write_missing(
    plane: Plane,
    paths: Sequence[str],
    pages: Sequence[PageSpans],
    sent: Sequence[int],
    until_s: float,
    results: list[Result | None],
) -> list[int]:
    """Writes what isn't there, and gives the pages that need a plain write: those that are
    there and differ."""
    requests = [
        Request("PUT", paths[i], body=pages[i], extra=(_IF_MISSING,), expect_continue=True)
        for i in sent
    ]
    there, plain = [], []
    for i, result in zip(sent, _run(plane, requests, until_s), strict=True):
        results[i] = result
        if isinstance(result, Answer) and result.meaning is Meaning.STORED:
            there.append(i)
        elif isinstance(result, Answer) and result.meaning is Meaning.UNSUPPORTED:
            plane.give_up_conditional_writes(result.reason)
            plain.append(i)
    if not there:
        return plain
    last = HEADER_BYTES - 1
    requests = [Request("GET", paths[i], extra=(("range", f"bytes=0-{last}"),)) for i in there]
    for i, result in zip(there, _run(plane, requests, until_s), strict=True):
        if not _is_equal(result, pages[i]):
            plain.append(i)
        else:
            results[i] = result
    return plain


def _run(plane: Plane, requests: Sequence[Request], until_s: float) -> list[Result]:
    return Call(plane, requests, "batch_set", Batch(until_s)).run()


def _is_equal(result: Result, page: PageSpans) -> bool:
    """Whether the first bytes and the length of a stored object are the page's.

    The header has the payload's checksum, so equal headers mean equal pages.
    """
    if not isinstance(result, Answer) or result.meaning is not Meaning.DONE:
        return False
    response = result.response
    total = response.header("content-range").rpartition("/")[2]
    return (
        response.status == 206
        and total == str(spans_bytes(page))
        and response.body == page[0][:HEADER_BYTES]
    )
