"""Ledger: how many bytes of pages a root holds, agreed on by all processes that write to it.

A small file under a lock. Room is reserved before a page is written and settled after, so the
sum never passes the capacity. A process that dies between leaves its reservation counted: the
ledger may say too much, never too little. A recount (`begin_recount`, a walk, `end_recount`)
makes it true again, also after someone removed files by hand.

A recount takes a while, and others go on writing. To what its walk found it adds what was
reserved since it began, and what was reserved before and not yet settled when it ended: such a
page may have been published behind the walk's back. A reservation that nobody settles drops out
after a minute or two. What shrinks or goes while a recount begins, runs or ends is not taken off,
as the walk may have missed it already; the next recount corrects that.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from .lockfile import LockFile

_FIELDS = struct.Struct("<4sI16s10q5Q2d")
_MAGIC = b"HKVL"
KEEP_S = 60.0
"""How long a reservation counts at least, if nobody settles it."""
_BOOT_ID = "/proc/sys/kernel/random/boot_id"


class Amount(NamedTuple):
    """Bytes, and the pages that they belong to."""

    stored_bytes: int = 0
    pages: int = 0

    def plus(self, other: Amount) -> Amount:
        return Amount(self[0] + other[0], self[1] + other[1])

    def minus(self, other: Amount) -> Amount:
        return Amount(self[0] - other[0], self[1] - other[1])

    def at_least_none(self) -> Amount:
        return Amount(max(self[0], 0), max(self[1], 0))


class Mark(NamedTuple):
    """Where the recounts stood at some moment."""

    begun: int = 0
    ended: int = 0
    """Number of the latest recount that ended; 0 if the pages were never counted."""


@dataclass
class Balance:
    """What the ledger says."""

    total: Amount = field(default_factory=Amount)
    """All pages, and what is reserved for more."""
    since: Amount = field(default_factory=Amount)
    """Of these, added since the latest recount began."""
    unsettled: Amount = field(default_factory=Amount)
    """Reserved since then and not settled."""
    younger: Amount = field(default_factory=Amount)
    """Reserved before, since recount number `younger_from` began, and not settled."""
    older: Amount = field(default_factory=Amount)
    """Reserved before that, since recount number `older_from` began, and not settled."""
    younger_from: int = 0
    older_from: int = 0
    counted_from: int = 0
    """`total` has the reservations made since this recount began, settled or not."""
    mark: Mark = field(default_factory=Mark)
    """Recounts since the machine started."""
    recounted_s: float = 0.0
    """When the latest recount ended, in seconds since the epoch."""
    younger_s: float = 0.0
    """When recount number `younger_from` began."""

    @property
    def in_flight(self) -> bool:
        """Whether room is reserved for pages that may not be there: somebody writes them now, or
        died before the latest recounts."""
        return any(any(amount) for amount in (self.unsettled, self.younger, self.older))


@dataclass(frozen=True)
class Reservation:
    """Room taken for pages that are about to be written."""

    amount: Amount
    mark: Mark = field(default_factory=Mark)


class Ledger:
    """One process's access to the file. Thread-safe; make another one after a fork."""

    def __init__(self, path: str) -> None:
        self._boot = _boot_id()
        self._file = LockFile(path)
        self.close = self._file.close
        self.abandon = self._file.abandon

    def read(self) -> Balance:
        """The present balance. After a start of the machine it is that of a new file: a power
        cut may have left the file older than the pages."""
        with self._changing() as balance:
            return balance

    def reserve(
        self, wanted_bytes: int, least_bytes: int, pages: int, capacity: int | None
    ) -> Reservation | None:
        """Room for `wanted_bytes`, or as much as fits, but no less than `least_bytes`; None if
        that doesn't fit."""
        with self._changing() as balance:
            if capacity is not None:
                wanted_bytes = min(wanted_bytes, capacity - balance.total.stored_bytes)
            if wanted_bytes < least_bytes:
                return None
            amount = Amount(wanted_bytes, pages)
            balance.total = balance.total.plus(amount)
            balance.since = balance.since.plus(amount)
            balance.unsettled = balance.unsettled.plus(amount)
            return Reservation(amount, balance.mark)

    def settle(self, reservation: Reservation, added: Amount) -> Balance:
        """Puts what was really added (replaced pages taken off) in the reservation's place; the
        balance after that."""
        with self._changing() as balance:
            begun, ended = balance.mark
            if reservation.mark != (begun, ended) or ended < begun:
                added = added.at_least_none()
            change = added.minus(reservation.amount)
            if reservation.mark.begun == begun:
                balance.unsettled = balance.unsettled.minus(reservation.amount)
                balance.since = balance.since.plus(change)
            else:
                balance.since = balance.since.plus(added)
                if reservation.mark.begun >= balance.younger_from:
                    balance.younger = balance.younger.minus(reservation.amount)
                elif reservation.mark.begun >= balance.older_from:
                    balance.older = balance.older.minus(reservation.amount)
            if reservation.mark.begun >= balance.counted_from:
                balance.total = balance.total.plus(change)
            else:  # in flight for so long that the total has left it out
                balance.total = balance.total.plus(added)
            return balance

    def release(self, removed: Amount, mark: Mark) -> None:
        """Takes off pages that were removed since the ledger was at `mark`."""
        with self._changing() as balance:
            if mark == balance.mark:
                balance.total = balance.total.minus(removed).at_least_none()

    def begin_recount(self) -> int:
        """The recount's number, for `end_recount`. One process at a time recounts."""
        with self._changing() as balance:
            begun, ended = balance.mark
            now_s = time.time()
            if now_s - balance.younger_s >= KEEP_S:
                balance.older, balance.older_from = balance.younger, balance.younger_from
                balance.younger, balance.younger_from = Amount(), begun
                balance.younger_s = now_s
            balance.younger = balance.younger.plus(balance.unsettled)
            balance.unsettled = balance.since = Amount()
            balance.mark = Mark(begun + 1, ended)
            return begun + 1

    def end_recount(self, number: int, found: Amount) -> None:
        """Makes what a walk found, and what came meanwhile, the balance."""
        with self._changing() as balance:
            if number == balance.mark.begun:
                for coming in (balance.since, balance.younger, balance.older):
                    found = found.plus(coming.at_least_none())
                balance.total = found
                balance.counted_from = balance.older_from
                balance.mark = Mark(number, number)
                balance.recounted_s = time.time()

    @contextmanager
    def _changing(self) -> Iterator[Balance]:
        with self._file.held() as fd:
            before = os.pread(fd, _FIELDS.size, 0)
            balance = self._parse(before)
            yield balance
            after = self._format(balance)
            if after != before:
                os.pwrite(fd, after, 0)

    def _parse(self, record: bytes) -> Balance:
        if len(record) != _FIELDS.size:
            return Balance()
        magic, _, boot, *numbers = _FIELDS.unpack(record)
        if magic != _MAGIC or boot != self._boot:
            return Balance()
        total, since, unsettled, younger, older = (
            Amount(*numbers[i : i + 2]) for i in range(0, 10, 2)
        )
        younger_from, older_from, counted_from, begun, ended, recounted_s, younger_s = numbers[10:]
        return Balance(
            total=total,
            since=since,
            unsettled=unsettled,
            younger=younger,
            older=older,
            younger_from=younger_from,
            older_from=older_from,
            counted_from=counted_from,
            mark=Mark(begun, ended),
            recounted_s=recounted_s,
            younger_s=younger_s,
        )

    def _format(self, balance: Balance) -> bytes:
        return _FIELDS.pack(
            _MAGIC,
            0,
            self._boot,
            *balance.total,
            *balance.since,
            *balance.unsettled,
            *balance.younger,
            *balance.older,
            balance.younger_from,
            balance.older_from,
            balance.counted_from,
            *balance.mark,
            balance.recounted_s,
            balance.younger_s,
        )


def _boot_id() -> bytes:
    """This start of the machine; zeros where the kernel doesn't say."""
    try:
        with open(_BOOT_ID) as file:
            return bytes.fromhex(file.read().strip().replace("-", ""))
    except (OSError, ValueError):
        return bytes(16)
