"""What is left to the SDK: credentials, endpoints, checksums' defaults, listings, bulk deletes."""

from __future__ import annotations

import base64
import datetime
import os
import socket
import sys
import threading
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from backends.s3.misbehaving_server import (
    MisbehavingServer,
    Misbehaviour,
    Seen,
    Sometimes,
    Talk,
    error,
    in_pieces,
)
from backends.s3.rig import KEYS, NAMESPACE, Opened, page, url_of

from hicache_storage import BackendError, BackendUnavailable, ConfigError, open_store
from hicache_storage.backends.s3 import S3Backend, S3Config
from hicache_storage.backends.s3.credentials import Credentials
from hicache_storage.backends.s3.live import Live
from hicache_storage.backends.s3.session import open_session

Open = Callable[..., Opened]


@pytest.fixture(autouse=True)
def no_settings_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


# checksums


def old_store(seen: Seen) -> Misbehaviour | None:
    """Refuses what stores from before 2025 don't know."""
    headers = seen.headers
    known = not any(name.startswith(("x-amz-checksum", "x-amz-sdk-checksum")) for name in headers)
    bulk = seen.verb == "POST" and "content-md5" not in headers
    if known and "aws-chunked" not in headers.get("content-encoding", "") and not bulk:
        return None
    return error(400, "InvalidRequest", "unknown checksum")


def test_an_older_store_works_with_the_defaults(
    server: MisbehavingServer, opened: Open, caplog: pytest.LogCaptureFixture
) -> None:
    server.behave = old_store
    store = opened(server)
    store.fill(20)
    assert store.get(list(range(20))) == [True] * 20
    assert store.store.delete(NAMESPACE, KEYS[:2]) == [True, True]
    assert store.exists([2, 3]) == 2
    store.store.clear()
    assert not server.objects
    assert "one by one instead" in caplog.text
    store.fill(20)
    store.store.clear()
    assert len(server.verbs("POST")) == 1
    assert caplog.text.count("one by one instead") == 1


def test_an_error_over_checksums_names_the_setting(server: MisbehavingServer, opened: Open) -> None:
    server.behave = old_store
    store = opened(server, checksums="when_supported")
    with pytest.raises(BackendUnavailable, match="checksums=when_required"):
        store.fill(1)


@pytest.mark.parametrize(
    ("option", "environment", "expected"),
    [
        (None, None, False),
        (None, "when_supported", True),
        (None, "when_required", False),
        ("when_supported", None, True),
        ("when_supported", "when_required", True),
        ("when_required", "when_supported", False),
    ],
)
def test_checksums_follow_the_option_then_the_environment_then_the_store(
    server: MisbehavingServer,
    opened: Open,
    monkeypatch: pytest.MonkeyPatch,
    option: str | None,
    environment: str | None,
    expected: bool,
) -> None:
    if environment is not None:
        monkeypatch.setenv("AWS_REQUEST_CHECKSUM_CALCULATION", environment)
    store = opened(server, **({"checksums": option} if option else {}))
    store.fill(3)
    for seen in server.verbs("PUT"):
        crc = base64.b64encode(zlib.crc32(seen.body).to_bytes(4, "big")).decode()
        assert seen.headers.get("x-amz-checksum-crc32") == (crc if expected else None)


def test_on_aws_checksums_are_on() -> None:
    assert session(bucket="b").write_checksums
    assert not session(bucket="b", endpoint="http://127.0.0.1:9").write_checksums


# endpoints


def session(**options: Any) -> Any:
    given = {"access_key": "A", "secret_key": "B", "bucket": "b-1"} | options
    return open_session(S3Config(**given))


@pytest.mark.parametrize(
    ("options", "host", "path", "region"),
    [
        ({"region": "eu-west-1"}, "b-1.s3.eu-west-1.amazonaws.com", "/", "eu-west-1"),
        ({}, "b-1.s3.amazonaws.com", "/", "us-east-1"),
        ({"region": "eu-west-1", "bucket": "b.1"}, "s3.eu-west-1.amazonaws.com", "/b.1/", None),
        ({"addressing": "path"}, "s3.amazonaws.com", "/b-1/", None),
        ({"region": "cn-north-1"}, "b-1.s3.cn-north-1.amazonaws.com.cn", "/", "cn-north-1"),
        ({"endpoint": "http://127.0.0.1:9000"}, "127.0.0.1:9000", "/b-1/", "us-east-1"),
        ({"endpoint": "http://[::1]:9000"}, "[::1]:9000", "/b-1/", None),
        ({"endpoint": "https://s3.example"}, "s3.example", "/b-1/", None),
        ({"endpoint": "https://s3.example:443"}, "s3.example", "/b-1/", None),
        (
            {"endpoint": "https://s3.example", "addressing": "virtual"},
            "b-1.s3.example",
            "/",
            None,
        ),
        ({"endpoint": "https://s3.example/gate"}, "s3.example", "/gate/b-1/", None),
        (
            {"bucket": "arn:aws:s3:eu-west-3:123456789012:accesspoint/ap"},
            "ap-123456789012.s3-accesspoint.eu-west-3.amazonaws.com",
            "/",
            "eu-west-3",
        ),
    ],
)
def test_the_endpoint_is_where_the_sdk_would_ask(
    options: dict[str, str], host: str, path: str, region: str | None
) -> None:
    endpoint = session(**options).endpoint
    assert (endpoint.host_header, endpoint.path) == (host, path)
    if region is not None:
        assert endpoint.region == region


def test_endpoint_and_region_come_from_the_usual_variables(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9001")
    monkeypatch.setenv("AWS_REGION", "ignored-1")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "garage")
    found = session()
    assert found.endpoint.shown == "http://127.0.0.1:9001/b-1"
    assert found.endpoint.region == "garage"
    assert not found.write_checksums


def test_virtual_addressing_names_the_bucket_in_the_host(
    server: MisbehavingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    look_up = socket.getaddrinfo
    here = "127.0.0.1"

    def resolve(host: str, *rest: Any) -> Any:
        return look_up(here if host == "bucket.s3.test" else host, *rest)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    url = url_of(server, addressing="virtual").replace(here, "s3.test")
    with open_store(url) as store:
        assert store.batch_set(NAMESPACE, [KEYS[0]], [page(0)]) == [True]
        assert store.exists(NAMESPACE, [KEYS[0]]) == 1
    assert {s.headers["host"] for s in server.seen} == {f"bucket.s3.test:{server.port}"}


# credentials


def test_credentials_come_from_the_usual_places(
    server: MisbehavingServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    (tmp_path / "credentials").write_text(
        "[mine]\naws_access_key_id = FROMFILE\naws_secret_access_key = x\n"
    )
    url = f"s3://bucket/kv?endpoint={server.url}"
    with pytest.raises(ConfigError, match=r"no credentials.*anonymous=true"):
        open_store(url)
    open_store(url, profile="mine").close()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "FROMENV")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    open_store(url).close()
    open_store(url, access_key="FROMOPTION", secret_key="x").close()
    open_store(url, anonymous=True).close()
    signed = [seen.headers.get("authorization", "nothing") for seen in server.seen]
    for expected, found in zip(
        ["FROMFILE", "FROMENV", "FROMOPTION", "nothing"], signed, strict=True
    ):
        assert expected in found
    with pytest.raises(ConfigError, match="nobody"):
        open_store(url, profile="nobody")


class Renewing:
    """Credentials as an instance role gives them: each asking may bring new ones."""

    def __init__(self) -> None:
        self.number = 1
        self.asked = 0
        self.delay_s = 0.0
        self.error: Exception | None = None

    def refresh_needed(self) -> bool:
        return True

    def get_frozen_credentials(self) -> Any:
        self.asked += 1
        time.sleep(self.delay_s)
        if self.error is not None:
            raise self.error
        names = ("access_key", "secret_key", "token")
        return type("Frozen", (), dict(zip(names, (f"KEY{self.number}", "s", "t"), strict=True)))


def with_source(store: Opened, source: Renewing) -> None:
    plane = store.backend._here.now().plane
    plane.credentials = Credentials(source)
    plane._signer._keys = plane.credentials.keys


def test_expired_credentials_are_renewed_and_cost_no_page(
    server: MisbehavingServer, opened: Open
) -> None:
    store = opened(server)
    source = Renewing()
    with_source(store, source)
    store.fill(10)
    source.number = 2
    server.behave = Sometimes(
        error(400, "ExpiredToken"), lambda seen: "KEY1/" in seen.headers["authorization"]
    )
    assert store.exists(list(range(10))) == 10
    assert store.get(list(range(10))) == [True] * 10
    assert source.asked == 2
    store.fill(10)
    assert "KEY2/" in server.seen[-1].headers["authorization"]


def test_a_renewal_is_not_waited_for(server: MisbehavingServer, opened: Open) -> None:
    store = opened(server, deadline_s=20)
    source = Renewing()
    with_source(store, source)
    store.fill(10)
    source.delay_s = 3
    credentials = store.backend._here.now().plane.credentials
    credentials._looked_s = 0.0
    started = time.monotonic()
    assert store.get(list(range(10))) == [True] * 10
    assert time.monotonic() - started < 2.5
    assert source.asked == 2


def test_a_renewal_that_fails_leaves_the_credentials_at_hand(
    server: MisbehavingServer, opened: Open
) -> None:
    store = opened(server)
    source = Renewing()
    with_source(store, source)
    source.error = OSError("no metadata server")
    credentials = store.backend._here.now().plane.credentials
    credentials._start_renewal().join()
    assert isinstance(credentials.error, OSError)
    store.fill(2)
    assert store.get([0, 1]) == [True, True]
    with pytest.raises(OSError, match="no metadata"):
        Credentials(source)


def test_the_sdks_own_refreshing_credentials_are_renewed() -> None:
    from botocore.credentials import RefreshableCredentials

    def soon(number: int) -> dict[str, Any]:
        expiry = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(seconds=60)
        return {
            "access_key": f"KEY{number}", "secret_key": "s", "token": "t",
            "expiry_time": expiry.isoformat(),
        }  # fmt: skip

    numbers = iter(range(2, 10))
    source = RefreshableCredentials.create_from_metadata(
        soon(1), lambda: soon(next(numbers)), method="test"
    )
    credentials = Credentials(source)
    keys = credentials.keys()
    assert keys is not None
    assert credentials.rejected(keys, time.monotonic() + 10)
    again = credentials.keys()
    assert again is not None
    assert again.access_key != keys.access_key


def test_first_calls_from_many_threads_make_one_client(server: MisbehavingServer) -> None:
    """The SDK's default session isn't safe to make clients from in threads."""
    for _ in range(3):
        config = S3Config("bucket", endpoint=server.url, access_key="a", secret_key="b", region="r")
        made = S3Backend(config)
        barrier = threading.Barrier(24)

        def first(made: S3Backend, barrier: threading.Barrier) -> Live:
            barrier.wait()
            assert made.exists(keys=[f"{'0' * 32}/{KEYS[0]}"]) == 0
            return made._here.now()

        with ThreadPoolExecutor(24) as pool:
            lives = list(pool.map(first, [made] * 24, [barrier] * 24))
        assert len({id(live) for live in lives}) == 1
        made.close()


# listings and bulk deletes


def test_scan_and_clear_go_beyond_one_listing_and_touch_only_pages(
    server: MisbehavingServer, opened: Open
) -> None:
    store = opened(server)
    digest = "ab" * 16
    ours = {f"kv/{i % 256:02x}/{digest}/{i % 256:02x}{i:062x}" for i in range(2300)}
    foreign = {
        "other/file", "kvx/00/page", "kv", "kv/readme.txt", "kv/.probe", f"kv/{digest}/{KEYS[0]}",
        f"kv/00/{digest}/ff{'0' * 62}", f"kv/00/{digest}/00{'0' * 62}/more",
        f"kv/00/{digest}/00{'0' * 62}.tmp",
    }  # fmt: skip
    server.objects |= dict.fromkeys(ours | foreign, b"x" * 7)
    assert sum(1 for _ in store.store.scan()) == 2300
    assert store.store.usage()[:2] == (2300, 2300 * 7)
    assert len(list(store.store.scan(f"{digest}/00"))) == len([n for n in ours if "kv/00/" in n])
    found = next(iter(store.store.scan()))
    assert found.used_s == 1767323045.0
    store.store.clear()
    assert set(server.objects) == foreign
    assert len(server.verbs("POST")) == store.backend.counts.requests["POST"] == 3


def test_clear_says_if_a_page_is_left(server: MisbehavingServer, opened: Open) -> None:
    store = opened(server, attempts=1)
    store.fill(3)
    server.behave = Sometimes(
        error(500),
        lambda s: s.verb == "DELETE" and s.path.endswith(KEYS[1]),
    )

    def refuses(seen: Seen) -> Misbehaviour | None:
        return error(501, "NotImplemented") if seen.verb == "POST" else at_delete(seen)

    at_delete = server.behave
    server.behave = refuses
    # If the refused one is the first to be answered, its own reason is the error.
    with pytest.raises(BackendError, match=r"could not delete all|: 500"):
        store.store.clear()


@pytest.mark.parametrize("status", [403, 500])
def test_a_listing_that_fails_raises_an_error_of_this_package(
    server: MisbehavingServer, opened: Open, status: int
) -> None:
    store = opened(server)
    store.fill(1)
    server.behave = Sometimes(error(status, "Nope"), lambda seen: "list-type" in seen.query)
    with pytest.raises(BackendUnavailable, match="Nope") as caught:
        list(store.store.scan())
    assert caught.value.retryable == (status == 500)


def test_deleting_says_which_pages_are_gone(server: MisbehavingServer, opened: Open) -> None:
    store = opened(server, attempts=1)
    store.fill(4)

    def fails(talk: Talk, seen: Seen) -> None:
        talk.server.sleep(0.5)  # a store of which the first answer is a failure is out of order
        error(500)(talk, seen)

    server.behave = Sometimes(fails, lambda seen: seen.path.endswith(KEYS[2]))
    gone = store.store.delete(NAMESPACE, [KEYS[i] for i in (0, 1, 2, 99)])
    assert gone == [True, True, False, True]


def test_bytes_and_requests_are_counted(server: MisbehavingServer, opened: Open) -> None:
    store = opened(server)
    store.fill(5)
    store.get([0, 1, 2, 77])
    store.exists([0, 1])
    counts = store.backend.counts
    stored = len(page(0)) + 64
    assert counts.requests == {"GET": 5, "PUT": 6, "HEAD": 2}  # a probe, a record
    assert counts.received_bytes == 3 * stored
    assert counts.sent_bytes == 5 * stored + 4096 + 64


def test_the_missing_sdk_is_named(
    monkeypatch: pytest.MonkeyPatch, server: MisbehavingServer
) -> None:
    for name in ("session", "control"):
        monkeypatch.delitem(sys.modules, f"hicache_storage.backends.s3.{name}")
    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(ConfigError, match=r"pip install 'hicache-storage\[s3\]'"):
        open_store(url_of(server))


def test_bodies_in_pieces_are_counted_too(server: MisbehavingServer, opened: Open) -> None:
    store = opened(server)
    store.fill(1)
    server.behave = Sometimes(in_pieces(), lambda seen: seen.verb == "GET")
    store.get([0])
    assert store.backend.counts.received_bytes == len(page(0)) + 64
