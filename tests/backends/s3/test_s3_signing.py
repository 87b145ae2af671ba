"""Signatures equal those of the SDK's own signer."""

from __future__ import annotations

import datetime
import hashlib
from urllib.parse import quote

import botocore.auth
import botocore.awsrequest
import botocore.compat
import botocore.credentials
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache_storage.backends.s3.signing import UNSIGNED_PAYLOAD, Keys, Signer, payload_digest

KEYS = st.builds(
    Keys,
    st.text("ABCXYZ0123456789", min_size=3, max_size=20),
    st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=40),
    st.none() | st.text("abcXYZ0123/+=", min_size=1, max_size=400),
)
NAMES = st.text("abcxyz0123456789/:_-.~ +%&=?éλ", min_size=1, max_size=80)
EXTRA = st.dictionaries(
    st.sampled_from(["if-none-match", "range", "x-amz-checksum-crc32", "x-amz-acl", "zz-last"]),
    st.text("abc=*0123456789 -", max_size=20).map(str.strip),
)


def sdk_authorization(
    keys: Keys,
    region: str,
    verb: str,
    url: str,
    headers: dict[str, str],
    now: datetime.datetime,
    monkeypatch: pytest.MonkeyPatch,
) -> str:
    """What the SDK signs of the same request."""
    request = botocore.awsrequest.AWSRequest(verb, url, headers=headers)
    request.context["signing"] = {"disableDoubleEncoding": True}
    request.context["payload_signing_enabled"] = True
    credentials = botocore.credentials.Credentials(keys.access_key, keys.secret_key, keys.token)
    signer = botocore.auth.S3SigV4Auth(credentials, "s3", region)
    monkeypatch.setattr(botocore.auth, "get_current_datetime", lambda: now)
    payload = headers["X-Amz-Content-SHA256"]
    monkeypatch.setattr(signer, "payload", lambda request: payload)
    signer.add_auth(request)
    return str(request.headers["Authorization"])


def sent_headers(lines: str) -> dict[str, str]:
    return dict(line.split(": ", 1) for line in lines.removesuffix("\r\n").split("\r\n"))


@given(
    keys=KEYS,
    verb=st.sampled_from(["GET", "PUT", "HEAD", "DELETE"]),
    name=NAMES,
    host=st.sampled_from(["127.0.0.1:9000", "bucket.s3.eu-west-1.amazonaws.com", "[::1]:9000"]),
    region=st.sampled_from(["us-east-1", "eu-west-1", "garage"]),
    extra=EXTRA,
    body=st.none() | st.binary(max_size=50),
    second=st.integers(10**9, 4 * 10**9),
)
def test_a_signature_equals_that_of_the_sdk(
    keys: Keys,
    verb: str,
    name: str,
    host: str,
    region: str,
    extra: dict[str, str],
    body: bytes | None,
    second: int,
) -> None:
    path = "/bucket/" + quote(name, safe="/-_.~")
    payload = UNSIGNED_PAYLOAD if body is None else payload_digest((memoryview(body),))
    signer = Signer(host, region, lambda: keys, clock=lambda: float(second))
    for _ in range(2):  # the second time from what the first has prepared
        headers = sent_headers(signer.lines(verb, path, tuple(extra.items()), payload))
    ours = headers.pop("authorization")
    now = datetime.datetime.fromtimestamp(second, datetime.timezone.utc)
    given_headers = {n: v for n, v in headers.items() if n in extra}
    given_headers["X-Amz-Content-SHA256"] = payload
    with pytest.MonkeyPatch.context() as monkeypatch:
        url = f"http://{host}{path}"
        theirs = sdk_authorization(keys, region, verb, url, given_headers, now, monkeypatch)
    assert ours == theirs


def test_a_signature_follows_the_clock_and_the_keys() -> None:
    now, keys = [1.7e9], [Keys("A", "B")]
    signer = Signer("h", "r", lambda: keys[0], clock=lambda: now[0])
    seen = {signer.lines("GET", "/b/k")}
    now[0] += 0.4
    seen.add(signer.lines("GET", "/b/k"))
    assert len(seen) == 1
    now[0] += 1
    seen.add(signer.lines("GET", "/b/k"))
    now[0] += 86400
    seen.add(signer.lines("GET", "/b/k"))
    keys[0] = Keys("A", "C")
    seen.add(signer.lines("GET", "/b/k"))
    assert len(seen) == 4


def test_without_keys_nothing_is_signed() -> None:
    assert Signer("h", "r", lambda: None).lines("GET", "/b/k") == "host: h\r\n"


@given(st.lists(st.binary(max_size=30), max_size=5))
def test_the_payload_digest_is_that_of_all_spans_together(spans: list[bytes]) -> None:
    views = [memoryview(span) for span in spans]
    assert payload_digest(views) == hashlib.sha256(b"".join(spans)).hexdigest()


def test_credentials_show_nothing_of_themselves() -> None:
    assert "secret" not in repr(Keys("access", "secret", "token"))
    assert "access" not in repr(Keys("access", "secret", "token"))
