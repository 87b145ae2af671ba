"""A storage may come and go at any time; nothing of it stays behind."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest
from hicache.rig import SOON_S, Gate, Rig, chain

from hicache_storage import ConfigError, Namespace, PairedStore, StoreClosed

MakeRig = Callable[..., Rig]


def storage_threads() -> list[threading.Thread]:
    mine = ("hicache-prefetch-", "hicache-backup-")
    return [t for t in threading.enumerate() if t.name.startswith(mine)]


def test_close_drains_what_is_queued(rig: MakeRig) -> None:
    one = rig(storage={"backup_limit_pages": 32})
    prompts = [chain(2, str(i)) for i in range(10)]
    for prompt in prompts:
        one.cache.release(one.serve(prompt))
    assert one.cache.close(SOON_S) == 0
    assert one.backend.stored() >= {page_hash for prompt in prompts for page_hash in prompt}
    assert storage_threads() == []
    one.settle()


def test_close_reports_what_it_gave_up_and_keeps_to_its_time(
    rig: MakeRig, caplog: pytest.LogCaptureFixture
) -> None:
    one = rig(device_pages=32, host_pages=32, storage={"backup_limit_pages": 32})
    gate = one.backend.on = Gate("batch_set")
    for i in range(10):
        one.cache.release(one.serve(chain(2, str(i))))
    one.until(gate.entered.is_set)
    assert one.cache.close(0.05) == 20
    assert "20 pages not written and 1 operations in calls" in caplog.text
    assert one.pools.host_allocator.available == 32 - 20
    one.cache.clear()
    assert one.pools.host_allocator.available == 32 - 2, "only the page in the call stays"
    gate.open()
    for thread in storage_threads():
        thread.join(SOON_S)
    assert one.cache.close() == 0
    assert one.cache.stats().abandoned_pages == 18
    one.settle()


def test_a_second_close_and_a_detach_without_storage_do_nothing(rig: MakeRig) -> None:
    one = rig()
    one.keep(chain(2))
    for _ in range(2):
        assert one.cache.close() == 0
        assert one.cache.detach_storage() == 0


def test_after_close_memory_goes_on_and_storage_is_a_miss(rig: MakeRig) -> None:
    one, hashes = rig(), chain(4)
    one.keep(hashes)
    one.cache.close()
    assert not one.cache.prefetch("r", chain(4, "new"))
    assert one.cache.prefetch_ready("r")
    lease = one.serve(hashes)
    assert lease.from_device == 4
    one.cache.release(lease)
    one.keep(chain(4, "new"))
    with pytest.raises(StoreClosed):
        one.attach()
    one.settle()


def test_close_gives_up_prefetches_that_no_request_will_take(rig: MakeRig) -> None:
    hashes = chain(4)
    first = rig()
    first.keep(hashes)
    one = rig(backend=first.backend)
    one.cache.prefetch("r", hashes)
    one.idle()
    assert one.cache.stats().prefetch_held_pages == 4
    one.cache.close()
    assert one.cache.prefetch_ready("r")
    one.settle()


@pytest.mark.parametrize("hook", ["exists", "batch_get", "batch_set"])
@pytest.mark.parametrize("timeout_s", [0.0, 0.05])
def test_a_storage_is_detached_and_another_attached_during_a_call(
    rig: MakeRig, hook: str, timeout_s: float
) -> None:
    hashes = chain(4)
    first = rig()
    first.keep(hashes)
    one = rig(backend=first.backend)
    gate = one.backend.on = Gate(hook)
    one.cache.release(one.serve(chain(3, "written")))
    one.cache.prefetch("r", hashes)
    one.until(gate.entered.is_set)
    one.cache.detach_storage(timeout_s)
    assert one.cache.prefetch_ready("r"), "nothing is waited for any more"
    other = rig()
    other.keep(chain(4, "elsewhere"))
    one.attach(other.backend)
    lease = one.cache.acquire("r", hashes)
    if hook != "batch_set":
        assert len(lease) == 0
    one.check(lease)
    one.cache.prefetch("e", chain(4, "elsewhere"))
    one.until(lambda: one.cache.prefetch_ready("e"))
    found = one.cache.acquire("e", chain(4, "elsewhere"))
    assert found.from_storage == 4
    one.check(found)
    gate.open()
    for each in (lease, found):
        one.cache.release(each)
    one.idle()
    one.keep(chain(3, "written"))
    assert set(chain(3, "written")) <= other.backend.stored()
    assert len(one.cache._storages._links) == 1
    one.close()


def test_pages_that_came_before_a_detach_can_still_be_used(rig: MakeRig) -> None:
    hashes = chain(4)
    first = rig()
    first.keep(hashes)
    one = rig(backend=first.backend)
    one.cache.prefetch("r", hashes)
    one.idle()
    one.cache.detach_storage()
    other = rig(store=False)
    one.attach(other.backend)
    lease = one.cache.acquire("r", hashes)
    assert lease.from_storage == 4
    one.check(lease)
    one.idle()
    assert set(hashes) <= other.backend.stored(), "the old storage had them, the new one did not"
    one.cache.release(lease)
    one.settle()


def test_a_hundred_attachments_leave_no_thread(rig: MakeRig) -> None:
    one = rig()
    for i in range(100):
        one.cache.release(one.serve(chain(2, str(i % 7))))
        assert one.cache.detach_storage(SOON_S) == 0
        assert storage_threads() == []
        one.attach()
    one.close()


def test_the_store_itself_stays_open(rig: MakeRig) -> None:
    one = rig(store=False)
    pairs = one.pairs()
    one.cache.attach_storage(pairs)
    one.cache.close()
    assert pairs.exists(chain(1)).usable == 0
    one.settle()


def test_a_closed_store_is_a_miss(rig: MakeRig) -> None:
    one = rig(store=False)
    pairs = one.pairs()
    one.cache.attach_storage(pairs)
    one.keep(chain(2))
    pairs.store.close()
    one.keep(chain(4))
    one.cache.clear()
    lease = one.fetch(chain(4))
    assert len(lease) == 0
    assert one.cache.stats().refused_pages == 2
    one.cache.release(lease)
    one.close()


def test_one_storage_at_a_time(rig: MakeRig) -> None:
    one = rig()
    with pytest.raises(ConfigError, match="call detach_storage first"):
        one.attach()


@pytest.mark.parametrize(
    ("half", "field", "value"),
    [("target", "page_bytes", 1024), ("draft", "page_bytes", 1024), ("target", "page_size", 8)],
)
def test_a_store_of_other_pages_is_refused_before_threads_start(
    rig: MakeRig, half: str, field: str, value: int
) -> None:
    one = rig(store=False)
    pairs = one.pairs()
    fields = {name: getattr(getattr(pairs, half), name) for name in Namespace.__annotations__}
    wrong = Namespace(**{**fields, field: value})
    if field == "page_size":
        pairs = PairedStore(pairs.store, wrong)
    else:
        halves = {"target": pairs.target, "draft": pairs.draft, half: wrong}
        pairs = PairedStore(pairs.store, halves["target"], halves["draft"])
    with pytest.raises(ConfigError, match=rf"the {half} namespace has {field} {value}"):
        one.cache.attach_storage(pairs)
    assert storage_threads() == []


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"prefetch_policy": "soon"}, "prefetch_policy"),
        ({"prefetch_threshold_pages": 0}, "prefetch_threshold_pages"),
        ({"prefetch_limit_pages": 0}, "prefetch_limit_pages"),
        ({"prefetch_threads": 0}, "prefetch_threads"),
        ({"backup_threads": 0}, "backup_threads"),
        ({"backup_limit_pages": 0}, "backup_limit_pages"),
    ],
)
def test_a_wrong_option_is_named_and_leaves_nothing_attached(
    rig: MakeRig, options: dict[str, Any], named: str
) -> None:
    one = rig(store=False)
    with pytest.raises(ConfigError, match=named):
        one.attach(**options)
    assert storage_threads() == []
    one.attach()
    one.close()


def test_the_effective_policies_are_in_the_log(
    rig: MakeRig, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "hicache_storage")
    rig(
        pairing="required",
        write_policy="write_back",
        storage={
            "prefetch_policy": "timeout",
            "prefetch_timeout_base_s": 2.0,
            "prefetch_timeout_per_page_s": 0.5,
            "prefetch_threshold_pages": 3,
        },
    )
    for text in (
        "32 device pages, 32 host pages of 4 tokens (page_first), draft paired, write_back",
        "'ToldBackend', prefetch timeout of 2.0 s + 0.5 s a page",
        "3 pages or more, 16 at once",
        "drafts required",
    ):
        assert text in caplog.text


@pytest.mark.parametrize(
    ("cause", "said"),
    [
        ("lost drafts", "2 pages were handed out without their draft"),
        ("declined", "prefetches were given up for lack of host memory"),
        ("deferred", "pages were not written yet because storage is slower"),
        ("no room", "every host page was in use"),
    ],
)
def test_what_costs_speed_is_said_once(
    rig: MakeRig, caplog: pytest.LogCaptureFixture, cause: str, said: str
) -> None:
    hashes = chain(4)
    first = rig()
    first.keep(hashes)
    first.backend.forget(*(f"d:{page_hash}" for page_hash in hashes[:2]))
    limit = 1 if cause == "deferred" else 8
    one = rig(backend=first.backend, storage={"backup_limit_pages": limit})
    taken = one.pools.host_allocator.alloc(32 if cause in ("declined", "no room") else 0)
    for i in range(5):
        one.cache.release(one.fetch(hashes, str(i)))
        one.cache.release(one.serve(chain(2, f"new {i}")))
        one.cache.clear()
    assert [said in record.getMessage() for record in caplog.records].count(True) == 1
    assert taken is not None
    one.pools.host_allocator.free(taken)


def test_a_dead_storage_costs_one_line_and_not_one_a_page(
    rig: MakeRig, caplog: pytest.LogCaptureFixture
) -> None:
    one = rig()

    def fail(hook: str, keys: list[str]) -> None:
        raise OSError(5, "dead")

    one.backend.on = fail
    for i in range(20):
        one.keep(chain(1, str(i)))
        one.cache.release(one.fetch(chain(2, f"new {i}"), str(i)))
    dead = [record for record in caplog.records if "dead" in record.getMessage()]
    assert len(dead) <= 4, [record.getMessage() for record in dead]
    assert one.cache.stats().storage_errors >= 40
