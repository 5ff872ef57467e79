"""A store without files and threads: tiers are dictionaries, and calls run when they are queued."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any, cast

import pytest

from connectors.errors import StoreError
from connectors.store import service
from connectors.store.fetch import Fetch
from connectors.store.keys.names import ObjectName
from connectors.store.planning.chunks import StorePlan
from connectors.store.planning.prefix import ObjectRef
from connectors.store.service import KVStore
from connectors.store.settings import StoreSettings
from connectors.store.tiers.folder import FolderTier
from connectors.store.tiers.lanes import Call, Lane
from connectors.store.tiers.staging import Staging

SPACE = bytes(16)
NEVER = 3600.0
LIMITS = StoreSettings(lookup_s=NEVER, load_s=NEVER, store_s=NEVER)


def name(ref: ObjectRef) -> ObjectName:
    return ObjectName(SPACE, bytes([ref.group]) * 28 + ref.end_token.to_bytes(4, "big"), ref.end_token)


class MemoryTier:
    """Objects by name. ``broken``: objects whose reads fail; ``held``: whether calls must wait."""

    def __init__(self, label: str, refs: Iterable[ObjectRef], broken: Iterable[ObjectRef] = ()) -> None:
        self.label = label
        self.corrupt = self.evicted = 0
        self.objects = {name(ref) for ref in refs}
        self.broken = {name(ref) for ref in broken}
        self.reads: list[ObjectName] = []

    def open(self) -> None: ...

    def find(self, name: ObjectName) -> bool:
        return name in self.objects

    def read(self, name: ObjectName, payload: memoryview, progress: Callable[[], None]) -> None:
        self.reads.append(name)
        if name not in self.objects or name in self.broken:
            raise StoreError("the object is missing or corrupt")

    def write(self, name: ObjectName, payload: memoryview, deadline: float) -> bool:
        self.objects.add(name)
        return True


class InlineLane(Lane):
    """Runs calls in ``submit``, or in ``run`` while ``held``."""

    held = False

    def __init__(self, name: str, threads: int, queue_calls: int) -> None:
        super().__init__(name, 0, queue_calls)

    @property
    def accepts(self) -> bool:
        return not self._closed

    def submit(self, *arguments: Any, **named: Any) -> Call | None:
        call = super().submit(*arguments, **named)
        if not self.held:
            self.run()
        return call

    def run(self, count: int = 10**6) -> None:
        for _ in range(min(count, len(self._queue))):
            call = self._queue.popleft()
            call.started = True
            with contextlib.suppress(StoreError):
                call.result, call.ok = call.function(call), True
            self._end(call)


def memory_store(
    monkeypatch: pytest.MonkeyPatch,
    staging: Staging,
    plan: StorePlan,
    sizes: dict[int, int],
    *tiers: MemoryTier,
    settings: StoreSettings = LIMITS,
) -> KVStore:
    monkeypatch.setattr(service, "Lane", InlineLane)
    return KVStore(plan, SPACE, sizes, [cast("FolderTier", tier) for tier in tiers], staging, settings)


def lanes(store: KVStore, kind: str, held: bool) -> list[InlineLane]:
    """Hold or let go the calls of all tiers of a kind; return their lanes, fastest first."""
    found = [cast("InlineLane", getattr(tier, kind)) for tier in store.tiers]
    for lane in found:
        lane.held = held
        if not held:
            lane.run()
    return found


def fetched(fetch: Fetch) -> Fetch:
    assert any(fetch.poll() for _ in range(100)), "all calls have returned"
    return fetch
