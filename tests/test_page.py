"""The page header: a page is good exactly if it is what was written under its key."""

from __future__ import annotations

import random
import struct

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from hicache_storage import CorruptPage, PageSizeMismatch
from hicache_storage.page import (
    _HELD_BYTES,
    _PIECE_BYTES,
    HEADER_BYTES,
    FlatSpans,
    as_spans,
    check_page,
    framed,
    make_header,
    spans_bytes,
    zero_spans,
)

NAMESPACE = bytes(range(16))
KEY = "d:" + "0a" * 32


def test_header_has_the_documented_fields() -> None:
    header = make_header(as_spans(b"abc"), NAMESPACE, KEY)
    assert len(header) == HEADER_BYTES == 64
    magic, version, zero, length = struct.unpack_from("<4sHHQ", header)
    assert (magic, version, zero, length) == (b"HKVP", 1, 0, 3)
    assert header[32:48] == NAMESPACE


@given(st.lists(st.binary(max_size=300), min_size=1, max_size=8))
def test_header_does_not_depend_on_how_the_payload_is_cut(parts: list[bytes]) -> None:
    whole = make_header(as_spans(b"".join(parts)), NAMESPACE, KEY)
    assert make_header(as_spans(parts), NAMESPACE, KEY) == whole
    check_page(whole, as_spans(parts), NAMESPACE, KEY)


@pytest.mark.parametrize("piece", [0, 1, _PIECE_BYTES - 1, _PIECE_BYTES + 1])
@pytest.mark.parametrize(
    "length", [_PIECE_BYTES, _PIECE_BYTES + 1, _HELD_BYTES, _HELD_BYTES + 1, 3 * _HELD_BYTES]
)
def test_the_checksum_is_the_payloads_however_it_is_taken(length: int, piece: int) -> None:
    payload = random.Random(length).randbytes(length)
    spans = (payload[:piece], payload[piece:]) if piece else (payload,)
    header = make_header(as_spans(list(spans)), NAMESPACE, KEY)
    assert header[16:32] == xxhash.xxh3_128_digest(payload)


@pytest.mark.parametrize("offset", range(HEADER_BYTES))
def test_a_flip_of_any_header_byte_is_found(offset: int) -> None:
    payload = as_spans(b"payload")
    header = bytearray(make_header(payload, NAMESPACE, KEY))
    header[offset] ^= 0x40
    with pytest.raises(CorruptPage):
        check_page(bytes(header), payload, NAMESPACE, KEY)


@given(st.binary(min_size=1, max_size=400), st.data())
def test_a_flip_of_any_payload_bit_is_found(payload: bytes, data: st.DataObject) -> None:
    header = make_header(as_spans(payload), NAMESPACE, KEY)
    flipped = bytearray(payload)
    flipped[data.draw(st.integers(0, len(payload) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(CorruptPage, match="checksum"):
        check_page(header, as_spans(flipped), NAMESPACE, KEY)


def test_what_is_wrong_with_a_page_is_named() -> None:
    payload = as_spans(b"payload")
    header = make_header(payload, NAMESPACE, KEY)
    wrong = {
        "another namespace": (header, payload, bytes(16), KEY),
        "another key": (header, payload, NAMESPACE, "1b" * 32),
        "payload of 7 bytes, expected 3": (header, as_spans(b"pay"), NAMESPACE, KEY),
        "magic": (bytes(64), payload, NAMESPACE, KEY),
    }
    for words, arguments in wrong.items():
        with pytest.raises(CorruptPage, match=words):
            check_page(*arguments)


def test_an_all_zero_page_is_not_a_page() -> None:
    with pytest.raises(CorruptPage):
        check_page(bytes(HEADER_BYTES), as_spans(bytes(512)), NAMESPACE, KEY)


def test_spans_share_the_memory_of_their_buffers() -> None:
    buffer = bytearray(8)
    (span,) = as_spans(buffer, writable=True)
    span[3] = 7
    assert buffer[3] == 7


def test_a_strided_or_read_only_buffer_is_refused() -> None:
    with pytest.raises(PageSizeMismatch, match="contiguous"):
        as_spans(memoryview(bytes(8))[::2])
    with pytest.raises(PageSizeMismatch, match="writable"):
        as_spans(b"fixed", writable=True)


def test_wider_elements_become_bytes() -> None:
    assert spans_bytes(as_spans(memoryview(bytes(8)).cast("I"))) == 8


@pytest.mark.parametrize("length", [0, 1, (1 << 20) - 1, (1 << 20) + 1, 3 << 20])
def test_zeroing_reaches_every_byte(length: int) -> None:
    buffer = bytearray(b"\xab" * length)
    zero_spans(as_spans((buffer,), writable=True))
    assert buffer == bytes(length)


def test_spans_known_to_be_flat_are_passed_on_as_they_are() -> None:
    spans = FlatSpans([memoryview(bytearray(4)), memoryview(bytearray(2))])
    assert as_spans(spans, writable=True) is spans
    assert spans_bytes(spans) == spans_bytes(spans) == 6
    page = framed(memoryview(bytes(64)), spans)
    assert spans_bytes(page) == 70
    assert tuple(page[1:]) == tuple(spans)
