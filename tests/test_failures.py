"""FailureLog: every failure is counted, few are logged."""

from __future__ import annotations

import logging

import pytest

from hicache_storage.failures import FailureLog


def test_each_kind_is_logged_at_once_and_then_at_most_once_an_interval(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr("hicache_storage.failures.time.monotonic", lambda: now)
    log = FailureLog("store 's3'", interval_s=60)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            log.note("read", OSError(5, "I/O error"))
        log.note("write", "the disk is full")
        now = 61.0
        log.note("read", OSError(5, "I/O error"))
    assert caplog.messages == [
        "store 's3': read: OSError: [Errno 5] I/O error",
        "store 's3': write: the disk is full",
        "store 's3': read: OSError: [Errno 5] I/O error (3 since the last such line)",
    ]
    assert log.counts == {"read": 4, "write": 1}
