"""Hosts with vLLM's own tiering manager and TandemStoreTier, without engines.

The faults of ``faults.py`` apply to this world: engines 0 and 1 share a disk path, engine 2 has
other weights. The content of a chunk follows from its key, so every byte can be checked.
"""

from __future__ import annotations

import hashlib
import random
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import LookupResult, OffloadingSpec, OffloadKey, ReqContext, ScheduleEndContext
from vllm.v1.kv_offload.base import make_offload_key as offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
from vllm.v1.kv_offload.tiering.manager import CPUPrimaryTierOffloadingManager, TieringOffloadingManager

from connectors.store.tiers.folder import FolderTier
from connectors.vllm_hma.offloading_tier import TandemStoreTier
from tests.campaigns.store.world import DISK_BUDGET, FaultyFiles, Outcome, World, held

BLOCK_BYTES = 8192
CHUNKS = 24
LIMITS = {"lookup_s": 0.02, "load_s": 0.25, "store_s": 0.5}
SLACK_S = 2.0


class Spec(OffloadingSpec):
    """vLLM's configuration of one engine with one worker."""

    def get_manager(self) -> Any:
        raise NotImplementedError

    def get_worker(self, kv_caches: object) -> Any:
        raise NotImplementedError


def spec(model: str, events: bool = False) -> Spec:
    parallel = OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, False)
    return Spec(
        OffloadingConfig(
            groups=(),
            worker_kv_bytes_per_block=BLOCK_BYTES,
            enable_kv_cache_events=events,
            extra_config={},
            engine_id="engine",
            model=OffloadingModelConfig(model, "bfloat16"),
            cache=OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=1),
            parallel=parallel,
        )
    )


def keys_of(seed: int, count: int) -> list[OffloadKey]:
    """Return keys of a prompt's chunks, as long as vLLM's SHA-256."""
    return [offload_key(hashlib.sha256(f"{seed} {chunk}".encode()).digest(), chunk % 2) for chunk in range(count)]


def chunk_bytes(key: OffloadKey, model: str) -> np.ndarray:
    seed = int.from_bytes(hashlib.blake2b(key + model.encode(), digest_size=8).digest(), "little")
    return np.random.default_rng(seed).integers(0, 256, BLOCK_BYTES, np.uint8)


REVISION = "0123456789abcdef0123456789abcdef01234567"
"""Commit of the models, which are not on this host."""


@dataclass
class TieredEngine:
    """vLLM's CPU tier and manager over a TandemStoreTier, driven as its scheduler does."""

    path: Path
    model: str = "/nowhere/model"
    number: int = 0
    limits: dict[str, float] | None = None
    events: bool = False
    files: FaultyFiles | None = None

    def __post_init__(self) -> None:
        self.region = SharedOffloadRegion(uuid.uuid4().hex, CHUNKS, None, BLOCK_BYTES, BLOCK_BYTES)
        self.primary = CPUPrimaryTierOffloadingManager(CHUNKS, self.region)
        config = {
            "type": "TandemStoreTier",
            "module_path": "connectors.vllm_hma.offloading_tier",
            "path": str(self.path),
            "disk_gib": DISK_BUDGET / (1 << 30),
            "enable_kv_events": self.events,
            "revision": REVISION,
            **(self.limits or LIMITS),
        }
        view = self.primary.get_kv_memoryview()
        try:
            tier = SecondaryTierFactory.create_secondary_tier(config, view, spec(self.model, self.events))
        except BaseException:
            self.primary.shutdown()
            raise
        assert isinstance(tier, TandemStoreTier)
        self.tier = tier
        if self.files is not None:
            tier.folder.files = self.files
        self.manager = TieringOffloadingManager(self.primary, [tier])
        self.requests = 0

    @property
    def rows(self) -> np.ndarray:
        return np.asarray(self.primary.get_kv_memoryview()).view(np.uint8)

    @property
    def space(self) -> bytes:
        return self.tier.space

    @property
    def folder(self) -> FolderTier:
        return self.tier.folder

    def step(self) -> None:
        self.manager.on_schedule_end(ScheduleEndContext(new_req_ids=(), preempted_req_ids=()))

    def request(self) -> ReqContext:
        self.requests += 1
        context = ReqContext(f"request {self.requests}")
        self.manager.on_new_request(context)
        return context

    def find(self, keys: list[OffloadKey], context: ReqContext, within_s: float = 30.0) -> int | None:
        """Return the length of the longest prefix in the CPU tier; None if lookups do not end."""
        end = time.monotonic() + within_s
        while True:
            hits, waiting = 0, False
            for key in keys:
                result = self.manager.lookup(key, context)
                if result is LookupResult.MISS:
                    break
                waiting |= result is not LookupResult.HIT
                hits += 1
            if not waiting:
                return hits
            if time.monotonic() > end:
                return None
            self.step()
            time.sleep(0.0002)

    def wrong(self, keys: list[OffloadKey], context: ReqContext) -> list[OffloadKey]:
        """Return the keys whose chunks in the CPU tier are not what was stored."""
        if not keys:
            return []
        loaded = self.manager.prepare_load(keys, context)
        assert isinstance(loaded, CPULoadStoreSpec)
        rows = zip(keys, loaded.chunk_ids, strict=True)
        found = [key for key, chunk in rows if not np.array_equal(self.rows[chunk], chunk_bytes(key, self.model))]
        self.manager.complete_load(keys, context)
        return found

    def compute(self, keys: list[OffloadKey], context: ReqContext) -> None:
        """Fill chunks as a worker does, and cascade them to the tier."""
        prepared = self.manager.prepare_store(keys, context)
        if prepared is None or not prepared.keys_to_store:
            return
        assert isinstance(prepared.store_spec, CPULoadStoreSpec)
        for key, chunk in zip(prepared.keys_to_store, prepared.store_spec.chunk_ids, strict=True):
            self.rows[chunk] = chunk_bytes(key, self.model)
        self.manager.complete_store(prepared.keys_to_store, context)

    def forget(self) -> None:
        """Empty vLLM's CPU tier, so that the next request reads files of the same namespace."""
        space = self.tier.space
        self.manager.reset_cache()
        self.tier.space = space

    def finish(self, context: ReqContext) -> None:
        self.manager.on_request_finished(context)

    def settled(self) -> bool:
        self.step()
        return not self.manager.has_pending_work() and self.tier.idle

    def close(self) -> None:
        if self.files is not None:
            self.files.heal()
        self.manager.shutdown()


class TierWorld(World):
    """A world for ``faults.py`` whose engines are vLLM's tiering managers."""

    engines: list[TieredEngine]  # type: ignore[assignment]

    def __init__(self, root: Path, seed: int) -> None:
        self.random = random.Random(seed)
        self.root, self.disk = root, root / "disk"
        self.memory = self.disk
        self.outcome = Outcome()
        self.engines = [self._begin(number) for number in range(3)]

    def _begin(self, number: int) -> TieredEngine:
        model = "/nowhere/other" if number == 2 else "/nowhere/model"
        return TieredEngine(self.disk, model, number, files=FaultyFiles())

    def restart(self, number: int) -> None:
        self._end(self.engines[number])
        self.engines[number] = self._begin(number)

    def _end(self, engine: TieredEngine) -> None:
        self.outcome.counts["corrupt"] += engine.folder.counts.corrupt
        self.outcome.counts["evicted"] += engine.folder.counts.evicted
        engine.close()

    def ask(self, number: int) -> None:
        """Run one request: load what is stored, check every byte, and store the rest."""
        engine = self.engines[number]
        if self.random.random() < 0.7:
            engine.forget()
        keys = keys_of(self.random.randrange(20), self.random.randrange(1, 9))
        context = engine.request()
        self.outcome.requests += 1
        self.outcome.tokens += len(keys)
        began = time.monotonic()
        found = engine.find(keys, context, LIMITS["lookup_s"] + LIMITS["load_s"] + SLACK_S)
        if found is None:
            self.outcome.late.append(f"{context.req_id}: no end after {time.monotonic() - began:.1f} s")
        else:
            self.outcome.longest_wait_s = max(self.outcome.longest_wait_s, time.monotonic() - began)
            self.outcome.hit_tokens += found
            self.outcome.wrong += [f"{context.req_id}: {key.hex()}" for key in engine.wrong(keys[:found], context)]
            engine.compute(keys[found:], context)
        engine.step()
        engine.finish(context)

    def check_budget(self) -> None:
        size = self._bytes()
        if size > DISK_BUDGET:
            self.outcome.over_budget.append(f"{size} of {DISK_BUDGET} bytes")

    def _bytes(self) -> int:
        size = 0
        with held(self.disk):
            for path in self.disk.glob("*/**/*"):
                try:
                    size += path.stat().st_blocks * 512 if path.is_file() else 0
                except FileNotFoundError:
                    continue
        return size

    def close(self) -> None:
        self.heal()
        for engine in self.engines:
            if not until(engine.settled):
                self.outcome.leaked.append(f"engine {engine.number}: transfers or calls without an end")
            self._end(engine)
        self.check_budget()


def until(condition: Callable[[], bool], seconds: float = 30.0) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.001)
    return True
