"""Options: one precedence, nothing accepted and ignored, nothing secret shown."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache_storage import ConfigError, open_store
from hicache_storage.config import (
    build_config,
    describe_options,
    masked_url,
    option,
    parse_size,
    split_url,
)


@dataclass(frozen=True)
class Config:
    path: str = option(url="location", doc="Where the pages lie.")
    capacity: int | None = option(None, unit="bytes", doc="Most bytes to hold.")
    threads: int = option(4, doc="Threads that do I/O.")
    wait_s: float = option(1.5, unit="s", doc="How long to wait.")
    sync: bool = option(False, doc="Whether to sync.")
    mode: Literal["fast", "safe"] = option("fast", doc="How to write.")
    token: str | None = option(None, doc="Password.", secret=True)
    pin: int | None = option(None, doc="Secret number.", secret=True)
    key: bool = option(False, doc="Secret flag.", secret=True)


def built(given_options: dict[str, Any] | str, environment: dict[str, str] | None = None) -> Any:
    if isinstance(given_options, str):
        given_options = dict(split_url(given_options)[1])
    with mock.patch.dict("os.environ", environment or {}, clear=True):
        return build_config(Config, "mine", given_options)


# -- precedence --------------------------------------------------------------------------------


@given(explicit=st.booleans(), url=st.booleans(), environment=st.booleans())
def test_explicit_beats_url_beats_environment_beats_default(
    explicit: bool, url: bool, environment: bool
) -> None:
    seen: list[int] = []

    class Recorder:
        def __init__(self, config: Config) -> None:
            seen.append(config.threads)
            raise ConfigError("seen")

    Recorder.Config = Config  # type: ignore[attr-defined]
    variables = {"HICACHE_STORAGE_MINE_THREADS": "30"} if environment else {}
    where = "mine:///a" + ("?threads=20" if url else "")
    options = {"threads": 10} if explicit else {}
    with (
        mock.patch.dict("os.environ", variables, clear=True),
        mock.patch("hicache_storage.opening.load_backend", return_value=Recorder),
        pytest.raises(ConfigError, match="seen"),
    ):
        open_store(where, **options)
    expected = 10 if explicit else 20 if url else 30 if environment else 4
    assert seen == [expected]


def test_the_path_that_counts_is_the_one_used_and_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Set by environment, by URL and explicitly, all three differing."""
    caplog.set_level(logging.INFO, "hicache_storage")
    monkeypatch.setenv("HICACHE_STORAGE_FILE_PATH", str(tmp_path / "environment"))
    cases: list[tuple[str, str, dict[str, Any]]] = [
        ("environment", "file://", {}),
        ("url", f"file://{tmp_path}/url", {}),
        ("explicit", f"file://{tmp_path}/url2", {"path": str(tmp_path / "explicit")}),
    ]
    for name, url, options in cases:
        caplog.clear()
        open_store(url, **options).close()
        assert (tmp_path / name).is_dir()
        lines = [record.getMessage() for record in caplog.records if record.levelname == "INFO"]
        assert [line for line in lines if str(tmp_path / name) in line] == lines[:1]
    assert not (tmp_path / "url2").exists()


def test_the_store_itself_may_come_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HICACHE_STORAGE_URL", raising=False)
    with pytest.raises(ConfigError, match="give a URL or set HICACHE_STORAGE_URL"):
        open_store()
    monkeypatch.setenv("HICACHE_STORAGE_URL", "memory://?capacity=1MiB")
    with open_store() as store:
        assert store.usage().capacity_bytes == 1 << 20


def test_an_explicit_path_beats_the_location_of_the_url() -> None:
    assert built({"url:location": "/a", "path": "/b"}).path == "/b"


# -- nothing accepted and ignored --------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "near"),
    [("capasity", "capacity"), ("Threads", "threads"), ("wait", "wait_s"), ("xyzzy", None)],
)
@pytest.mark.parametrize("way", ["url", "mapping"])
def test_an_unknown_option_is_refused_with_the_nearest_name(
    name: str, near: str | None, way: str
) -> None:
    given_options: Any = f"mine:///a?{name}=1" if way == "url" else {"path": "/a", name: 1}
    words = rf"'mine' has no option '{name}'; did you mean '{near}'\? \(known: capacity, "
    if near is None:
        words = rf"'mine' has no option '{name}' \(known: capacity, "
    with pytest.raises(ConfigError, match=words):
        built(given_options)


def test_a_backend_without_options_takes_none() -> None:
    assert build_config(None, "plain", {}) is None
    with pytest.raises(ConfigError, match=r"no option 'a' \(known: none\)"):
        build_config(None, "plain", {"a": 1})
    with pytest.raises(ConfigError, match="takes no location"):
        build_config(None, "plain", split_url("plain:///a")[1])


def test_a_missing_option_is_named_with_what_it_means() -> None:
    with pytest.raises(ConfigError, match="needs the option 'path': Where the pages lie"):
        built("mine://")


def test_an_option_given_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="gives 'threads' twice"):
        built("mine:///a?threads=1&threads=2")


@given(st.dictionaries(st.sampled_from(["threads", "wait_s", "sync"]), st.just("1")))
def test_what_is_given_is_not_changed(given_options: dict[str, str]) -> None:
    """It may be shared by several ranks or stores."""
    whole: dict[str, Any] = {"path": "/a", **given_options}
    before = dict(whole)
    built(whole)
    assert whole == before
    where = {"backend": "memory", "capacity": "1MiB"}
    open_store(where).close()
    assert where == {"backend": "memory", "capacity": "1MiB"}


@pytest.mark.parametrize("where", [{}, {"path": "/a"}, {"backend": ""}, {"backend": 3}])
def test_a_mapping_names_its_backend(where: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match='needs "backend"'):
        open_store(where)


# -- URLs --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("mine:///var/cache", "/var/cache"),
        ("mine://relative/dir", "relative/dir"),
        ("mine:///with%20blank%23%3F", "/with blank#?"),
        ("mine:///org%2Fmodel", "/org/model"),
        ("mine:///ünïcode", "/ünïcode"),
        ("mine:///a/b/", "/a/b/"),
    ],
)
def test_the_location_of_a_url_is_its_host_and_path(url: str, path: str) -> None:
    assert built(url).path == path


@pytest.mark.parametrize(
    "url",
    ["", "/var/cache", "mine:/a", "mine", "://a", "mine:///a?threads", "mine://[::1/a", "a b://c"],
)
def test_what_is_no_url_is_refused_with_an_example(url: str) -> None:
    with pytest.raises(ConfigError, match="is not a store URL; expected NAME://LOCATION"):
        split_url(url)


@pytest.mark.parametrize("url", ["mine:///a#b", "mine:///a#", "mine:///a?threads=1#b"])
def test_a_hash_sign_in_a_url_must_be_written_as_23(url: str) -> None:
    with pytest.raises(ConfigError, match="write it as %23"):
        split_url(url)


# -- values ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("threads", "8", 8),
        ("threads", 8, 8),
        ("threads", 8.0, 8),
        ("wait_s", "2", 2.0),
        ("wait_s", 3, 3.0),
        ("sync", "true", True),
        ("sync", "ON", True),
        ("sync", "0", False),
        ("sync", True, True),
        ("capacity", "10GiB", 10 << 30),
        ("capacity", "1.5 kB", 1500),
        ("capacity", 4096, 4096),
        ("capacity", None, None),
        ("mode", "safe", "safe"),
        ("path", Path("/a/b"), "/a/b"),
    ],
)
def test_values_become_their_type_from_text_too(name: str, value: Any, expected: Any) -> None:
    found = getattr(built({"path": "/a", name: value}), name)
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("threads", "many", "invalid literal"),
        ("threads", 1.5, "expected a whole number, got 1.5"),
        ("threads", True, "expected int, got True"),
        ("threads", None, "NoneType"),
        ("threads", [1], "list"),
        ("wait_s", "soon", "could not convert"),
        ("sync", "perhaps", "expected true or false, got 'perhaps'"),
        ("capacity", "10 apples", "is not a size; write bytes, or 10GiB"),
        ("capacity", "-1", "is not a size"),
        ("mode", "wild", "expected one of fast, safe"),
        ("path", 3, "expected text, got int"),
        ("path", None, "expected text, got NoneType"),
    ],
)
def test_a_value_of_another_type_is_refused_with_its_field_and_meaning(
    name: str, value: Any, words: str
) -> None:
    with pytest.raises(ConfigError, match=rf"'mine', option '{name}' \(.*\): .*{words}"):
        built({"path": "/a", name: value})


@given(st.integers(0, 2**63), st.sampled_from(["", "B"]))
def test_a_size_in_bytes_is_exact(count: int, unit: str) -> None:
    assert parse_size(f"{count}{unit}") == count


@given(st.integers(0, 10**6), st.sampled_from(["K", "M", "G", "T"]), st.booleans(), st.booleans())
def test_sizes_have_decimal_and_binary_units(
    count: int, letter: str, binary: bool, lower: bool
) -> None:
    text = f"{count}{letter}{'i' if binary else ''}B"
    power = "KMGT".index(letter) + 1
    assert (
        parse_size(text.lower() if lower else text) == count * (1024 if binary else 1000) ** power
    )


@pytest.mark.parametrize("text", ["", "B", "1.5", "1.5B", "0.1KiB", "1e3", "½", "10 GiBB", "nan"])
def test_what_is_no_whole_number_of_bytes_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        parse_size(text)


# -- secrets -----------------------------------------------------------------------------------

SECRET = "hunter2hunter2"


@given(
    st.sampled_from(
        [
            f"mine:///a?token={SECRET}&threads=x",
            f"mine:///a?token={SECRET}&nosuch=1",
            f"mine:///a?pin={SECRET}",
            f"mine:///a?key={SECRET}",
            f"mine:///a?token={SECRET}#",
            f"mine:/a?token={SECRET}",
            f"mine:///a?token={SECRET}&token={SECRET}",
            f"mine://user:{SECRET}@[host/a?threads",
            f"mine://?token={SECRET}",
        ]
    )
)
def test_no_error_about_a_url_shows_a_secret(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        built(url)
    error: BaseException | None = caught.value
    while error is not None:
        assert SECRET not in f"{error} {error!r}"
        error = error.__cause__


def test_the_repr_of_a_config_hides_secrets() -> None:
    config = built({"path": "/a", "token": SECRET, "pin": 424242})
    assert config.token == SECRET
    assert SECRET not in repr(config)
    assert "424242" not in repr(config)
    assert "'/a'" in repr(config)


@given(st.text(st.sampled_from("ab:/?@#&="), max_size=20))
def test_masking_takes_any_text(text: str) -> None:
    assert "?" not in masked_url(text)


def test_masking_keeps_what_names_the_store() -> None:
    assert (
        masked_url(f"s3://user:{SECRET}@host:9000/bucket?secret={SECRET}")
        == "s3://host:9000/bucket"
    )
    assert masked_url("file:///var/cache/kv") == "file:///var/cache/kv"


# -- listings ----------------------------------------------------------------------------------


def test_every_option_is_described_with_unit_and_default() -> None:
    described = {one["name"]: one for one in describe_options(Config)}
    assert described["path"]["required"]
    assert described["capacity"]["unit"] == "bytes"
    assert described["capacity"]["default"] is None
    assert not described["capacity"]["required"]
    assert described["threads"] == {
        "name": "threads",
        "type": "int",
        "unit": "",
        "default": 4,
        "required": False,
        "doc": "Threads that do I/O.",
    }
    assert describe_options(None) == []


def test_every_option_of_every_backend_is_documented() -> None:
    from hicache_storage.discovery import find_backends, load_backend
    from hicache_storage.middleware.stack import INNERMOST_FIRST

    configs = [getattr(load_backend(name), "Config", None) for name in find_backends()]
    for config in [*configs, *(cls.Config for cls in INNERMOST_FIRST.values())]:
        for one in describe_options(config):
            assert one["doc"].endswith("."), (config, one["name"])
            timed = one["name"].endswith("_s")
            assert one["unit"] in ("s", "seconds") or not timed, (config, one["name"])
            assert (
                one["default"] is None
                or not isinstance(one["default"], float)
                or math.isfinite(one["default"])
            )
