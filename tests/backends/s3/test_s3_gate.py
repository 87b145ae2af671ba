"""The gate's bound and its shares, and addresses found without waiting."""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache_storage.backends.s3 import gate as gate_module
from hicache_storage.backends.s3 import resolver as resolver_module
from hicache_storage.backends.s3.gate import Gate, Ticket
from hicache_storage.backends.s3.resolver import Resolver


@given(st.integers(1, 40), st.lists(st.sampled_from(["enter", "done", "lower", "raise"])))
def test_no_more_run_than_the_bound_admits(most: int, steps: list[str]) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(gate_module, "DECREASE_INTERVAL_S", 0.0)
        gate, running = Gate(most), 0
        ticket = gate.register()
        for step in steps:
            if step == "enter":
                bound = gate.bound
                entered = gate.enter(ticket)
                assert entered == (running < bound)
                running += entered
            elif step == "done" and running:
                gate.done(ticket)
                running -= 1
            elif step == "lower":
                gate.lower_bound()
            elif step == "raise":
                gate.raise_bound()
            assert 1 <= gate.bound <= most
            assert gate.running == running == ticket.held
        gate.leave(ticket)
        assert gate.running == 0


def test_a_burst_of_complaints_lowers_the_bound_once() -> None:
    gate = Gate(100)
    for _ in range(30):
        gate.lower_bound()
    assert gate.bound == 70


def test_a_round_of_successes_raises_the_bound_by_one() -> None:
    gate = Gate(100)
    gate.lower_bound()
    for _ in range(gate.bound + 1):
        gate.raise_bound()
    assert gate.bound == 71


def test_while_one_waits_nobody_takes_more_than_its_share() -> None:
    gate = Gate(8)
    large, small = gate.register(), gate.register()
    assert [gate.enter(large) for _ in range(9)] == [True] * 8 + [False]
    assert not gate.enter(small)
    gate.done(large)
    assert not gate.enter(large)
    assert gate.enter(small)
    gate.leave(small)
    assert gate.enter(large)


def test_a_waiting_call_is_woken() -> None:
    gate = Gate(1)
    first, second = gate.register(), gate.register()
    assert gate.enter(first)
    entered: list[bool] = []
    until_s = time.monotonic() + 30
    thread = threading.Thread(target=lambda: entered.append(gate.wait(second, until_s)))
    thread.start()
    while not second.waiting:
        time.sleep(0.001)
    gate.done(first)
    thread.join(20)
    assert entered == [True]
    assert not gate.wait(first, time.monotonic() + 0.01)
    assert not first.waiting
    assert isinstance(first, Ticket)


def answer(*hosts: str) -> list[Any]:
    return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, 80)) for host in hosts]


def finished(resolver: Resolver) -> None:
    assert resolver._lookup is not None
    resolver._lookup.join(10)


def test_addresses_are_taken_in_turn_and_looked_up_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [answer("192.0.2.1", "192.0.2.2", "192.0.2.1"), answer("192.0.2.3")]

    def look_up(*arguments: Any) -> list[Any]:
        if arguments[-1]:
            raise socket.gaierror("not digits")
        return answers.pop(0)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    resolver = Resolver("s3.test", 80)
    until_s = time.monotonic() + 10
    first = [resolver.next_address(until_s).target[0] for _ in range(4)]
    assert first == ["192.0.2.1", "192.0.2.2"] * 2
    finished(resolver)
    monkeypatch.setattr(resolver_module, "KEEP_S", -1.0)
    assert resolver.next_address(until_s).target[0].startswith("192.0.2.")
    finished(resolver)
    monkeypatch.setattr(resolver_module, "KEEP_S", 30.0)
    assert resolver.next_address(until_s).target[0] == "192.0.2.3"


def test_a_silent_name_server_costs_only_the_time_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()

    def look_up(*arguments: Any) -> list[Any]:
        if arguments[-1]:
            raise socket.gaierror("not digits")
        released.wait(30)
        return answer("192.0.2.1")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    resolver = Resolver("s3.test", 80)
    started = time.monotonic()
    for _ in range(2):
        with pytest.raises(TimeoutError, match=r"s3\.test"):
            resolver.next_address(time.monotonic() + 0.1)
    assert time.monotonic() - started < 5
    released.set()
    assert resolver.next_address(time.monotonic() + 10).target[0] == "192.0.2.1"
