"""Compare Tandem's transfers with raw NIXL, which moves the same bytes as one list, and a memcpy.

A producer and a consumer process. Each round moves the same scattered pages of 8 layers three
times, in turn:

ours    the worker's path of a write: moves -> ``build_runs`` -> ``NixlTransport.write`` -> ``poll``
        until done
raw     a separate agent with a coalesced list prepared beforehand (``initialize_xfer``): from
        ``transfer`` to DONE
memcpy  libc's memmove of the same list inside the producer, in a compiled loop

Ratios are speeds. Ours over raw is our cost; the other two are the cost of the transport. Each
ratio is that of the medians, then the quartiles of paired rounds, then in square brackets that of
the best of each, which a busy machine disturbs least. RUNS are in KiB. With several SETTINGS
(``UCX_A=1 rest_ms=2;UCX_A=2``: environment variables of both processes, and the consumer's pause
between polls for messages) every round measures one pair for each, and ``over_first`` compares
them.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from itertools import product
from typing import Any

import numpy as np

from benchmarks.pair import HOST, REST_S, Agent, Pair, Side
from benchmarks.report import ratios, spread, summary, turns, write
from connectors.planning.blocks import Ints
from connectors.planning.descriptors import Moves, build_runs
from connectors.planning.plan import plan_pair

LAYERS = 8
ARMS = ("ours", "raw", "memcpy")
FABRICS = {"shm": "shared memory", "tcp": "TCP loopback"}


def scattered(rng: np.random.Generator, blocks: int, count: int) -> Ints:
    """Return ids without neighbours in order, so that every run is one page."""
    return rng.permutation(np.arange(1, blocks, 2))[:count].astype(np.int64)


class Bench:
    """Producer of one run length."""

    def __init__(self, run_bytes: int, blocks: int, ids: tuple[Ints, Ints], consumer: tuple[bytes, Any]) -> None:
        self.side = Side(f"producer-{os.getpid()}-{run_bytes}", run_bytes, blocks, LAYERS)
        rng = np.random.default_rng(run_bytes)
        self.side.memory[:] = rng.integers(0, 256, self.side.memory.shape, np.uint8)
        self.ids = ids
        parts = np.zeros(len(ids[0]), np.int64)
        self.moves = Moves(0, ids[0], parts, ids[1], parts)
        metadata, layout = consumer
        self.plan = plan_pair(self.side.layout, layout)
        self.peer = self.side.transport.add_peer(metadata)

        runs = build_runs(self.plan, [self.moves])
        self.agent = Agent(f"raw-{os.getpid()}-{run_bytes}", self.side)
        self.raw = self.agent.nixl
        self.raw.add_remote_agent(metadata)
        local, remote = (
            self.raw.get_xfer_descs(np.stack([at, runs.length, np.zeros_like(at)], 1).astype(np.uint64), "DRAM")
            for at in (runs.src, runs.dst)
        )
        self.ready = self.raw.initialize_xfer("WRITE", local, remote, self.peer)

        self.copy = np.zeros_like(self.side.memory)
        offset = self.copy.ctypes.data - layout.groups[0].layers[0].address
        self.list = (runs.dst + offset, runs.src, runs.length)
        self.move_list = compiled_memmove()
        self.move_list(*(column[:1] for column in self.list))

        self.made = len(runs)

    def digest(self) -> str:
        """Return the digest of the bytes to move."""
        return self.side.digest(self.ids[0])

    def seconds(self, arm: str) -> float:
        """Return the seconds of one way of moving."""
        took: float = getattr(self, f"{arm}_s")()
        return took

    def ours_s(self) -> float:
        began = time.perf_counter()
        transport = self.side.transport
        handle = transport.write(self.peer, build_runs(self.plan, [self.moves]), HOST, HOST)
        while not transport.poll(handle):
            pass
        return time.perf_counter() - began

    def raw_s(self) -> float:
        began = time.perf_counter()
        state = self.raw.transfer(self.ready)
        while state == "PROC":
            state = self.raw.check_xfer_state(self.ready)
        assert state == "DONE"
        return time.perf_counter() - began

    def memcpy_s(self) -> float:
        began = time.perf_counter()
        self.move_list(*self.list)
        return time.perf_counter() - began

    def close(self) -> None:
        self.ready.release()
        self.agent.close()
        self.side.close()


def compiled_memmove() -> Callable[[Ints, Ints, Ints], None]:
    """Return a function that copies (destinations, sources, bytes) with libc's memmove, without
    Python code per run.
    """
    from numba import njit

    memmove = ctypes.CDLL(None).memmove
    memmove.argtypes, memmove.restype = [ctypes.c_size_t] * 3, ctypes.c_size_t

    @njit
    def move(dst: Ints, src: Ints, length: Ints) -> None:
        for k in range(len(length)):
            memmove(np.uint64(dst[k]), np.uint64(src[k]), np.uint64(length[k]))

    return move


def shape(pair: Pair, run_bytes: int, total_bytes: int) -> int:
    """Create the caches of one run length, check that both ways move the right bytes, and return
    the number of runs.
    """
    count = max(1, total_bytes // (run_bytes * LAYERS))
    blocks = 2 * count + 2
    rng = np.random.default_rng(run_bytes)
    ids = (scattered(rng, blocks, count), scattered(rng, blocks, count))
    consumer = pair.consumer.ask("new", run_bytes, blocks, LAYERS)
    runs: int = pair.producer.ask("new", run_bytes, blocks, ids, consumer)
    for arm in ("ours", "raw"):
        pair.producer.ask("seconds", arm)
        assert pair.consumer.ask("digest", ids[1]) == pair.producer.ask("digest"), arm
    return runs


def measure(pairs: Mapping[str, Pair], kib: int, mib: int, rounds: int) -> list[dict[str, Any]]:
    """Measure all settings of one run length, interleaved."""
    runs = {name: shape(pair, kib << 10, mib << 20) for name, pair in pairs.items()}
    seconds: dict[tuple[str, str], list[float]] = defaultdict(list)
    for _, (name, arm), counted in turns(list(product(pairs, ARMS)), rounds):
        took = pairs[name].producer.ask("seconds", arm)
        if counted:
            seconds[name, arm].append(took)
    rows = []
    first = seconds[next(iter(pairs)), "ours"]
    for name in pairs:
        ours, raw, memcpy = (seconds[name, arm] for arm in ARMS)
        row: dict[str, Any] = {"run_kib": kib, "settings": name, "runs": runs[name]}
        row["ms"] = {arm: summary([1e3 * took for took in seconds[name, arm]]) for arm in ARMS}
        row |= {"ours_over_raw": speedup(ours, raw), "raw_over_memcpy": speedup(raw, memcpy)}
        row |= {"ours_over_memcpy": speedup(ours, memcpy), "over_first": speedup(ours, first)}
        rows.append(row)
    return rows


def speedup(seconds: list[float], other: list[float]) -> dict[str, float]:
    """Return the speed-up over ``other``: of the medians, of the best of each, and the quartiles
    of paired rounds.
    """
    return ratios(other, seconds) | {"of_best": min(other) / min(seconds)}


def main(
    *,
    mib: int = 64,
    rounds: int = 9,
    fabrics: tuple[str, ...] = ("shm", "tcp"),
    runs: tuple[int, ...] = (4, 16, 64, 256, 1024),
    settings: str = "",
    rest_ms: float = 1e3 * REST_S,
) -> None:
    found: dict[str, Any] = {}
    for fabric in (FABRICS[name] for name in fabrics):
        with ExitStack() as stack:
            pairs = {}
            for text in settings.split(";"):
                environment = dict(word.split("=", 1) for word in text.split())
                rest_s = float(environment.pop("rest_ms", rest_ms)) / 1e3
                pairs[text or "default"] = stack.enter_context(Pair(Bench, fabric, environment, rest_s))
            found[fabric] = []
            for kib in runs:
                rows = measure(pairs, kib, mib, rounds)
                for row in rows:
                    columns = ("ours_over_raw", "raw_over_memcpy", "ours_over_memcpy", "over_first")
                    text = ", ".join(f"{one} {spread(row[one])} [{row[one]['of_best']:.2f}]" for one in columns)
                    print(f"{fabric} {kib:5} KiB  {row['settings']}  {text}", flush=True)
                found[fabric] += rows
    write("transfer", {"mib": mib, "rounds": rounds, "layers": LAYERS, "rest_ms": rest_ms, "rows": found})
