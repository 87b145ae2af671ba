"""Any order of calls, by the kit's state machine; some requests of the store go wrong meanwhile."""

from __future__ import annotations

import itertools

from backends.s3.misbehaving_server import MisbehavingServer, Seen, error, half_body, reset
from backends.s3.rig import url_of
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from hicache_storage.testing.stateful import store_machine


def test_any_order_of_calls_answers_as_a_dict_would() -> None:
    """One request in seven is throttled, reset or broken off, and tried again."""
    ills = itertools.cycle([error(503, "SlowDown"), reset, half_body(by_reset=False), error(500)])
    numbers = itertools.count()

    def behave(seen: Seen) -> object:
        if seen.number % 7 != 3 or seen.query:
            return None
        ill = next(ills)
        # A success of a lookup or a deletion is one, however little of its body comes.
        return ill if seen.verb in ("GET", "PUT") else error(500)

    with MisbehavingServer(behave) as server:  # type: ignore[arg-type]
        machine = store_machine(
            lambda: url_of(server, attempts=30, deadline_s=60).replace("/kv?", f"/{next(numbers)}?")
        )
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=15,
                stateful_step_count=15,
                deadline=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
        assert next(numbers) > 5
