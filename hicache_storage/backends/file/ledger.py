"""Ledger: how many bytes of pages a root holds, agreed on by all processes that write to it.

A small file under an exclusive flock. Room is reserved before a page is written and settled
after, so the sum never passes the capacity; a process that dies between leaves its reservation
counted. So the ledger may say too much, never too little, and a recount (`begin_recount`, a
scan, `end_recount`) makes it true again - also after someone removed files by hand.

A recount takes a while and others go on writing. Everything reserved after it began is added to
what the scan found; so is every reservation from before that is settled after. What was removed
meanwhile is not taken off: too much again, until the next recount.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from .lockfile import LockFile

_FIELDS = struct.Struct("<4sI16sqqqqQQd")
_MAGIC = b"HKVL"
_BOOT_ID = "/proc/sys/kernel/random/boot_id"


@dataclass
class Balance:
    """What the ledger says."""

    stored_bytes: int = 0
    """Bytes of pages, reserved ones included."""
    pages: int = 0
    since_bytes: int = 0
    """Of these, added since the latest recount began."""
    since_pages: int = 0
    begun: int = 0
    """Recounts begun since the file was made."""
    ended: int = 0
    """Number of the latest recount that ended; 0 if the figures were never counted."""
    recounted_s: float = 0.0
    """When, in seconds since the epoch."""


@dataclass(frozen=True)
class Reservation:
    """Room taken for pages that are about to be written."""

    reserved_bytes: int
    pages: int
    begun: int


class Ledger:
    """One process's access to the file. Thread-safe; make another one after a fork."""

    def __init__(self, path: str) -> None:
        self._boot = _boot_id()
        self._file = LockFile(path)
        self.close = self._file.close

    def read(self) -> Balance:
        """The present balance. `ended` is 0 if nobody counted since the machine started: after
        a power cut the file may be older than the pages."""
        with self._changing() as balance:
            return balance

    def reserve(
        self, wanted_bytes: int, least_bytes: int, pages: int, capacity: int | None
    ) -> Reservation | None:
        """Room for `wanted_bytes`, or as much as fits, but no less than `least_bytes`; None if
        that doesn't fit."""
        with self._changing() as balance:
            if capacity is not None:
                wanted_bytes = min(wanted_bytes, capacity - balance.stored_bytes)
            if wanted_bytes < least_bytes:
                return None
            balance.stored_bytes += wanted_bytes
            balance.since_bytes += wanted_bytes
            balance.pages += pages
            balance.since_pages += pages
            return Reservation(wanted_bytes, pages, balance.begun)

    def settle(self, reservation: Reservation, added_bytes: int, added_pages: int) -> Balance:
        """Puts what was really added (replaced pages taken off) in the reservation's place; the
        balance after that."""
        with self._changing() as balance:
            if reservation.begun == balance.begun:
                # No recount began since: it stands in both sums.
                balance.since_bytes += added_bytes - reservation.reserved_bytes
                balance.since_pages += added_pages - reservation.pages
            else:
                balance.since_bytes += max(added_bytes, 0)
                balance.since_pages += max(added_pages, 0)
            if balance.ended > reservation.begun:
                # A recount that began later has ended; it left the reservation out.
                balance.stored_bytes += max(added_bytes, 0)
                balance.pages += max(added_pages, 0)
            else:
                balance.stored_bytes += added_bytes - reservation.reserved_bytes
                balance.pages += added_pages - reservation.pages
            return balance

    def release(self, removed_bytes: int, removed_pages: int) -> None:
        """Takes off pages that were removed."""
        with self._changing() as balance:
            balance.stored_bytes = max(balance.stored_bytes - removed_bytes, 0)
            balance.pages = max(balance.pages - removed_pages, 0)

    def begin_recount(self) -> int:
        """The recount's number, for `end_recount`. One process at a time recounts."""
        with self._changing() as balance:
            balance.begun += 1
            balance.since_bytes = balance.since_pages = 0
            return balance.begun

    def end_recount(self, number: int, found_bytes: int, found_pages: int) -> None:
        """Makes what a scan found, and what was added meanwhile, the balance."""
        with self._changing() as balance:
            if number != balance.begun:
                return
            balance.stored_bytes = found_bytes + max(balance.since_bytes, 0)
            balance.pages = found_pages + max(balance.since_pages, 0)
            balance.ended = number
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
        magic, _, boot, *fields = _FIELDS.unpack(record)
        if magic != _MAGIC or boot != self._boot:
            return Balance()
        return Balance(*fields)

    def _format(self, balance: Balance) -> bytes:
        return _FIELDS.pack(
            _MAGIC,
            0,
            self._boot,
            balance.stored_bytes,
            balance.pages,
            balance.since_bytes,
            balance.since_pages,
            balance.begun,
            balance.ended,
            balance.recounted_s,
        )


def _boot_id() -> bytes:
    """This start of the machine; zeros where the kernel doesn't say."""
    try:
        with open(_BOOT_ID) as file:
            return bytes.fromhex(file.read().strip().replace("-", ""))
    except (OSError, ValueError):
        return bytes(16)
