"""First contact of many decode workers with one prefill engine: duration, and stalls of its
scheduler.

    python -m benchmarks.first_contacts [--engines 64] [--ranks 8] [--before CHECKOUT] [--rounds 3]

One process acts as the prefill engine's core: it publishes the metadata of 8 ranks and runs a
scheduler's steps, of one millisecond of Python each. Another process acts as the decode workers,
which all request the metadata at once over TLS. A step's *stall* is its duration beyond the median
of a quiet second. On a machine with few cores the decode workers also use the processor: the quiet
column runs beside the same load on another port.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from testing.connector_state import snapshot

SECRET = "of the benchmark, and no other"
LAYERS, RANKS = 64, 8


def rank_metadata() -> dict[tuple[int, int], Any]:
    """Return the metadata that the workers of a prefill engine of 8 ranks publish."""
    from connectors.codec import encode_agent_metadata
    from connectors.planning.layout import EngineLayout, Group, GroupKind, LayerPages, MemoryKind, Region
    from connectors.protocol.agent_metadata import AgentMetadata, ModelIdentity
    from connectors.vllm_hma.orders import EncodedAgentMetadata

    page, blocks = 4096, 10_000
    found = {}
    for rank in range(RANKS):
        layers = tuple(
            LayerPages(f"layers.{layer}", (1 + layer) << 32, page, RANKS, 1, page, 16, page // 16, page // 16, "p")
            for layer in range(LAYERS)
        )
        regions = tuple(Region(pages.address, page * blocks, MemoryKind("VRAM", rank)) for pages in layers)
        group = Group(0, GroupKind.FULL, 16, None, layers)
        layout = EngineLayout(rank, RANKS, blocks, regions, (group,))
        identity = ModelIdentity("model", "bfloat16", "auto", "0")
        agent_metadata = AgentMetadata("prefill", identity, layout, "nixl", os.urandom(4096))
        found[0, rank] = EncodedAgentMetadata(encode_agent_metadata(agent_metadata))
    return found


def core(pipe: Connection) -> None:
    """Engine core: publishes, steps until it is stopped, and reports the durations of its steps."""
    import inspect

    from connectors.vllm_hma.config import parse_config
    from connectors.vllm_hma.scheduler_side.scheduler import SchedulerConnector

    more: dict[str, Any] = (
        {"step_tokens": 8192} if "step_tokens" in inspect.signature(SchedulerConnector).parameters else {}
    )
    half = SchedulerConnector(parse_config({"secret": SECRET}), "prefill", RANKS, (), **more)
    published_at = time.monotonic()
    half.publish(rank_metadata())
    port = snapshot(half).side_channel_port
    pipe.send((port, time.monotonic() - published_at))
    while pipe.recv() == "step":
        lasts: list[float] = []
        while not pipe.poll():
            began = time.perf_counter()
            total = 0
            for number in range(12_000):
                total += number
            lasts.append(time.perf_counter() - began)
            time.sleep(0.001)
        pipe.recv()
        pipe.send(lasts)
    half.close()


def decode_workers(port: int, count: int, pipe: Connection) -> None:
    """Run these workers at once; each reports that it has all agent metadata, or the reason why
    not.
    """
    from connectors.vllm_hma.handshake.secret import derive_keys
    from connectors.vllm_hma.handshake.side_channel import _METADATA_REQUEST, _ask

    identity = derive_keys(SECRET).identity
    begin = threading.Barrier(count + 1)
    took: list[float] = []
    failures: list[str] = []

    def ask() -> None:
        begin.wait()
        began = time.monotonic()
        try:
            _ask(_METADATA_REQUEST, "127.0.0.1", port, 30.0, identity)
            took.append(time.monotonic() - began)
        except Exception as error:
            failures.append(str(error))

    threads = [threading.Thread(target=ask) for _ in range(count)]
    for thread in threads:
        thread.start()
    pipe.send("ready")
    pipe.recv()
    began = time.monotonic()
    begin.wait()
    for thread in threads:
        thread.join()
    pipe.send((time.monotonic() - began, sorted(took), failures))


def steps(pipe: Connection, until: Any) -> list[float]:
    """Return the durations of the core's steps while ``until`` runs."""
    pipe.send("step")
    until()
    pipe.send("stop")
    found: list[float] = pipe.recv()
    return found


def measure(count: int) -> dict[str, Any]:
    """Run one round: a quiet second, then all contacts."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    engine = context.Process(target=core, args=(theirs,))
    engine.start()
    port, publish_s = ours.recv()
    mine, workers = context.Pipe()
    decode = context.Process(target=decode_workers, args=(port, count, workers))
    decode.start()
    mine.recv()
    quiet = steps(ours, lambda: time.sleep(1.0))
    outcome: list[Any] = []

    def contact() -> None:
        mine.send("go")
        outcome.append(mine.recv())

    busy = steps(ours, contact)
    ours.send("end")
    engine.join()
    decode.join()
    lasts, took, failures = outcome[0]
    usual = statistics.median(quiet)
    return {
        "workers": count,
        "publish_s": publish_s,
        "contact_s": lasts,
        "median_s": statistics.median(took) if took else None,
        "failures": len(failures),
        "quiet_step_ms": 1000 * usual,
        "step_ms": {
            "median": 1000 * statistics.median(busy),
            "p99": 1000 * sorted(busy)[int(0.99 * len(busy))],
            "longest": 1000 * max(busy),
        },
        "stalled_s": sum(max(0.0, each - usual) for each in busy),
    }


def main() -> None:
    """Alternate between two checkouts, or measure this one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", type=int, default=64)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--before", type=Path, help="checkout of the revision to compare with")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--once", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    count = arguments.engines * arguments.ranks
    if arguments.once is not None:
        arguments.once.write_text(json.dumps(measure(count)))
        return
    checkouts = {"after": Path(__file__).resolve().parents[1]}
    if arguments.before is not None:
        checkouts = {"before": arguments.before.resolve()} | checkouts
    rounds = []
    for _ in range(arguments.rounds):
        for arm, checkout in checkouts.items():
            with tempfile.NamedTemporaryFile(suffix=".json") as out:
                command = [sys.executable, __file__, "--once", out.name]
                command += ["--engines", str(arguments.engines), "--ranks", str(arguments.ranks)]
                subprocess.run(command, env=os.environ | {"PYTHONPATH": str(checkout)}, cwd=checkout, check=True)
                rounds.append({"arm": arm, **json.loads(Path(out.name).read_text(encoding="utf-8"))})
            print(rounds[-1], flush=True)
    from benchmarks.report import write

    print(write(f"first_contacts_{count}", {"command": "python -m benchmarks.first_contacts", "rounds": rounds}))


if __name__ == "__main__":
    main()
