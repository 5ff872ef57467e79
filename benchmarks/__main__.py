"""Run a benchmark by name.

python -m benchmarks                                  list the benchmarks
python -m benchmarks handover REQUESTS=12 TP=1:2      one of them, with options
python -m benchmarks handover --help                  what it measures, its options and defaults

A benchmark's ``main`` prints a table, writes ``benchmarks/results/NAME.json``, and returns 1 if it
has a limit and misses it. Its keyword-only parameters are its options.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from testing.options import defaults, parse, shown

ROOT = Path(__file__).resolve().parents[1]

TABLE = """
handover        benchmarks.handover                handover and TTFT, beside NixlConnector, or PEER=bare
service         benchmarks.service                 TTFT through HTTP, beside vllm-router and Ray Serve LLM
link            benchmarks.link                    TTFT over a slow link, beside vLLM's connectors (root)
first-token     benchmarks.first_token             first and second token over a slow link (root)
transfer        benchmarks.transfer                transfers, beside raw NIXL and memcpy
descriptors     benchmarks.descriptors             building and posting descriptors, beside NixlConnector
kv-layouts      benchmarks.kv_layouts              runs of a transfer by KV cache layout
router          benchmarks.router.compare          the router, beside vllm-router and a plain proxy; ROUTERS=2
overload        benchmarks.overload.compare     goodput over load, beside vllm-router and plain Ray Serve
disconnects     benchmarks.router.disconnects      10,000 requests, half of whose clients disconnect
open-streams    benchmarks.router.open_streams     10,000 open streams on a router; STREAMS=2000 MINUTES=1
bookkeeping     benchmarks.bookkeeping             a decision of the router with 64 engines
store           benchmarks.store                   the KV store: restarts, conversations, reads
store-choice    benchmarks.store_choice            the store's choices over links and disks (root)
routing         benchmarks.routing.compare         routing policies and an oracle, simulated
scaling         benchmarks.scaling.compare         autoscaling policies, simulated; TRACES=file.csv
autoscaling-live benchmarks.scaling.live            autoscaling of real, paced engines, beside the simulation
demo-model      benchmarks.demo_model.evaluate     the demo model's recall on held-out prompts
sensitivity     benchmarks.demo_model.sensitivity  whether damaged KV makes its answers wrong
train           benchmarks.demo_model.train        train the demo model: OUT=folder
"""
"""Columns: name, module, what it measures."""

BENCHMARKS = {
    name: (module, what) for name, module, what in (line.split(maxsplit=2) for line in TABLE.split("\n")[1:-1])
}

PEERS = {"VLLM_ROUTER": "build/vllm-router/bin/vllm-router", "RAY_LLM": "build/ray-llm/bin/python"}
"""Options with a peer's command; `make bench` installs it. Without it, the others are measured."""


def main(words: Sequence[str]) -> int:
    """Run the named benchmark and return its exit status."""
    if not words:
        print(__doc__)
        print("\n".join(f"  {name:15} {what}" for name, (_, what) in BENCHMARKS.items()))
        return 0
    name, *options = words
    if name not in BENCHMARKS:
        print(f"no benchmark {name}; `python -m benchmarks` lists them", file=sys.stderr)
        return 2
    module = import_module(BENCHMARKS[name][0])
    known = defaults(module.main)
    if "--help" in options:
        print(module.__doc__)
        print("Options:", shown(known))
        return 0
    peers = [f"{one}={path}" for one, path in PEERS.items() if one.lower() in known and (ROOT / path).exists()]
    # Engines and services run in sessions of their own: a stopped benchmark must not leave them.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    return module.main(**parse(module.main, [*peers, *options])) or 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
