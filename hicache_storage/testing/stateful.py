"""A hypothesis state machine: any order of calls on a store, against a dict. Needs hypothesis.

TestMine = store_machine(lambda: "mine:///tmp/pages-" + uuid4().hex).TestCase
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

from hypothesis import assume
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from ..keys import draft_key, stored_key
from ..namespace import Namespace
from ..page import HEADER_BYTES, as_spans, make_header
from ..pairing import PairedStore
from ..store import Store
from .bench import kit_namespace
from .subject import Subject, Where

TARGET_BYTES, DRAFT_BYTES = 96, 40
HASHES = [hashlib.sha256(str(i).encode()).hexdigest() for i in range(6)]
_TENANTS = ("a", "b")

hash_lists = st.lists(st.sampled_from(HASHES), min_size=0, max_size=8)
unique_lists = st.lists(st.sampled_from(HASHES), min_size=1, max_size=6, unique=True)
tenants = st.sampled_from(_TENANTS)
seeds = st.integers(0, 3)


def _page(seed: int, key: str, size: int) -> bytes:
    return hashlib.shake_128(f"{seed} {key}".encode()).digest(size)


def _scribble(buffers: list[bytearray]) -> None:
    """Memory is reused once the call has returned."""
    for buffer in buffers:
        buffer[:] = b"\xee" * len(buffer)


def store_machine(make: Callable[[], Where], **subject: Any) -> type[RuleBasedStateMachine]:
    """The state machine for one backend. `make` gives a new, empty location each time; further
    arguments go to `Subject`."""

    class StoreMachine(RuleBasedStateMachine):
        """Two tenants, each with a target and a draft namespace, in one store."""

        subject: Subject
        store: Store

        @initialize()
        def begin(self) -> None:
            self.subject = Subject(make(), private=True, empty=True, **subject)
            self.store = self.subject.open()
            self.model: dict[tuple[str, str], bytes] = {}
            """(namespace digest, page key) -> page, of good pages."""
            self.damaged: set[tuple[str, str]] = set()
            """Those that must not be read until they are set again."""
            self.spaces = {
                tenant: (
                    kit_namespace(TARGET_BYTES, tenant, model="target"),
                    kit_namespace(DRAFT_BYTES, tenant, model="draft"),
                )
                for tenant in _TENANTS
            }

        def teardown(self) -> None:
            if hasattr(self, "store"):
                self.store.close()

        # -- what the dict says ------------------------------------------------------------

        def put(self, space: Namespace, key: str, page: bytes) -> None:
            self.model[space.digest, key] = page
            self.damaged.discard((space.digest, key))

        def hits(self, space: Namespace, keys: list[str]) -> list[bool]:
            return [(space.digest, key) in self.model for key in keys]

        def note_read(self, space: Namespace, keys: list[str]) -> None:
            """A damaged page that was read is put aside."""
            for key in keys:
                self.damaged.discard((space.digest, key))

        def check(self, space: Namespace, keys: list[str], hits: list[bool], buffers: Any) -> None:
            assert hits == self.hits(space, keys)
            for key, hit, buffer in zip(keys, hits, buffers, strict=True):
                assert not hit or bytes(buffer) == self.model[space.digest, key]

        # -- rules -------------------------------------------------------------------------

        @rule(tenant=tenants, hashes=hash_lists, seed=seeds)
        def set_pages(self, tenant: str, hashes: list[str], seed: int) -> None:
            space = self.spaces[tenant][0]
            pages = [_page(seed, key, TARGET_BYTES) for key in hashes]
            memory = [bytearray(page) for page in pages]
            assert self.store.batch_set(space, hashes, memory) == [True] * len(hashes)
            _scribble(memory)
            for key, page in zip(hashes, pages, strict=True):
                self.put(space, key, page)

        @rule(tenant=tenants, hashes=hash_lists)
        def get_pages(self, tenant: str, hashes: list[str]) -> None:
            space = self.spaces[tenant][0]
            buffers = [bytearray(TARGET_BYTES) for _ in hashes]
            hits = self.store.batch_get(space, hashes, buffers)
            self.check(space, hashes, hits, buffers)
            self.note_read(space, hashes)
            _scribble(buffers)

        @rule(tenant=tenants, hashes=unique_lists)
        def look_up(self, tenant: str, hashes: list[str]) -> None:
            space = self.spaces[tenant][0]
            run = self.store.exists(space, hashes)
            for i, key in enumerate(hashes):
                if (space.digest, key) in self.damaged:
                    return  # Seen only when it is read; either answer is right.
                there = (space.digest, key) in self.model
                assert there == (i < run)
                if not there:
                    return

        @rule(tenant=tenants, hashes=hash_lists)
        def delete_pages(self, tenant: str, hashes: list[str]) -> None:
            assume("delete" in self.store.capabilities)
            space = self.spaces[tenant][0]
            assert self.store.delete(space, hashes) == [True] * len(hashes)
            for key in hashes:
                self.model.pop((space.digest, key), None)
                self.damaged.discard((space.digest, key))

        @rule(tenant=tenants, hashes=unique_lists, seed=seeds)
        def set_pairs(self, tenant: str, hashes: list[str], seed: int) -> None:
            target, draft = self.spaces[tenant]
            targets = [_page(seed, key, TARGET_BYTES) for key in hashes]
            drafts = [_page(seed, draft_key(key), DRAFT_BYTES) for key in hashes]
            stored = PairedStore(self.store, target, draft).batch_set(hashes, targets, drafts)
            assert stored.target == stored.draft == [True] * len(hashes)
            for key, page, other in zip(hashes, targets, drafts, strict=True):
                self.put(target, key, page)
                self.put(draft, draft_key(key), other)

        @rule(tenant=tenants, hashes=unique_lists, required=st.booleans())
        def get_pairs(self, tenant: str, hashes: list[str], required: bool) -> None:
            target, draft = self.spaces[tenant]
            pairs = PairedStore(
                self.store, target, draft, pairing="required" if required else "best_effort"
            )
            targets = [bytearray(b"\xab" * TARGET_BYTES) for _ in hashes]
            drafts = [bytearray(b"\xab" * DRAFT_BYTES) for _ in hashes]
            found = pairs.batch_get(hashes, targets, drafts)
            self.check(target, hashes, found.target, targets)
            self.note_read(target, hashes)
            run = next((i for i, hit in enumerate(found.target) if not hit), len(hashes))
            keys = [draft_key(key) for key in hashes]
            wanted = self.hits(draft, keys[:run]) + [False] * (len(hashes) - run)
            assert found.draft == wanted
            self.note_read(draft, keys[:run])
            for i, (key, hit) in enumerate(zip(keys[:run], wanted, strict=False)):
                if hit:
                    assert drafts[i] == self.model[draft.digest, key]
                elif not required:
                    assert drafts[i] == bytes(DRAFT_BYTES)
            _scribble(targets + drafts)

        @rule(tenant=tenants, page_hash=st.sampled_from(HASHES), is_draft=st.booleans())
        def lose_one(self, tenant: str, page_hash: str, is_draft: bool) -> None:
            """Half of a pair goes, as by eviction."""
            assume("delete" in self.store.capabilities)
            space = self.spaces[tenant][is_draft]
            key = draft_key(page_hash) if is_draft else page_hash
            self.store.delete(space, [key])
            self.model.pop((space.digest, key), None)
            self.damaged.discard((space.digest, key))

        @rule(
            tenant=tenants,
            page_hash=st.sampled_from(HASHES),
            is_draft=st.booleans(),
            place=st.integers(0, HEADER_BYTES + DRAFT_BYTES - 1),
        )
        def corrupt(self, tenant: str, page_hash: str, is_draft: bool, place: int) -> None:
            """A stored page changes behind the store's back, by a byte anywhere."""
            space = self.spaces[tenant][is_draft]
            key = draft_key(page_hash) if is_draft else page_hash
            page = self.model.get((space.digest, key))
            assume(page is not None and (space.digest, key) not in self.damaged)
            payload = as_spans(page)
            stored = bytearray(make_header(payload, bytes.fromhex(space.digest), key) + payload[0])
            stored[place] ^= 0x10
            name = stored_key(space.digest, key)
            for content in (bytes(HEADER_BYTES) + b"x", bytes(stored)):
                view = memoryview(content)
                frame = (view[:HEADER_BYTES], view[HEADER_BYTES:])
                assert self.store._caller.batch_set([name], [frame], None) == [True]
            del self.model[space.digest, key]
            self.damaged.add((space.digest, key))

        @rule()
        def reopen(self) -> None:
            assume(self.store.scope != "process")
            self.store.close()
            self.store = self.subject.open()

        @rule()
        def clear(self) -> None:
            assume("clear" in self.store.capabilities)
            self.store.clear()
            self.model.clear()
            self.damaged.clear()

        # -- what always holds -------------------------------------------------------------

        @invariant()
        def scan_gives_what_is_stored(self) -> None:
            if not hasattr(self, "store") or "scan" not in self.store.capabilities:
                return
            found = [page.key for page in self.store.scan()]
            assert len(found) == len(set(found))
            good = {stored_key(digest, key) for digest, key in self.model}
            bad = {stored_key(digest, key) for digest, key in self.damaged}
            assert good <= set(found) <= good | bad

    return StoreMachine
