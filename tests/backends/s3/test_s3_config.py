"""Options: what is accepted, what is refused and what is never shown."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from backends.s3.misbehaving_server import MisbehavingServer
from backends.s3.rig import KEYS, NAMESPACE, Opened, page
from s3_servers import Server

import hicache_storage
from hicache_storage import ConfigError, Namespace, open_store
from hicache_storage.backends.s3 import S3Backend, S3Config
from hicache_storage.backends.s3.names import Names
from hicache_storage.config import build_config, describe_options, split_url

Open = Callable[..., Opened]
DOCS = Path(__file__).parents[3] / "docs/backends/s3.md"


def config(url: str) -> Any:
    name, given = split_url(url)
    assert name == "s3"
    return build_config(S3Config, name, given)


def test_a_url_names_bucket_prefix_and_options() -> None:
    found = config("s3://pages/a/b/?endpoint=https://s3.example:8443&region=r&concurrency=7")
    assert (found.bucket, found.prefix, found.region) == ("pages", "a/b", "r")
    assert (found.endpoint, found.concurrency) == ("https://s3.example:8443", 7)
    assert config("s3://pages").prefix == ""


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("s3:///prefix", "needs the option 'bucket'"),
        ("s3://a%2Fb/prefix", "expected a bucket"),
        ("s3://b/a//b", "empty"),
        ("s3://b/a/../b", "'..' part"),
        ("s3://b/.", "'.'"),
        ("s3://b/%0a", "control"),
        ("s3://b/a%5Cb", "backslash"),
        ("s3://b/p?endpoint=s3.example", "https://host:port"),
        ("s3://b/p?endpoint=ftp://s3.example", "https://host:port"),
        ("s3://b/p?endpoint=http://s3.example:99999", "https://host:port"),
        ("s3://b/p?endpoint=http://s3.example/?x=1", "https://host:port"),
        ("s3://b/p?endpoint=http://me:pw@s3.example", "user or password"),
        ("s3://b/p?access_key=A", "go together"),
        ("s3://b/p?secret_key=A", "go together"),
        ("s3://b/p?deadline_s=0", "deadline_s must be above 0"),
        ("s3://b/p?connect_timeout_s=-1", "connect_timeout_s must be above 0"),
        ("s3://b/p?stall_timeout_s=nan", "stall_timeout_s must be above 0"),
        ("s3://b/p?concurrency=0", "concurrency must be from 1"),
        ("s3://b/p?attempts=1000", "attempts must be from 1 to 100"),
        ("s3://b/p?addressing=host", "expected one of auto, path, virtual"),
        ("s3://b/p?concurency=3", "did you mean 'concurrency'"),
    ],
)
def test_a_wrong_option_says_what_is_expected(url: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        config(url)


def test_a_prefix_leaves_room_for_the_longest_page_name() -> None:
    """1024 bytes of UTF-8 are S3's limit; it is checked before anything is stored."""
    longest = "0" * 32 + "/" + "a" * 32 + ":" + "f" * 128
    names = Names(config("s3://b/" + "p" * 826).prefix)
    assert len(names.object_name(longest).encode()) == 1024
    for prefix in ("p" * 827, "é" * 414):
        with pytest.raises(ConfigError, match=r"at most 826 leave room.*shorten"):
            config(f"s3://b/{prefix}")


def test_a_model_name_never_lengthens_an_object_name(
    server: MisbehavingServer, opened: Open
) -> None:
    """Model, revision and tenant are in the namespace's digest, not in names."""
    store = opened(server)
    names = set()
    for model in ("m", "org/" * 40 + "model", "../../etc/passwd", "s3://x?y#z"):
        fields = {f: getattr(NAMESPACE, f) for f in NAMESPACE.__dataclass_fields__}
        namespace = Namespace(**fields | {"model": model, "tenant": "t/" * 100})
        before = set(server.objects)
        assert store.store.batch_set(namespace, [KEYS[0]], [page(0)]) == [True]
        names |= set(server.objects) - before
    assert len(names) == 8  # a page and a record each
    assert all(re.fullmatch(r"kv/[0-9a-f]{2}/[0-9a-f]{32}/(n:)?[0-9a-f]{32,64}", n) for n in names)


def test_secrets_are_shown_nowhere(
    server: MisbehavingServer, opened: Open, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    store = opened(server, session_token="t0k3n")
    store.fill(3)
    store.get([0, 1, 2, 9])
    shown = [repr(store.backend), repr(store.backend.config), repr(store.store), caplog.text]
    shown.append(repr(store.backend._here.now()))
    for text in shown:
        assert "s3cr3t" not in text
        assert "t0k3n" not in text
    assert all(s.headers["x-amz-security-token"] == "t0k3n" for s in server.seen)


def test_making_a_backend_does_no_io(server: MisbehavingServer) -> None:
    S3Backend(S3Config("bucket", endpoint=server.url))
    assert server.connects == 0


@pytest.mark.parametrize(
    ("given", "names"),
    [({"prefix": "/kv/"}, "kv/"), ({"prefix": ""}, ""), ({"prefix": "a b/ü"}, "a b/ü/")],
)
def test_object_names_spread_over_the_store(
    server: MisbehavingServer, given: dict[str, str], names: str
) -> None:
    """Two digits of the page hash stand first, so that pages of one namespace, the drafts' too,
    are spread evenly over the store's name ranges from the first page on."""
    config = S3Config("bucket", endpoint=server.url, access_key="a", secret_key="b", **given)
    backend = S3Backend(config)
    backend.open()
    digest = "0" * 31 + "f"
    keys = [f"{digest}/{tag}{key}" for key in KEYS[:200] for tag in ("", "d:")]
    spans = (memoryview(b"h" * 64), memoryview(b"p"))
    assert all(backend.batch_set(keys=keys, pages=[spans] * len(keys)))
    folders = {name.removeprefix(names).partition("/")[0] for name in server.objects}
    assert all(name.startswith(names) for name in server.objects)
    assert len(folders) > 100
    assert all(len(folder) == 2 for folder in folders)
    assert {page.key for page in backend.scan(prefix="")} == set(keys)
    backend.close()


def test_the_docs_have_every_option_and_its_default() -> None:
    rows = re.findall(r"^\| (`[a-z_`, ]+) \| ([^|]+) \|", DOCS.read_text(), re.MULTILINE)
    shown = {name: default for names, default in rows for name in re.findall("[a-z_]+", names)}
    options = {option["name"]: option["default"] for option in describe_options(S3Config)}
    assert options.keys() <= shown.keys()
    for name, default in options.items():
        if isinstance(default, bool):
            assert shown[name].startswith(str(default).lower())
        elif isinstance(default, (int, float)):
            assert shown[name] == f"{default:g}"


@pytest.mark.servers
def test_the_examples_of_the_docs_open_a_store(
    moto: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its code, and every store URL of the page, at a real endpoint instead of those it names."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    opened = []

    def open_here(url: str, **options: Any) -> None:
        options |= {"endpoint": moto.url, "create_bucket": True, "ca_file": None}
        with open_store(url, **options) as store:
            assert store.batch_set(NAMESPACE, [KEYS[0]], [page(0)]) == [True]
            assert store.exists(NAMESPACE, [KEYS[0]]) == 1
            opened.append(url)

    text = DOCS.read_text()
    monkeypatch.setattr(hicache_storage, "open_store", open_here)
    for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(code, {})
    assert len(opened) == 3
    for url in sorted(set(re.findall(r's3://[^\s"`\')]+', text))):
        open_here(url)
    assert len(opened) >= 8
