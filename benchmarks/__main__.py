"""Run a benchmark by name.

python -m benchmarks                                  list the benchmarks
python -m benchmarks handover REQUESTS=12 TP=1:2      one of them, with options
python -m benchmarks handover --help                  its options
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

TABLE = """
handover        benchmarks.handover                handover and TTFT, beside NixlConnector, or PEER=bare
service         benchmarks.service                 TTFT through HTTP, beside vllm-router and Ray Serve LLM
link            benchmarks.link                    TTFT over a slow link, beside vLLM's connectors (root)
first-token     benchmarks.first_token             first and second token over a slow link (root)
backlog         benchmarks.backlog                 decode under a prefill backlog; BEFORE=checkout
transfer        benchmarks.transfer                transfers, beside raw NIXL and memcpy
descriptors     benchmarks.descriptors             building and posting descriptors, beside NixlConnector
kv-layouts      benchmarks.kv_layouts              runs of a transfer by KV cache layout
contact         benchmarks.contact                 first contact of two workers, beside NixlConnector
first-contacts  benchmarks.first_contacts          64 decode engines of 8 ranks meet one prefill engine
router          benchmarks.router                  the router, beside vllm-router and a plain proxy; ROUTERS=2
disconnects     benchmarks.router.disconnects      10,000 requests, half of whose clients disconnect
open-streams    benchmarks.router.open_streams     10,000 open streams on a router; STREAMS=2000 MINUTES=1
versions        benchmarks.router.versions         restarts with another RPC version under load; OLDER=checkout
bookkeeping     benchmarks.bookkeeping             a decision of the router with 64 engines
store           benchmarks.store                   the KV store: restarts, conversations, reads
store-choice    benchmarks.store_choice            the store's choices over links and disks (root)
routing         benchmarks.routing                 routing policies and an oracle, simulated
scaling         benchmarks.scaling                 autoscaling policies, simulated; TRACES=file.csv
scaling-plot    benchmarks.scaling.plot            docs/images/scaling-*.svg from the last results of scaling
demo-model      benchmarks.demo_model.evaluate     the demo model's recall on held-out prompts
sensitivity     benchmarks.demo_model.sensitivity  whether damaged KV makes its answers wrong
"""
"""Columns: name, module, what it measures."""

BENCHMARKS = {
    name: (module, what) for name, module, what in (line.split(maxsplit=2) for line in TABLE.split("\n")[1:-1])
}

INSTALLED = {"VLLM_ROUTER": "build/vllm-router/bin/vllm-router", "RAY_LLM": "build/ray-llm/bin/python"}
PEERS = {"service": ("VLLM_ROUTER", "RAY_LLM"), "router": ("VLLM_ROUTER",)}
"""Peers that `make bench` installs; without them a benchmark measures the others."""


def arguments(name: str, words: Sequence[str]) -> Iterator[str]:
    """Yield a module's arguments: ``SHORT_EVERY_S=0.1`` is ``--short-every-s 0.1``."""
    installed = [f"{peer}={INSTALLED[peer]}" for peer in PEERS.get(name, ()) if (ROOT / INSTALLED[peer]).exists()]
    for word in [*installed, *words]:
        option, equals, value = word.partition("=")
        if not equals or word.startswith("-"):
            yield word
        else:
            yield "--" + option.lower().replace("_", "-")
            yield from value.split() or [""]


def main(words: Sequence[str]) -> int:
    """Run the named benchmark instead of this process."""
    if not words:
        print(__doc__)
        print("\n".join(f"  {name:15} {what}" for name, (_, what) in BENCHMARKS.items()))
        return 0
    name, *options = words
    if name not in BENCHMARKS:
        print(f"no benchmark {name}; `python -m benchmarks` lists them", file=sys.stderr)
        return 2
    os.execv(sys.executable, [sys.executable, "-m", BENCHMARKS[name][0], *arguments(name, options)])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
