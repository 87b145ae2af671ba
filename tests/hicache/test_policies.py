"""WriteRule and PrefetchRule: the choices themselves, without any I/O."""

from __future__ import annotations

from typing import Any

import pytest

from hicache_storage import ConfigError
from hicache_storage.hicache.policies import PrefetchRule, WriteRule


@pytest.mark.parametrize(
    ("policy", "first_written"),
    [("write_through", 0), ("write_through_selective", 3), ("write_back", None)],
)
def test_each_write_policy_writes_from_its_own_hit_on(
    policy: Any, first_written: int | None
) -> None:
    rule = WriteRule(policy, threshold=3)
    written = [hits for hits in range(6) if rule.writes(hits)]
    assert written == ([] if first_written is None else list(range(first_written, 6)))


@pytest.mark.parametrize(
    ("policy", "waited_s", "ready"),
    [
        ("best_effort", 0.0, True),
        ("wait_complete", 1e9, False),
        ("timeout", 2.9, False),
        ("timeout", 3.0, True),
    ],
)
def test_a_request_waits_as_long_as_its_policy_says(
    policy: Any, waited_s: float, ready: bool
) -> None:
    rule = PrefetchRule(policy, timeout_base_s=1.0, timeout_per_page_s=0.25)
    assert rule.ready(pages=8, waited_s=waited_s, finished=False) is ready
    assert rule.ready(pages=8, waited_s=0.0, finished=True)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: WriteRule("write_around"), "write_policy must be one of write_through, "),  # type: ignore[arg-type]
        (lambda: WriteRule(threshold=0), "write_threshold"),
        (lambda: PrefetchRule("now"), "prefetch_policy must be one of best_effort, "),  # type: ignore[arg-type]
        (lambda: PrefetchRule(timeout_base_s=-1), "prefetch_timeout_base_s"),
        (lambda: PrefetchRule(timeout_per_page_s=float("nan")), "prefetch_timeout_per_page_s"),
        (lambda: PrefetchRule(threshold_pages=0), "prefetch_threshold_pages"),
        (lambda: PrefetchRule(limit_pages=True), "prefetch_limit_pages"),
    ],
)
def test_an_option_out_of_range_is_named(make: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        make()
