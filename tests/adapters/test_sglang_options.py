"""The extra config: whatever way SGLang hands it over, it means one thing or is refused."""

from __future__ import annotations

import copy
import json
import logging
from typing import Any

import pytest

from hicache_storage import ConfigError
from hicache_storage.adapters.sglang_options import SGLANGS_OWN, read_options
from hicache_storage.opening import build_from

SECRET = "hunter2-secret"


@pytest.mark.parametrize(
    "given",
    [{"bucket": "b", "tenant": "t"}, '{"bucket": "b", "tenant": "t"}'],
    ids=["mapping", "json"],
)
def test_a_mapping_and_its_json_are_the_same(given: Any) -> None:
    found = read_options("s3", given)
    assert found.url == {"backend": "s3", "bucket": "b", "breaker": True}
    assert found.adapter.tenant == "t"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("@x.json", "only SGLang reads such files"),
        ("[]", "must be a JSON object of options, got list"),
        ([], "must be a JSON object of options, got list"),
        (7, "must be a JSON object of options, got int"),
        ('{"bucket": ', "is not JSON"),
        ({7: "x"}, "an option's name must be text, got 7"),
        ({"tenant": 7}, "'tenant'.*expected text, got int"),
        ({"pairing": "sometimes"}, "'pairing'.*expected one of auto, best_effort, required"),
        ({"url": 7}, "'url' must be text, got int"),
    ],
)
def test_anything_else_is_refused_and_says_what_was_expected(given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_options("s3", given)


def test_numbers_may_come_as_text() -> None:
    assert read_options("memory", {"capacity": "128"}).url == {
        "backend": "memory",
        "capacity": "128",
    }


def test_the_callers_mapping_is_left_alone() -> None:
    given = {"bucket": "b", "interface_v1": 1, "retry": {"attempts": 2}, "tenant": "t"}
    before = copy.deepcopy(given)
    read_options("s3", given)
    assert given == before


def test_sglangs_own_names_are_its_own() -> None:
    given = {**dict.fromkeys(SGLANGS_OWN, 1), "path": "/x"}
    assert read_options("file", given).url == {"backend": "file", "path": "/x"}


@pytest.mark.parametrize(
    ("given", "nearest"),
    [
        ({"pairng": "required"}, "pairing"),
        ({"bukcet": "b"}, "bucket"),
        ({"bucket": "b", "retri.attempts": 3}, "retry.attempts"),
        ({"prefetch_treshold": 3}, "prefetch_threshold"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest(given: Any, nearest: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown option.*did you mean '{nearest}'"):
        read_options("s3", given)


def test_a_url_names_the_backend_and_options_beside_it_count() -> None:
    found = read_options("", {"url": "file:///var/kv?fsync=false", "retry.attempts": 2})
    assert (found.backend, found.url) == ("file", "file:///var/kv?fsync=false")
    assert found.overrides == {"retry.attempts": 2}


@pytest.mark.parametrize(
    ("backend", "given"),
    [
        ("s3", {"url": "file:///x"}),
        ("", {"url": "file:///x", "backend": "lmdb"}),
        ("s3", {"backend": "lmdb"}),
    ],
)
def test_two_names_of_a_backend_are_refused(backend: str, given: Any) -> None:
    with pytest.raises(ConfigError, match="must be one"):
        read_options(backend, given)


def test_without_any_name_the_message_says_how_to_give_one() -> None:
    with pytest.raises(ConfigError, match=r"\"url\": \"s3://bucket/prefix\""):
        read_options("", None)


def test_the_extra_config_goes_before_the_environment_and_that_before_defaults(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert read_options("memory", {}).adapter.tenant == ""
    monkeypatch.setenv("HICACHE_STORAGE_SGLANG_TENANT", "environment")
    monkeypatch.setenv("HICACHE_STORAGE_URL", "memory://")
    assert read_options("", {}).backend == "memory"
    assert read_options("memory", {}).adapter.tenant == "environment"
    assert read_options("memory", {"tenant": "config"}).adapter.tenant == "config"
    assert read_options("", {"url": "file:///x"}).backend == "file"


@pytest.mark.parametrize(
    ("given", "breaker"),
    [({}, True), ({"breaker": False}, False), ({"breaker.failures": 2}, None)],
)
def test_a_backend_with_a_network_has_a_breaker_unless_told_otherwise(
    given: Any, breaker: bool | None
) -> None:
    url = read_options("s3", {"bucket": "b", **given}).url
    assert isinstance(url, dict)
    assert url.get("breaker") is breaker
    assert "breaker" not in read_options("file", {"path": "/x"}).url


def test_no_error_and_no_line_of_the_log_shows_a_secret(
    caplog: pytest.LogCaptureFixture,
) -> None:
    given = {"bucket": "b", "secret_key": SECRET, "access_key": "a"}

    def build(config: Any) -> None:
        options = read_options("s3", config)
        build_from(options.url, **options.overrides)

    wrong = [
        json.dumps(given)[:-1],
        {**given, "bukcet": 1},
        {**given, "concurrency": "many"},
        {**given, "pairing": "x"},
    ]
    with caplog.at_level(logging.DEBUG):
        for config in wrong:
            with pytest.raises(ConfigError) as raised:
                build(config)
            assert SECRET not in str(raised.value)
            assert SECRET not in repr(raised.value.__cause__)
    assert SECRET not in caplog.text
