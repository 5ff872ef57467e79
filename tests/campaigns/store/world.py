"""A host with two engines' stores, without engines: prompts, right content of objects, and checks.

The content of an object follows from its name, so every byte that a request would use can be
checked. The stores share a disk path and a memory path.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from connectors.store.fetch import Fetch
from connectors.store.keys.names import ObjectName, PrefixChain
from connectors.store.planning.chunks import StorePlan, plan_store
from connectors.store.planning.prefix import ObjectRef, completed_objects, possible_objects
from connectors.store.service import KVStore
from connectors.store.settings import StoreSettings
from connectors.store.tiers.files import Files
from connectors.store.tiers.folder import FolderTier
from connectors.store.tiers.staging import Staging
from tests.store.groups import group, sliding, state

CHUNK = 128
SIZES = {0: 9000, 1: 3000, 2: 700}
SPACE = b"the model's own!"
DISK_BUDGET, MEMORY_BUDGET, STAGING = 120 * 12288, 40 * 12288, 96 * 12288
LIMITS = StoreSettings(lookup_s=0.02, load_s=0.25, store_s=0.5)
# A busy machine wakes a thread late; a wait without a deadline would last forever.
SLACK_S = 2.0
STEP_TOKENS = CHUNK


def _passing(call: str) -> Any:
    real = getattr(Files, call)

    def method(self: FaultyFiles, *arguments: Any) -> Any:
        self._pass(call)
        return real(self, *arguments)

    return method


class FaultyFiles(Files):
    """System calls that hang, or fail for lack of space, on demand."""

    find, read, create, publish = map(_passing, ("find", "read", "create", "publish"))

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.go_on.set()
        self.hanging: frozenset[str] = frozenset()
        self.full: frozenset[str] = frozenset()
        self.waiting = 0

    def write(self, fd: int, digest: bytes, payload: memoryview, sync: bool) -> None:
        if "write" in self.full:
            super().write(fd, digest, payload[: payload.nbytes // 2], sync)
        self._pass("write")
        super().write(fd, digest, payload, sync)

    def hang(self, *calls: str) -> None:
        self.hanging = frozenset(calls)
        self.go_on.clear()

    def heal(self) -> None:
        self.hanging = self.full = frozenset()
        self.go_on.set()

    def _pass(self, call: str) -> None:
        if call in self.hanging:
            self.waiting += 1
            self.go_on.wait()
        if call in self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@dataclass
class Prompt:
    """A request's tokens and the names of its objects in one namespace."""

    tokens: int
    names: dict[ObjectRef, ObjectName]


@dataclass
class Engine:
    """One engine's store on this host."""

    store: KVStore
    files: FaultyFiles


@dataclass
class Outcome:
    """Results of all requests and checks."""

    requests: int = 0
    hit_tokens: int = 0
    tokens: int = 0
    problems: list[str] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    longest_wait_s: float = 0.0


def content(name: ObjectName, size: int) -> bytes:
    """Return the correct payload of an object."""
    seed = int.from_bytes(hashlib.blake2b(name.space + name.key, digest_size=8).digest(), "little")
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8).tobytes()


def store_plan() -> StorePlan:
    return plan_store((group(0, 16), sliding(1, 16, 100), state(2)), CHUNK, 4096)


@contextlib.contextmanager
def held(root: Path) -> Iterator[None]:
    """Hold the store's lock, so that no file appears or disappears meanwhile."""
    fd = os.open(root, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def bytes_on_disk(root: Path) -> int:
    """Return the bytes of all files of a tier at one moment."""
    size = 0
    with held(root):
        for path in root.glob("*/**/*"):
            # A reader may remove a corrupt object without the lock.
            with contextlib.suppress(FileNotFoundError):
                size += path.stat().st_blocks * 512 if path.is_file() else 0
    return size


class World:
    def __init__(self, root: Path, memory: Path, seed: int) -> None:
        self.random = random.Random(seed)
        self.disk, self.memory = root / "disk", memory / "memory"
        self.root, self.shared = root, memory
        self.plan = store_plan()
        self.outcome = Outcome()
        self.engines = [self._start() for _ in range(2)]
        self.prompts = [self._prompt() for _ in range(28)]

    # ---- engines --------------------------------------------------------------------------------

    def _start(self) -> Engine:
        files = FaultyFiles()
        tiers = [
            FolderTier(self.memory, MEMORY_BUDGET, durable=False, files=files, label="memory"),
            FolderTier(self.disk, DISK_BUDGET, durable=False, files=files, label="disk"),
        ]
        staging = Staging(STAGING, self.shared)
        store = KVStore(self.plan, SPACE, SIZES, tiers, staging, LIMITS)
        return Engine(store, files)

    def restart(self) -> None:
        """Close one engine's store without waiting for its writes, and start another."""
        number = self.random.randrange(len(self.engines))
        self._stop(self.engines[number])
        self.engines[number] = self._start()

    def _stop(self, engine: Engine) -> None:
        for key, number in engine.store.totals().items():
            self.outcome.counts[" ".join(key)] += round(number)
        engine.files.heal()
        engine.store.close()

    def _prompt(self) -> Prompt:
        """Return up to eight chunks, often with a common prefix with other prompts."""
        rng = self.random
        tokens = rng.randrange(1, 9) * CHUNK + rng.randrange(1, CHUNK)
        ids: list[int] = []
        while len(ids) < tokens:
            ids += [rng.randrange(3)] * CHUNK
        chain = PrefixChain(SPACE, CHUNK)
        chain.extend(ids[:tokens])
        refs = possible_objects(self.plan, 0, tokens)
        return Prompt(tokens, {ref: chain.name(ref) for ref in refs})

    # ---- requests -------------------------------------------------------------------------------

    def ask(self, asked: Engine | None = None) -> None:
        """Run one request: load from the store, check every byte, and store the rest."""
        engine = asked or self.random.choice(self.engines)
        prompt = self.random.choice(self.prompts)
        start = self.random.choice((0, 0, CHUNK))
        start = start if start < prompt.tokens else 0
        request = f"request {self.outcome.requests}"
        self.outcome.requests += 1
        self.outcome.tokens += prompt.tokens
        fetch = Fetch(engine.store, prompt.names, start, prompt.tokens - 1)
        if self.random.random() < 0.05:
            # The client has disconnected.
            fetch.close()
            return
        began = time.monotonic()
        while not fetch.poll():
            if time.monotonic() - began > LIMITS.load_s + SLACK_S:
                self.outcome.problems.append(f"{request}: no end after {time.monotonic() - began:.1f} s")
                fetch.close()
                return
            time.sleep(0.0002)
        self.outcome.longest_wait_s = max(self.outcome.longest_wait_s, time.monotonic() - began)
        self.outcome.hit_tokens += fetch.end_token - start
        for ref, offset in fetch.offsets.items():
            size = SIZES[ref.group]
            if bytes(engine.store.staging.view(offset, size)) != content(prompt.names[ref], size):
                self.outcome.problems.append(f"{request}: {ref} is not what was stored")
        fetch.close()
        self._compute(engine, prompt, fetch.end_token)

    def _compute(self, engine: Engine, prompt: Prompt, computed: int) -> None:
        while computed < prompt.tokens:
            step = min(prompt.tokens - computed, STEP_TOKENS - computed % STEP_TOKENS)
            for ref in completed_objects(self.plan, computed, computed + step):
                offset = engine.store.reserve(ref)
                if offset is None:
                    continue
                size = SIZES[ref.group]
                if self.random.random() < 0.02:
                    # A rank has failed: only half of the object is filled.
                    engine.store.staging.view(offset, size)[: size // 2] = content(prompt.names[ref], size)[: size // 2]
                    engine.store.drop(offset)
                    continue
                engine.store.staging.view(offset, size)[:] = content(prompt.names[ref], size)
                engine.store.commit(ref, prompt.names[ref], offset)
            computed += step

    # ---- checks ---------------------------------------------------------------------------------

    def object_files(self, root: Path) -> list[Path]:
        """Objects of one tier, sorted: the order of a folder does not depend on the seed."""
        return sorted(path for path in (root / "objects").glob("*/*") if not path.name.startswith("."))

    def check_budget(self) -> None:
        """Compare the bytes of all files at one moment with the budget."""
        for root, budget in ((self.disk, DISK_BUDGET), (self.memory, MEMORY_BUDGET)):
            size = bytes_on_disk(root)
            if size > budget:
                self.outcome.problems.append(f"{root.name}: {size} bytes exceed the budget of {budget}")

    def settle(self) -> None:
        """End all faults, and check that every store becomes idle and holds no staging."""
        for engine in self.engines:
            engine.files.heal()
        until = time.monotonic() + 30.0
        for engine in self.engines:
            while not engine.store.idle() and time.monotonic() < until:
                time.sleep(0.005)
            if engine.store.staging.used_bytes:
                self.outcome.problems.append(f"{engine.store.staging.used_bytes} bytes of staging are left")

    def close(self) -> None:
        self.settle()
        for engine in self.engines:
            self._stop(engine)
        self.engines.clear()  # their folders close with the last reference
        time.sleep(0.05)
        for root, budget in ((self.disk, DISK_BUDGET), (self.memory, MEMORY_BUDGET)):
            tier = FolderTier(root, budget, durable=False)
            tier.open()
            parts = list((root / "parts").iterdir())
            if parts:
                self.outcome.problems.append(f"{root.name}: {len(parts)} unfinished files are left")
        self.check_budget()
