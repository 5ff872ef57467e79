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
the best of each, which a busy machine disturbs least. RUNS are in KiB.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.pair import HOST, Agent, Pair, Side
from benchmarks.report import ratios, spread, summary, turns, write
from connectors.planning.blocks import Ints
from connectors.planning.descriptors import Moves, build_runs
from connectors.planning.plan import plan_pair

LAYERS = 8
ARMS = ("ours", "raw", "memcpy")


def scattered(rng: np.random.Generator, blocks: int, count: int) -> Ints:
    """Return ids without neighbours in order, so that every run is one page."""
    return rng.permutation(np.arange(1, blocks, 2))[:count].astype(np.int64)


class Bench:
    """Producer of one run length."""

    def __init__(
        self, run_bytes: int, blocks: int, layers: int, ids: tuple[Ints, Ints], consumer: tuple[bytes, Any]
    ) -> None:
        self.side = Side(f"producer-{os.getpid()}", run_bytes, blocks, layers)
        rng = np.random.default_rng(run_bytes)
        self.side.memory[:] = rng.integers(0, 256, self.side.memory.shape, np.uint8)
        self.ids = ids
        parts = np.zeros(len(ids[0]), np.int64)
        self.moves = Moves(0, ids[0], parts, ids[1], parts)
        metadata, layout = consumer
        self.plan = plan_pair(self.side.layout, layout)
        self.peer = self.side.transport.add_peer(metadata)

        runs = build_runs(self.plan, [self.moves])
        self.agent = Agent(f"raw-{os.getpid()}", self.side)
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


def measure(fabric: str, kib: int, mib: int, rounds: int) -> dict[str, Any]:
    """Check that both ways move the right bytes, then measure one run length."""
    run_bytes = kib << 10
    count = max(1, (mib << 20) // (run_bytes * LAYERS))
    blocks = 2 * count + 2
    rng = np.random.default_rng(run_bytes)
    ids = (scattered(rng, blocks, count), scattered(rng, blocks, count))
    seconds: dict[str, list[float]] = defaultdict(list)
    with Pair(Bench, (run_bytes, blocks, LAYERS), ids, fabric=fabric) as pair:
        for arm in ("ours", "raw"):
            pair.producer.call("seconds", arm)
            assert pair.consumer.call("digest", ids[1]) == pair.producer.call("digest"), arm
        for _, arm, counted in turns(ARMS, rounds):
            took = pair.producer.call("seconds", arm)
            if counted:
                seconds[arm].append(took)
        row: dict[str, Any] = {"run_kib": kib, "runs": pair.producer.made}
    row["ms"] = {arm: summary([1e3 * took for took in seconds[arm]]) for arm in ARMS}
    for arm, other in (("ours", "raw"), ("raw", "memcpy"), ("ours", "memcpy")):
        best = {"of_best": min(seconds[other]) / min(seconds[arm])}
        row[f"{arm}_over_{other}"] = ratios(seconds[other], seconds[arm]) | best
    return row


def main(
    *,
    mib: int = 64,
    rounds: int = 9,
    fabrics: tuple[str, ...] = ("shm", "tcp"),
    runs: tuple[int, ...] = (4, 16, 64, 256, 1024),
) -> None:
    found: dict[str, Any] = {}
    for fabric in fabrics:
        found[fabric] = []
        for kib in runs:
            found[fabric].append(row := measure(fabric, kib, mib, rounds))
            ratios_of = {name: one for name, one in row.items() if "_over_" in name}
            text = ", ".join(f"{name} {spread(one)} [{one['of_best']:.2f}]" for name, one in ratios_of.items())
            print(f"{fabric} {kib:5} KiB  {text}", flush=True)
    write("transfer", {"mib": mib, "rounds": rounds, "layers": LAYERS, "rows": found})
