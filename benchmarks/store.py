"""Compare the KV store with computing, with no store, and with plain copies of the bytes.

    restart    TTFT of prompts that an engine stored before ``kill -9``, compared with new prompts.
               Stored and new prompts alternate; each is sent once
    storing    TTFT and seconds per answer of an engine that stores and never loads, compared with
               an engine without a connector. Requests alternate between the engines
    bandwidth  one thread reads and verifies objects. The memory tier is measured in CPU time,
               because its reads never wait. It is compared with memcpy. The disk tier is compared
               with a plain sequential read; its files leave the page cache before each read
    conversation  TTFT of a conversation's eighth turn through a prefill and a decode engine,
               compared with the same pair without a store (``store_conversation.py``)

Engines of the first two measurements have no prefix cache. Only one engine, or one pair, works at a
time. COUNT is the number of requests, reads or conversations of each kind; FOLDER and MEMORY_FOLDER
are on the disk and on the tmpfs to measure. With ONLY, the file keeps the earlier results of the
other measurements.
"""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import random
import signal
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
from vllm.v1.engine.async_llm import AsyncLLM

from benchmarks.engines import PLAIN, random_prompt, start_side
from benchmarks.report import ratios, read, summary, turns, write
from benchmarks.store_conversation import conversation
from connectors.store.keys.names import ObjectName
from connectors.store.tiers.folder import FolderTier
from testing.engines import Answer, generate
from testing.models import benchmark_gemma3

EVERY = ("restart", "storing", "bandwidth", "conversation")
PROMPT_TOKENS, ANSWER_TOKENS, CHUNK = 2000, 48, 256
OBJECT_BYTES, OBJECTS = 8 << 20, 32
PAUSE_S = 0.4
"""Pause between two requests, in which the engine stores the KV of the first."""


@asynccontextmanager
async def engine(model: str, path: Path | None) -> AsyncIterator[AsyncLLM]:
    """Run an engine, without a store if ``path`` is None; kill its processes at the end."""
    store = {"path": str(path), "disk_gib": 4.0, "chunk_tokens": CHUNK, "staging_mib": 256}
    own: dict[str, Any] = {"connector": "TandemStoreConnector", "transfer": {"store": store}}
    own |= {"max_num_batched_tokens": CHUNK, "max_num_seqs": 4, "enable_prefix_caching": False}
    found, pids = start_side(model, "kv_both" if path else None, pinned=False, **own)
    try:
        yield found
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        found.shutdown()


async def ask(llm: AsyncLLM, prompt: list[int]) -> tuple[Answer, float, float]:
    """Send a prompt; return the answer, and the seconds to its first token and to its end."""
    began = time.monotonic()
    found = await generate(llm, prompt, ANSWER_TOKENS, **PLAIN)
    times = found.token_at[0] - began, time.monotonic() - began
    await asyncio.sleep(PAUSE_S)
    return found, *times


async def restart(model: str, folder: Path, count: int) -> dict[str, Any]:
    """Send stored and new prompts in turn, after a restart, and return the measurements."""
    dice = random.Random(1)
    stored = [random_prompt(dice, PROMPT_TOKENS) for _ in range(count)]
    async with engine(model, folder / "restart") as llm:
        for prompt in stored:
            await ask(llm, prompt)
        await asyncio.sleep(1.0)
    cached: dict[str, list[int]] = {"warm": [], "cold": []}
    times: dict[str, list[float]] = {"warm": [], "cold": []}
    async with engine(model, folder / "restart") as llm:
        for _ in range(2):
            await ask(llm, random_prompt(dice, PROMPT_TOKENS))
        for _, kind, _ in turns(("warm", "cold"), count, warm_up=0):
            prompt = stored[len(times[kind])] if kind == "warm" else random_prompt(dice, PROMPT_TOKENS)
            found, ttft_s, _ = await ask(llm, prompt)
            cached[kind].append(found.cached_tokens or 0)
            times[kind].append(ttft_s)
    assert not any(cached["cold"]), "the store has objects of the new prompts"
    row: dict[str, Any] = {f"{kind}_s": summary(values) for kind, values in times.items()}
    return row | {"loaded_tokens": statistics.mean(cached["warm"]), "ratio": ratios(times["warm"], times["cold"])}


async def storing(model: str, folder: Path, count: int) -> dict[str, Any]:
    """Measure new prompts sent alternately to an engine with a store and to one without."""
    dice = random.Random(4)
    times: dict[str, list[tuple[float, float]]] = {"store": [], "none": []}
    async with AsyncExitStack() as stack:
        engines = {
            name: await stack.enter_async_context(engine(model, path))
            for name, path in (("store", folder / "storing"), ("none", None))
        }
        for _, name, counted in turns(list(engines), count, warm_up=2):
            _, *seconds = await ask(engines[name], random_prompt(dice, PROMPT_TOKENS))
            if counted:
                times[name].append((seconds[0], seconds[1]))
    found: dict[str, Any] = {}
    for index, kind in enumerate(("ttft", "seconds_per_answer")):
        ours, theirs = ([one[index] for one in times[name]] for name in ("store", "none"))
        found[kind] = {"store_s": summary(ours), "none_s": summary(theirs), "ratio": ratios(ours, theirs)}
    return found


def bandwidth(folder: Path, memory_folder: Path, rounds: int) -> dict[str, Any]:
    """Measure reads of each tier's objects, and of the same bytes without a store.

    ``memory_folder``  folder on the tmpfs to measure
    """
    payload = np.random.default_rng(1).integers(0, 256, OBJECT_BYTES, np.uint8)
    names = [ObjectName(bytes(16), number.to_bytes(32, "big")) for number in range(OBJECTS)]
    target = memoryview(mmap.mmap(-1, OBJECT_BYTES))
    into = np.frombuffer(target, np.uint8)
    sources = [payload.copy() for _ in names]

    def copied() -> None:
        for source in sources:
            into[:] = source

    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=memory_folder) as memory:
        for label, root in (("memory", Path(memory) / "tier"), ("disk", folder / "tier")):
            tier = FolderTier(root, 4 << 30, durable=label == "disk", label=label)
            tier.open()
            for name in names:
                tier.write(name, payload.data, time.monotonic() + 60)
            files = sorted((root / "objects").glob("*/*"))
            assert len(files) == OBJECTS

            def read(files: list[Path] = files) -> None:
                for file in files:
                    with file.open("rb", buffering=0) as opened:
                        opened.seek(file.stat().st_size - OBJECT_BYTES)
                        assert opened.readinto(target) == OBJECT_BYTES

            def loaded(tier: FolderTier = tier) -> None:
                for name in names:
                    tier.read(name, target)

            runs: dict[str, Callable[[], None]] = {"store": loaded, "plain": copied if label == "memory" else read}
            clock = time.thread_time if label == "memory" else time.monotonic
            speeds: dict[str, list[float]] = {kind: [] for kind in runs}
            for _, kind, counted in turns(list(runs), rounds):
                if label == "disk":
                    drop_from_page_cache(files)
                began = clock()
                runs[kind]()
                taken = clock() - began
                if counted:
                    speeds[kind].append(OBJECT_BYTES * OBJECTS / taken / 1e9)
            found[label] = {f"{kind}_gb_per_s": summary(each) for kind, each in speeds.items()}
            found[label]["ratio"] = ratios(speeds["store"], speeds["plain"])
    return found


def drop_from_page_cache(files: list[Path]) -> None:
    for file in files:
        opened = os.open(file, os.O_RDONLY)
        os.fsync(opened)
        os.posix_fadvise(opened, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(opened)


def main(*, count: int = 12, only: tuple[str, ...] = EVERY, folder: str = "", memory_folder: str = "/dev/shm") -> None:
    if unknown := set(only) - set(EVERY):
        raise SystemExit(f"ONLY={','.join(sorted(unknown))}: write names of {', '.join(EVERY)}")
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=folder or None) as name:
        own = Path(name)
        model = benchmark_gemma3(own / "model").path
        for kind in only:
            if kind == "bandwidth":
                found[kind] = bandwidth(own, Path(memory_folder), count)
            else:
                measure = {"restart": restart, "storing": storing, "conversation": conversation}[kind]
                found[kind] = asyncio.run(measure(model, own, count))
    print(json.dumps(found, indent=2))
    write("store", read("store") | found)
