"""Cost of digests: time to hash both ends of a transfer, and its share of the transfer, by run
length.

    python -m benchmarks.integrity [--mib 64] [--repeats 9]

Two NIXL agents of one process write scattered blocks from one buffer to another. Each round moves
the same blocks with integrity off and full, in turn. A round ends when the last byte has arrived
and, with full, both digests are equal.

source, target   nanoseconds to digest one KiB at either end, alone
transfer         nanoseconds to move one KiB with integrity off
off_ms, full_ms  one transfer of --mib MiB as the consumer waits for it: the source's digest
                 overlaps with the transport if that moves bytes in the background; the target's
                 follows it
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.report import ratios, summary, write
from connectors.planning.blocks import Ints
from connectors.planning.descriptors import Moves, build_runs
from connectors.planning.layout import EngineLayout, Group, GroupKind, LayerPages, MemoryKind, Region
from connectors.planning.plan import plan_pair
from connectors.transport.digest import End, HostMemory, digests
from connectors.transport.nixl import NixlTransport

HOST = MemoryKind("DRAM", 0)
LAYERS = 8
RUN_KIB = (4, 16, 64, 256, 1024)


class Side:
    """One agent with a cache of ``LAYERS`` layers whose pages have ``run_bytes`` bytes."""

    def __init__(self, name: str, run_bytes: int, blocks: int) -> None:
        self.memory = np.zeros((LAYERS, blocks, run_bytes), np.uint8)
        pages = LayerPages("", 0, run_bytes, 1, 1, run_bytes, 1, run_bytes, run_bytes, "benchmark")
        layers = tuple(
            replace(pages, layer=f"layers.{k}", address=layer.ctypes.data) for k, layer in enumerate(self.memory)
        )
        region = Region(self.memory.ctypes.data, self.memory.nbytes, HOST)
        self.layout = EngineLayout(0, 1, blocks, (region,), (Group(0, GroupKind.FULL, 1, None, layers),))
        self.transport = NixlTransport(name, devices=("lo",))
        self.transport.register(self.layout.regions)


def scattered(rng: np.random.Generator, blocks: int, count: int) -> Ints:
    """Return ids without neighbours in order, so that every run is one page."""
    ids = rng.permutation(np.arange(1, blocks, 2))[:count]
    return ids.astype(np.int64)


class Bench:
    """Measure all transfers of one run length."""

    def __init__(self, run_bytes: int, total_bytes: int) -> None:
        count = max(1, total_bytes // (run_bytes * LAYERS))
        blocks = 2 * count + 2
        self.source, self.target = (Side(f"{name}-{run_bytes}", run_bytes, blocks) for name in ("source", "target"))
        rng = np.random.default_rng(run_bytes)
        self.source.memory[:] = rng.integers(0, 256, self.source.memory.shape, np.uint8)
        parts = np.zeros(count, np.int64)
        self.moves = Moves(0, scattered(rng, blocks, count), parts, scattered(rng, blocks, count), parts)
        self.plan = plan_pair(self.source.layout, self.target.layout)
        self.runs = build_runs(self.plan, [self.moves])
        self.new_source = digests(self.plan, HostMemory(self.source.layout), End.SOURCE)
        self.new_target = digests(self.plan, HostMemory(self.target.layout), End.TARGET)
        self.peer = self.source.transport.add_peer(self.target.transport.metadata())

    def hash_source(self) -> str:
        digest = self.new_source()
        digest.add(0, self.moves.src_ids, self.moves.src_parts)
        return digest.hexdigest()

    def hash_target(self) -> str:
        digest = self.new_target()
        digest.add(0, self.moves.dst_ids, self.moves.dst_parts)
        return digest.hexdigest()

    def transfer_s(self, integrity: bool) -> float:
        began = time.perf_counter()
        handle = self.source.transport.write(self.peer, self.runs, HOST, HOST)
        said = self.hash_source() if integrity else ""
        while not self.source.transport.poll(handle):
            self.target.transport.notifications()
        found = self.hash_target() if integrity else ""
        took = time.perf_counter() - began
        assert said == found
        return took

    def close(self) -> None:
        for side in (self.source, self.target):
            side.transport.close()


def measure(run_bytes: int, total_bytes: int, repeats: int) -> dict[str, Any]:
    bench = Bench(run_bytes, total_bytes)
    kib = bench.runs.total_bytes / 1024
    times: dict[str, list[float]] = {name: [] for name in ("off", "full", "source", "target")}
    bench.transfer_s(True)
    for _ in range(repeats):
        times["off"].append(bench.transfer_s(False))
        times["full"].append(bench.transfer_s(True))
        for name, work in (("source", bench.hash_source), ("target", bench.hash_target)):
            began = time.perf_counter()
            work()
            times[name].append(time.perf_counter() - began)
    bench.close()
    per_kib = {name: summary([1e9 * t / kib for t in times[name]]) for name in ("source", "target")}
    return {
        "run_kib": run_bytes / 1024,
        "runs": len(bench.runs),
        "digest_ns_per_kib": per_kib,
        "transfer_ns_per_kib": summary([1e9 * t / kib for t in times["off"]]),
        "off_ms": summary([1e3 * t for t in times["off"]]),
        "full_ms": summary([1e3 * t for t in times["full"]]),
        "full_over_off": ratios(times["full"], times["off"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=9)
    arguments = parser.parse_args()
    rows = [measure(kib * 1024, arguments.mib * 2**20, arguments.repeats) for kib in RUN_KIB]
    path = write("integrity", {"mib": arguments.mib, "layers": LAYERS, "rows": rows})
    print(json.dumps(rows, indent=2))
    print("run KiB   source  target  transfer ns/KiB     off ms  full ms   full/off (q1-q3)")
    for row in rows:
        per_kib, ratio = row["digest_ns_per_kib"], row["full_over_off"]
        print(
            f"{row['run_kib']:7.0f} {per_kib['source']['median']:8.0f} {per_kib['target']['median']:7.0f} "
            f"{row['transfer_ns_per_kib']['median']:9.0f} {row['off_ms']['median']:16.1f} "
            f"{row['full_ms']['median']:8.1f} {ratio['of_medians']:10.2f} ({ratio['q1']:.2f}-{ratio['q3']:.2f})"
        )
    print(f"written to {path}")


if __name__ == "__main__":
    main()
