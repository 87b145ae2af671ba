"""Policies: when pages are written down the hierarchy, and how long a prefetch is waited for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from ..errors import ConfigError

WritePolicy = Literal["write_through", "write_through_selective", "write_back"]
PrefetchPolicy = Literal["best_effort", "wait_complete", "timeout"]


@dataclass(frozen=True)
class WriteRule:
    """When a device page is copied to the host, and from there to storage."""

    policy: WritePolicy = "write_through"
    """"write_through": when it is inserted. "write_through_selective": once it was hit
    `threshold` times. "write_back": when the device gives it up; storage then learns the end of
    a prefix before its beginning, and can serve it only when all of it was given up."""
    threshold: int = 2
    """Hits after which a page is worth writing; for write_through_selective."""

    def __post_init__(self) -> None:
        check_choice("write_policy", self.policy, WritePolicy)
        check_least("write_threshold", self.threshold, 1)

    def writes(self, hits: int) -> bool:
        """Whether a page with that many hits is written now, on an insert or a hit."""
        if self.policy == "write_through_selective":
            return hits >= self.threshold
        return self.policy == "write_through"


@dataclass(frozen=True)
class PrefetchRule:
    """How long a request waits for its prefetch, and which prefetches are worth starting."""

    policy: PrefetchPolicy = "wait_complete"
    """"best_effort": not at all; what has arrived when the request starts is used.
    "wait_complete": until all has arrived. "timeout": at most `timeout_base_s` +
    `timeout_per_page_s` x pages."""
    timeout_base_s: float = 1.0
    timeout_per_page_s: float = 0.004
    """256 pages take about one second more."""
    threshold_pages: int = 1
    """Fewer pages than this are not worth a prefetch: neither asked for nor fetched."""
    limit_pages: int = 1
    """Most host pages that all prefetches together may hold."""

    def __post_init__(self) -> None:
        check_choice("prefetch_policy", self.policy, PrefetchPolicy)
        check_least("prefetch_timeout_base_s", self.timeout_base_s, 0)
        check_least("prefetch_timeout_per_page_s", self.timeout_per_page_s, 0)
        check_least("prefetch_threshold_pages", self.threshold_pages, 1)
        check_least("prefetch_limit_pages", self.limit_pages, 1)

    def ready(self, *, pages: int, waited_s: float, finished: bool) -> bool:
        """Whether a request for `pages` pages may start after `waited_s` seconds."""
        if finished or self.policy == "best_effort":
            return True
        if self.policy == "timeout":
            return waited_s >= self.timeout_base_s + self.timeout_per_page_s * pages
        return False

    @property
    def text(self) -> str:
        """The rule in words, for the start-up line."""
        if self.policy == "timeout":
            return f"timeout of {self.timeout_base_s} s + {self.timeout_per_page_s} s a page"
        return self.policy


def check_choice(name: str, value: object, choices: object) -> None:
    """Raises ConfigError, naming the option, unless `value` is one of a Literal's."""
    known = get_args(choices)
    if value not in known:
        raise ConfigError(f"{name} must be one of {', '.join(known)}; got {value!r}")


def check_least(name: str, value: float, least: float) -> None:
    """Raises ConfigError, naming the option, unless `value` is a number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= least:
        raise ConfigError(f"{name} must be a number of at least {least}, got {value!r}")
