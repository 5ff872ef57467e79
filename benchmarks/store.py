"""Compare the KV store with computing, with no store, and with plain copies of the bytes.

    python -m benchmarks.store

    restart    TTFT of prompts that an engine stored before ``kill -9``, compared with new prompts.
               Stored and new prompts alternate; each is sent once
    storing    TTFT and seconds per answer of an engine that stores and never loads, compared with
               an engine without a connector. Requests alternate between the engines
    bandwidth  one thread reads and verifies objects. The memory tier is measured in CPU time,
               because its reads never wait. It is compared with memcpy, and with reads of the same
               files without a digest. The disk tier is compared with a plain sequential read; its
               files are dropped from the page cache before each read
    index      time in which a start reads the eviction order of 20,000 and of 50,000 small objects
    conversation  TTFT of a conversation's eighth turn through a prefill and a decode engine,
               compared with the same pair without a store (``store_conversation.py``)

Engines of the first two measurements have no prefix cache. Each of them is a separate process. Only
one engine, or one pair, works at a time. With ``--only``, the file keeps the earlier results of the
other measurements.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import mmap
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import report
from connectors.store.tiers.folder import FolderTier
from connectors.store.tiers.objects import ObjectName

ROOT = Path(__file__).resolve().parents[1]
PROMPT_TOKENS, ANSWER_TOKENS, CHUNK = 2000, 48, 256
OBJECT_BYTES, OBJECTS = 8 << 20, 32
INDEXED, INDEXED_BYTES = (20_000, 50_000), 4096
PAUSE_S = 0.4
"""Pause between two requests, in which the engine stores the KV of the first."""


# ---- engines -------------------------------------------------------------------------------------


async def serve(model: str, path: str) -> None:
    """Answer prompts from standard input, one line of JSON each, until killed."""
    import uuid

    from vllm import SamplingParams, TokensPrompt
    from vllm.config import KVTransferConfig

    from testing.engines import start_engine

    transfer = None
    if path:
        store = {"path": path, "disk_gib": 4.0, "chunk_tokens": CHUNK, "staging_mib": 256}
        transfer = KVTransferConfig(
            kv_connector="TandemStoreConnector",
            kv_connector_module_path="connectors.vllm_hma.store_connector",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={"store": store},
        )
    engine = start_engine(model, 1, None, kv_transfer_config=transfer, max_num_batched_tokens=CHUNK, max_num_seqs=4)
    params = SamplingParams(temperature=0.0, max_tokens=ANSWER_TOKENS, ignore_eos=True, detokenize=False)
    print("ready", flush=True)
    lines = asyncio.StreamReader(limit=2**20)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    while line := await lines.readline():
        began, first_s, cached = time.monotonic(), 0.0, 0
        prompt = TokensPrompt(prompt_token_ids=json.loads(line))
        async for output in engine.generate(prompt, params, uuid.uuid4().hex):
            first_s = first_s or time.monotonic() - began
            cached = output.num_cached_tokens or 0
        seconds = time.monotonic() - began
        print("answer " + json.dumps({"ttft_s": first_s, "seconds": seconds, "cached": cached}), flush=True)


class Engine:
    """An engine in a process of its own; without a store if ``path`` is None."""

    def __init__(self, model: str, path: Path | None, log: Path) -> None:
        command = [sys.executable, "-m", "benchmarks.store", "--serve", model, "--path", str(path or "")]
        self._log = log
        with log.open("w", encoding="utf-8") as errors:
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )
        self._line("ready")

    def ask(self, prompt: list[int]) -> dict[str, float]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(prompt) + "\n")
        self._process.stdin.flush()
        found: dict[str, float] = json.loads(self._line("answer "))
        time.sleep(PAUSE_S)
        return found

    def kill(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _line(self, kind: str) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(kind):
                return line.removeprefix(kind)
        raise RuntimeError("the engine ended: " + self._log.read_text()[-2000:])


def prompts(seed: int, count: int) -> list[list[int]]:
    dice = random.Random(seed)
    return [[dice.randrange(4, 500) for _ in range(PROMPT_TOKENS)] for _ in range(count)]


def restart(model: str, folder: Path, count: int) -> dict[str, Any]:
    """Send stored and new prompts in turn, after a restart, and return the measurements."""
    stored, new, extra = prompts(1, count), prompts(2, count), prompts(3, 2)
    engine = Engine(model, folder / "restart", folder / "before.log")
    try:
        for prompt in stored:
            engine.ask(prompt)
        time.sleep(1.0)
    finally:
        engine.kill()
    engine = Engine(model, folder / "restart", folder / "after.log")
    try:
        for prompt in extra:
            engine.ask(prompt)
        pairs = [(engine.ask(one), engine.ask(other)) for one, other in zip(stored, new, strict=True)]
    finally:
        engine.kill()
    assert all(other["cached"] == 0 for _, other in pairs), "the store has objects of the new prompts"
    warm, cold = ([pair[side]["ttft_s"] for pair in pairs] for side in (0, 1))
    return {
        "loaded_tokens": statistics.mean(pair[0]["cached"] for pair in pairs),
        "warm_s": report.summary(warm),
        "cold_s": report.summary(cold),
        "ratio": report.ratios(warm, cold),
    }


def storing(model: str, folder: Path, count: int) -> dict[str, Any]:
    """Measure new prompts sent alternately to an engine with a store and to one without."""
    asked = prompts(4, 2 * count + 4)
    with_store = Engine(model, folder / "storing", folder / "storing.log")
    try:
        without = Engine(model, None, folder / "plain.log")
        try:
            for number in range(2):
                with_store.ask(asked[2 * number])
                without.ask(asked[2 * number + 1])
            ours, theirs = [], []
            for number in range(2, count + 2):
                one, other = asked[2 * number], asked[2 * number + 1]
                # A B B A: neither is always the first one.
                if number % 2:
                    ours.append(with_store.ask(one))
                    theirs.append(without.ask(other))
                else:
                    theirs.append(without.ask(other))
                    ours.append(with_store.ask(one))
        finally:
            without.kill()
    finally:
        with_store.kill()
    found: dict[str, Any] = {}
    for name, value in (("ttft", _ttft_s), ("seconds_per_answer", _seconds)):
        pairs = [list(map(value, each)) for each in (ours, theirs)]
        found[name] = {"store_s": report.summary(pairs[0]), "none_s": report.summary(pairs[1])}
        found[name]["ratio"] = report.ratios(*pairs)
    return found


def _ttft_s(answer: dict[str, float]) -> float:
    return answer["ttft_s"]


def _seconds(answer: dict[str, float]) -> float:
    return answer["seconds"]


# ---- tiers ---------------------------------------------------------------------------------------


def bandwidth(folder: Path, memory_folder: Path, rounds: int) -> dict[str, Any]:
    """Measure reads of each tier's objects, and of the same bytes without a store.

    ``memory_folder``  folder on the tmpfs to measure
    """
    payload = np.random.default_rng(1).integers(0, 256, OBJECT_BYTES, np.uint8)
    names = [ObjectName(bytes(16), number.to_bytes(32, "big"), 0) for number in range(OBJECTS)]
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

            def forget(files: list[Path] = files, label: str = label) -> None:
                for file in files if label == "disk" else []:
                    _drop_from_page_cache(file)

            runs: dict[str, Callable[[], None]] = {"store": loaded, "plain": read}
            if label == "memory":
                runs = {"store": loaded, "plain": copied, "unverified": read}
            clock = time.thread_time if label == "memory" else time.monotonic
            speeds: dict[str, list[float]] = {kind: [] for kind in runs}
            for number in range(rounds + 1):
                for kind, run in list(runs.items())[:: 1 if number % 2 else -1]:
                    forget()
                    taken = _timed(run, clock)
                    if number:
                        speeds[kind].append(OBJECT_BYTES * OBJECTS / taken / 1e9)
            tier.close()
            found[label] = {f"{kind}_gb_per_s": report.summary(each) for kind, each in speeds.items()}
            found[label]["ratio"] = report.ratios(speeds["store"], speeds["plain"])
            if "unverified" in speeds:
                found[label]["unverified_ratio"] = report.ratios(speeds["unverified"], speeds["plain"])
    return found


def index(folder: Path, rounds: int) -> dict[str, Any]:
    """Measure the time in which a starting process reads the eviction order of stored objects.

    Each label of the result has times in seconds, and ``queued``: the part of them for which the
    thread was ready and waited for a core.

    ``uncached``  the objects' data is dropped from the page cache before each start; directories
                  and inodes are not
    ``cached``    another start follows directly
    """
    payload = memoryview(bytes(INDEXED_BYTES))
    tier = FolderTier(folder / "index", 4 << 30, durable=False)
    tier.open()
    found: dict[str, Any] = {}
    stored = 0
    for count in INDEXED:
        for number in range(stored, count):
            tier.write(ObjectName(bytes(16), number.to_bytes(32, "big"), 0), payload, time.monotonic() + 60)
        stored = count
        starts: dict[str, list[tuple[float, float]]] = {"uncached": [], "cached": []}
        for _ in range(rounds):
            with ThreadPoolExecutor(16) as pool:
                list(pool.map(_drop_from_page_cache, (folder / "index" / "objects").glob("*/*")))
            for times in starts.values():
                times.append(_start(folder / "index", count))
        found[str(count)] = {
            label: {
                "seconds": report.summary([seconds for seconds, _ in times]),
                "queued": report.summary([queued for _, queued in times]),
                "seconds_per_10_000_without_queued": report.summary(
                    [(seconds - queued) * 10_000 / count for seconds, queued in times]
                ),
            }
            for label, times in starts.items()
        }
    tier.close()
    return found


def _start(path: Path, objects: int) -> tuple[float, float]:
    """Return the time in which a new tier reads the eviction order, and the part of it in which
    the thread waited for a core, both in seconds.
    """
    tier = FolderTier(path, 4 << 30)
    began, queued = time.monotonic(), _queued_s()
    assert tier.open() == objects
    times = time.monotonic() - began, _queued_s() - queued
    tier.close()
    return times


def _queued_s() -> float:
    """Return the time for which this thread has waited for a core, in seconds."""
    return int(Path("/proc/thread-self/schedstat").read_text(encoding="utf-8").split()[1]) / 1e9


def _drop_from_page_cache(file: Path) -> None:
    opened = os.open(file, os.O_RDONLY)
    os.fsync(opened)
    os.posix_fadvise(opened, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(opened)


def _timed(run: Callable[[], None], clock: Callable[[], float]) -> float:
    began = clock()
    run()
    return clock() - began


def main() -> None:
    """Run the measurements and write ``benchmarks/results/store.json``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    every = ["restart", "storing", "bandwidth", "index", "conversation"]
    parser.add_argument("--count", type=int, default=12, help="pairs of requests, reads, starts or conversations")
    parser.add_argument("--only", nargs="*", choices=every, default=every)
    parser.add_argument("--folder", type=Path, help="folder on the disk to measure")
    parser.add_argument("--memory-folder", type=Path, default=Path("/dev/shm"), help="folder on the tmpfs to measure")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--path", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        asyncio.run(serve(options.serve, options.path))
        return
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        if {"restart", "storing", "conversation"} & set(options.only):
            from testing.models import benchmark_gemma3

            model = benchmark_gemma3(folder / "model").path
        if "restart" in options.only:
            found["restart"] = restart(model, folder, options.count)
        if "storing" in options.only:
            found["storing"] = storing(model, folder, options.count)
        if "bandwidth" in options.only:
            found["bandwidth"] = bandwidth(folder, options.memory_folder, options.count)
        if "index" in options.only:
            found["index"] = index(folder, options.count)
        if "conversation" in options.only:
            from benchmarks.store_conversation import conversation

            found["conversation"] = conversation(model, folder, options.count)
    print(json.dumps(found, indent=2))
    report.write("store", report.read("store") | found)


if __name__ == "__main__":
    main()
