"""Page hashes are SGLang's, and no key can be or become a path."""

from __future__ import annotations

import hashlib
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hicache_storage import InvalidKey
from hicache_storage.keys import (
    check_page_key,
    draft_key,
    hash_page,
    page_hashes,
    split_page_key,
    split_stored_key,
    stored_key,
    tagged_key,
)

ONE_TO_NINE = [1, 2, 3, 4, 5, 6, 7, 8, 9]
EXTREMES = [0, 1, 2**31, 2**32 - 1, 151643, 7]
HASH = hashlib.sha256(b"0").hexdigest()
NAMESPACE = "0123456789abcdef" * 2

# Made by the functions of SGLang 0.5.11 (get_hash_str, RadixKey.hash_page) and 0.5.23
# (get_native_hash), which agree: (tokens, page_size, mode) -> the chain of page hashes.
GOLDEN = [
    (
        ONE_TO_NINE,
        4,
        "tokens",
        [
            "cf97adeedb59e05bfd73a2b4c2a8885708c4f4f70c84c64b27120e72ab733b72",
            "4ebfa8a1f3c341517621838c6e1b9aa350307e3f00b3cbd1a07ef740f54396d6",
        ],
    ),
    (
        ONE_TO_NINE,
        4,
        "pairs",
        [
            "f721fe42aac11dcbfd1a17f24cc5765a0d5b6bc264d1c0b6581d775a7344c11f",
            "c35ad698917936a474f7e55f3a4855eaee20585cd0bf156b1ae3a62666ba7220",
        ],
    ),
    (
        EXTREMES,
        1,
        "tokens",
        [
            "df3f619804a92fdb4057192dc43dd748ea778adc52bc498ce80524c014b81119",
            "53f69ec6a1c7effbd864307243e74feaafa8b26bbdc9d066fe8b22ed64a010bb",
            "10a20b6a85def9b559fefabcd92ba5340b9395d5cd14aae6a522f58893d9de81",
            "8af06cc3ede0183bff4f4312fadc4ccc5b337c6d4828cb7c6467421926fd36d6",
            "0589f637619a30865a1e60c33caf0b86dd77b7551de9831e733103319c085a91",
            "3e14d56a4b81807695bfa18f3fe3ab98324f34cad3cc236b13794ae2207f76de",
        ],
    ),
    (
        EXTREMES,
        1,
        "pairs",
        [
            "01acecb507abfe1a354aa8064f4af5d3f1acd019e37db3c11c97523b71c76e9d",
            "e39e589ea1aa370eab61e54a89ccf438b9b1a5df4dcaf3de6c2415d6d30152cf",
            "83791bf5f9909e87747f5477004c2b13856f1e1b9c5d5a69f3e6d876a61a628e",
            "00c5ddcd3683ff492316727c84e300912273d2587576446b40be4c188362c7ec",
            "af97542506c2260db5e487ec801eff0a16f7d425934f8139fddb1ad43a43be14",
        ],
    ),
]


@pytest.mark.parametrize(("tokens", "page_size", "mode", "expected"), GOLDEN)
def test_page_hashes_are_those_of_sglang(
    tokens: list[int], page_size: int, mode: Any, expected: list[str]
) -> None:
    assert page_hashes(tokens, page_size, mode=mode) == expected


@pytest.mark.parametrize(
    ("prior", "expected"),
    [
        (None, "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"),
        ("ab" * 32, "9a2db2e23f1504cd056606553ac049c5e718e8f9ce9233876df1a7a1821af885"),
    ],
)
def test_the_hash_of_an_empty_page_is_that_of_sglang(prior: str | None, expected: str) -> None:
    assert hash_page([], prior) == expected


def test_the_mode_has_no_default() -> None:
    with pytest.raises(TypeError, match="mode"):
        page_hashes(ONE_TO_NINE, 4)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="'tokens' or 'pairs', got 'eagle'"):
        page_hashes(ONE_TO_NINE, 4, mode="eagle")  # type: ignore[arg-type]


@given(st.lists(st.integers(0, 2**32 - 1), min_size=2, max_size=20), st.integers(1, 5))
def test_the_two_modes_never_agree_on_a_page(tokens: list[int], page_size: int) -> None:
    plain = page_hashes(tokens, page_size, mode="tokens")
    pairs = page_hashes(tokens, page_size, mode="pairs")
    assert not set(plain) & set(pairs)


@given(st.lists(st.integers(0, 2**32 - 1), max_size=30), st.integers(1, 7))
def test_only_whole_pages_have_a_hash(tokens: list[int], page_size: int) -> None:
    assert len(page_hashes(tokens, page_size, mode="tokens")) == len(tokens) // page_size
    pairs = max(0, len(tokens) - 1)
    assert len(page_hashes(tokens, page_size, mode="pairs")) == pairs // page_size


@given(st.lists(st.integers(0, 2**32 - 1), min_size=9, max_size=30), st.integers(1, 4))
def test_a_pair_page_covers_the_first_token_behind_it(tokens: list[int], page_size: int) -> None:
    changed = list(tokens)
    changed[page_size] ^= 1
    for mode, same in (("tokens", True), ("pairs", False)):
        first = page_hashes(tokens, page_size, mode=mode)[0]  # type: ignore[arg-type]
        other = page_hashes(changed, page_size, mode=mode)[0]  # type: ignore[arg-type]
        assert (first == other) is same


@given(
    st.lists(st.integers(0, 2**32 - 1), min_size=8, max_size=40),
    st.sampled_from(["tokens", "pairs"]),
    st.integers(1, 4),
    st.data(),
)
def test_a_chain_that_is_continued_is_the_chain_in_one_go(
    tokens: list[int], mode: Any, page_size: int, data: st.DataObject
) -> None:
    whole = page_hashes(tokens, page_size, mode=mode)
    done = data.draw(st.integers(1, len(whole))) if whole else 0
    if not done:
        return
    rest = page_hashes(tokens[done * page_size :], page_size, mode=mode, prior_hash=whole[done - 1])
    assert whole[:done] + rest == whole


@pytest.mark.parametrize("kind", [int, np.int64, np.int32, np.uint32, np.uint16])
def test_every_kind_of_integer_gives_the_same_hash(kind: type) -> None:
    tokens = [kind(token) for token in ONE_TO_NINE]
    assert page_hashes(tokens, 4, mode="tokens") == GOLDEN[0][3]
    assert page_hashes(tokens, 4, mode="pairs") == GOLDEN[1][3]
    pairs = [(kind(a), kind(b)) for a, b in [(1, 2), (2, 3), (3, 4), (4, 5)]]
    assert hash_page(pairs, None) == GOLDEN[1][3][0]


def test_an_array_of_tokens_hashes_like_a_list() -> None:
    tokens = np.array(ONE_TO_NINE, dtype=np.int64)
    assert page_hashes(tokens, 4, mode="tokens") == GOLDEN[0][3]  # type: ignore[arg-type]
    assert page_hashes(tokens, 4, mode="pairs") == GOLDEN[1][3]  # type: ignore[arg-type]


@pytest.mark.parametrize("tokens", [[-1], [2**32], [(1, 2**32)], [np.int64(-5)]])
def test_an_id_that_does_not_fit_is_refused(tokens: list[Any]) -> None:
    with pytest.raises(ValueError, match=r"0 to 2\*\*32 - 1"):
        hash_page(tokens, None)


@pytest.mark.parametrize("tokens", [[1.5], ["1"], [None], [(1, 2), 3], [1, (2, 3)], [[1, 2]]])
def test_what_is_no_integer_is_refused_not_rounded(tokens: list[Any]) -> None:
    with pytest.raises(TypeError):
        hash_page(tokens, None)


@pytest.mark.parametrize("page_size", [0, -1])
def test_a_page_has_at_least_one_token(page_size: int) -> None:
    with pytest.raises(ValueError, match="at least 1 token"):
        page_hashes(ONE_TO_NINE, page_size, mode="tokens")


OUTSIDE = [
    "",
    ".",
    "..",
    "../x",
    "/etc/x",
    "a/../../x",
    "d:../x",
    f"d:{HASH}/..",
    f"{HASH}/..",
    f"../{HASH}",
    f"/{HASH}",
    f"{HASH}\x00",
    f"{HASH}\n",
    f" {HASH}",
    "CON",
    "a\\b",
    f"d\\{HASH}",
    f"d:d:{HASH}",
    f":{HASH}",
    f"d:{HASH}:",
    f"D:{HASH}",
    f"1:{HASH}",
    f"{'a' * 33}:{HASH}",
    HASH.upper(),
    HASH[:15],
    "a" * 129,
    f"{HASH}.draft",
    "\u0661" * 64,
    "%2e%2e%2f" + HASH,
    "*" * 64,
    "?" * 64,
]


@pytest.mark.parametrize("key", OUTSIDE)
def test_a_key_outside_of_the_form_is_refused_everywhere(key: str) -> None:
    with pytest.raises(InvalidKey):
        check_page_key(key)
    with pytest.raises(InvalidKey):
        stored_key(NAMESPACE, key)
    with pytest.raises(InvalidKey):
        split_page_key(key)
    with pytest.raises(InvalidKey):
        draft_key(key)
    with pytest.raises(InvalidKey):
        split_stored_key(f"{NAMESPACE}/{key}")


@pytest.mark.parametrize("key", [None, 7, HASH.encode(), ["a"]])
def test_a_key_that_is_no_string_is_refused(key: Any) -> None:
    with pytest.raises(InvalidKey):
        check_page_key(key)


near_keys = st.one_of(
    st.text(max_size=200),
    st.from_regex(r"([a-z][a-z0-9_]{0,31}:)?[0-9a-f]{10,140}", fullmatch=True),
    st.text("0123456789abcdef:/.\\\x00dn_ \n", max_size=140),
    st.tuples(st.sampled_from(OUTSIDE), st.sampled_from(["", HASH, f"d:{HASH}"])).map("".join),
)


@given(near_keys)
@example(f"d:{HASH}")
def test_no_allowed_key_can_be_a_path(key: str) -> None:
    try:
        check_page_key(key)
    except InvalidKey:
        return
    assert re.fullmatch(r"[0-9a-z_:]{16,161}", key), "only characters that no path gives meaning to"
    assert key.encode("ascii").decode() == key.lower() == key
    name = stored_key(NAMESPACE, key)
    assert len(name) <= 194
    assert name.split("/") == [NAMESPACE, key]


allowed_keys = st.from_regex(r"([a-z][a-z0-9_]{0,31}:)?[0-9a-f]{16,128}", fullmatch=True)


@given(allowed_keys)
def test_a_stored_key_splits_into_what_it_was_made_of(key: str) -> None:
    assert split_stored_key(stored_key(NAMESPACE, key)) == (NAMESPACE, key)
    tag, page_hash = split_page_key(key)
    assert (tagged_key(tag, page_hash) if tag else page_hash) == key


@given(allowed_keys)
def test_no_key_form_is_applied_to_its_own_output(key: str) -> None:
    with pytest.raises(InvalidKey):
        stored_key(NAMESPACE, stored_key(NAMESPACE, key))
    if ":" in key:
        with pytest.raises(InvalidKey):
            draft_key(key)
    else:
        with pytest.raises(InvalidKey):
            draft_key(draft_key(key))
