"""HiCacheStats: what an operator needs to see why pages are, or are not, reused."""

from __future__ import annotations

from dataclasses import dataclass

from ..failures import FailureLog


@dataclass
class HiCacheStats:
    """Counts in pages since the cache was made, unless a field says otherwise; the last group
    is the state now."""

    device_hits: int = 0
    """Pages that requests found on the device."""
    host_hits: int = 0
    storage_hits: int = 0
    """Pages that requests got from their own prefetch. An engine that speculates with EAGLE or MTP
    may ask for one page less than there is, to compute the last one again: that is its choice,
    and no loss here."""
    lost_drafts: int = 0
    """Target pages handed to requests whose draft half is a zeroed stand-in. They cost accept
    length: speculation has nothing to attend to there."""

    prefetches: int = 0
    """Requests that asked for a prefetch."""
    resident: int = 0
    """Prefetches with nothing to fetch: all pages are in memory already."""
    below_threshold: int = 0
    """Prefetches of fewer pages than `prefetch_threshold_pages`, before or after the lookup."""
    declined: int = 0
    """Prefetches given up because no host memory was free, or prefetches held their limit."""
    lookups: int = 0
    """Lookups in storage that came to an end."""
    found_pages: int = 0
    """Pages that lookups reported. They say nothing about what can be used; see loaded_pages."""
    first_page_missing: int = 0
    """Lookups whose very first page was absent, so that nothing behind it can be used. Usual
    under write_back while the beginning of a prefix is still in use."""
    loaded_pages: int = 0
    """Usable pages that prefetches read."""
    loaded_drafts: int = 0
    """Of these, pages with their draft."""
    published_pages: int = 0
    """Pages that came in time and were added to the tree; the rest was released again."""

    backed_up_pages: int = 0
    """Device to host."""
    no_host_room: int = 0
    """Pages not backed up because every host page was in use."""
    written_pages: int = 0
    """Host to storage."""
    written_drafts: int = 0
    refused_pages: int = 0
    """Pages that storage did not take; tried again with the next hit."""
    deferred_pages: int = 0
    """Pages not written because `backup_limit_pages` were waiting; tried with the next hit."""
    abandoned_pages: int = 0
    """Pages whose write was given up when a storage was detached."""
    replaced_drafts: int = 0
    """Pages whose lost draft a request computed, or storage brought, again."""

    device_evictions: int = 0
    host_evictions: int = 0
    dropped_pages: int = 0
    """Evicted pages of which no copy was left in memory."""

    device_pages: int = 0
    """Device pages in the tree."""
    host_pages: int = 0
    free_device_pages: int = 0
    free_host_pages: int = 0
    prefetch_queue: int = 0
    """Prefetches that storage threads have not finished."""
    prefetch_held_pages: int = 0
    """Host pages that prefetches hold."""
    backup_queue: int = 0
    backup_held_pages: int = 0
    """Host pages waiting to be written."""
    storage_errors: int = 0
    """Calls to storage that failed as a whole."""
    storage_healthy: bool = True
    """False while an attached storage takes no pages at all."""


class Warnings:
    """Warns of counts that cost speed, each at most once a minute however fast it grows."""

    _TEXTS = (
        (
            "lost_drafts",
            "pages were handed out without their draft; speculation accepts less behind them",
        ),
        (
            "declined",
            "prefetches were given up for lack of host memory; raise host_pages or "
            "prefetch_limit_pages",
        ),
        (
            "deferred_pages",
            "pages were not written yet because storage is slower than what is computed; raise "
            "backup_limit_pages or backup_threads",
        ),
        ("no_host_room", "pages were not backed up because every host page was in use"),
    )

    def __init__(self) -> None:
        self._log = FailureLog("hicache")
        self._seen: dict[str, int] = {}

    def look(self, stats: HiCacheStats) -> None:
        """Compares the counts with those of the last look."""
        for name, text in self._TEXTS:
            count = getattr(stats, name)
            if count > self._seen.get(name, 0):
                self._seen[name] = count
                self._log.note(name, f"{count} {text}")
