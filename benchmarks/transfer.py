"""Compare Tandem's transfers with raw NIXL, which moves the same bytes as one list, and a memcpy.

    python -m benchmarks.transfer [--mib 64] [--rounds 9] [--fabrics shm,tcp]
        [--runs 4,16,64,256,1024] [--settings "" "UCX_A=1 UCX_B=2" ...] [--rest-ms 1]
        [--name transfer]

A producer and a consumer process. Each round moves the same scattered pages of 8 layers three
times, in turn:

ours    the worker's path of a write: moves -> ``build_runs`` -> ``NixlTransport.write`` -> ``poll``
        until done
raw     a separate agent with a coalesced list prepared beforehand (``initialize_xfer``): from
        ``transfer`` to DONE
memcpy  libc's memmove of the same list inside the producer, in a compiled loop

Ratios are speeds. Ours over raw is our cost; the other two are the cost of the transport. Each
ratio is that of the medians, then the quartiles of paired rounds, then in square brackets that of
the best of each, which a busy machine disturbs least. With several ``--settings`` (environment
variables of both processes, and ``rest_ms``, the consumer's pause between polls for messages) every
round measures one pair for each, and ``over_first`` compares them.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import random
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from benchmarks.pair import HOST, REST_S, SHARED_MEMORY, TCP_LOOPBACK, Pair, Side, produce
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

    def __init__(self, run_bytes: int, blocks: int, ids: tuple[Ints, Ints], consumer: tuple[bytes, Any]) -> None:
        from nixl._api import nixl_agent, nixl_agent_config

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
        self.raw = nixl_agent(
            f"raw-{os.getpid()}-{run_bytes}", nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        )
        self.registered = self.raw.register_memory(
            [(r.address, r.length_bytes, 0, "") for r in self.side.regions], "DRAM"
        )
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

        self.shaped = len(runs)

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
        self.raw.deregister_memory(self.registered)
        self.side.transport.close()


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
    consumer = pair.ask_consumer("shape", run_bytes, blocks, LAYERS)
    runs: int = pair.ask("shape", run_bytes, blocks, ids, consumer)
    for arm in ("ours", "raw"):
        pair.ask("seconds", arm)
        assert pair.ask_consumer("digest", ids[1]) == pair.ask("digest"), arm
    return runs


def measure(pairs: Mapping[str, Pair], kib: int, mib: int, rounds: int) -> list[dict[str, Any]]:
    """Measure all settings of one run length, interleaved."""
    from benchmarks.report import summary

    runs = {name: shape(pair, kib << 10, mib << 20) for name, pair in pairs.items()}
    seconds: dict[str, dict[str, list[float]]] = {name: {arm: [] for arm in ARMS} for name in pairs}
    # In random order: the previous way determines the content of the caches.
    rng = random.Random(kib)
    for number in range(rounds + 1):
        for name, pair in rng.sample(list(pairs.items()), len(pairs)):
            for arm in rng.sample(ARMS, len(ARMS)):
                took = pair.ask("seconds", arm)
                if number:
                    seconds[name][arm].append(took)
    rows = []
    first = next(iter(seconds.values()))
    for name, arms in seconds.items():
        rows.append(
            {
                "run_kib": kib,
                "settings": name,
                "runs": runs[name],
                "ms": {arm: summary([1e3 * t for t in arms[arm]]) for arm in ARMS},
                "ours_over_raw": speedup(arms["ours"], arms["raw"]),
                "raw_over_memcpy": speedup(arms["raw"], arms["memcpy"]),
                "ours_over_memcpy": speedup(arms["ours"], arms["memcpy"]),
                "over_first": speedup(arms["ours"], first["ours"]),
            }
        )
    return rows


def speedup(seconds: list[float], other: list[float]) -> dict[str, float]:
    """Return the speed-up over ``other``: of the medians, of the best of each, and the quartiles
    of paired rounds.
    """
    from benchmarks.report import ratios

    return ratios(other, seconds) | {"of_best": min(other) / min(seconds)}


def show(fabric: str, rows: list[dict[str, Any]]) -> None:
    for row in rows:
        columns = ("ours_over_raw", "raw_over_memcpy", "ours_over_memcpy", "over_first")
        text = "   ".join(
            f"{row[c]['of_medians']:5.2f} ({row[c]['q1']:.2f}-{row[c]['q3']:.2f}) [{row[c]['of_best']:.2f}]"
            for c in columns
        )
        print(f"{fabric:20} {row['run_kib']:5} KiB  {text}  {row['settings']}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--fabrics", default="shm,tcp", help="of shm, tcp")
    parser.add_argument("--runs", default="4,16,64,256,1024", help="KiB")
    parser.add_argument("--settings", nargs="+", default=[""])
    parser.add_argument("--rest-ms", type=float, default=1e3 * REST_S)
    parser.add_argument("--name", default="transfer")
    arguments = parser.parse_args()
    found: dict[str, Any] = {}
    for short in arguments.fabrics.split(","):
        with contextlib.ExitStack() as stack:
            fabric = {"shm": SHARED_MEMORY, "tcp": TCP_LOOPBACK}[short]
            print(
                f"{fabric.name:32} ours/raw            raw/memcpy           ours/memcpy          over first", flush=True
            )
            pairs = {}
            for text in arguments.settings:
                environment = dict(word.split("=", 1) for word in text.split())
                rest_ms = float(environment.pop("rest_ms", arguments.rest_ms))
                pairs[text or "default"] = Pair(fabric, partial(produce, Bench), environment, rest_ms / 1e3)
                stack.callback(pairs[text or "default"].close)
            found[fabric.name] = []
            for kib in map(int, arguments.runs.split(",")):
                rows = measure(pairs, kib, arguments.mib, arguments.rounds)
                show(fabric.name, rows)
                found[fabric.name] += rows
    from benchmarks.report import write

    document = {
        "mib": arguments.mib,
        "rounds": arguments.rounds,
        "layers": LAYERS,
        "rest_ms": arguments.rest_ms,
        "rows": found,
    }
    print(f"written to {write(arguments.name, document)}")


if __name__ == "__main__":
    main()
