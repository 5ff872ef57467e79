"""Building and posting a transfer's descriptors, compared with vLLM's NixlConnector.

    python -m benchmarks.descriptors [--blocks 10000] [--regions 48] [--page-bytes 512]
        [--rounds 9] [--post-rounds 3] [--stretches 1,8,64]

A producer process with a cache of ``--regions`` regions writes ``--blocks`` blocks to a consumer
process. A *stretch* is a number of neighbouring blocks that are adjacent on both sides; 1 is a
fully fragmented pool. Both sides use agents of equal configuration (one thread, no progress
thread), in turn, in one process:

ours      ``build_runs`` and ``NixlTransport.prepare``, per transfer; no preparation per pair
upstream  per pair: ``_build_fa_local`` / ``_build_fa_remote``, ``get_xfer_descs`` and
          ``prep_xfer_dlist`` of the whole cache (nixl/base_worker.py:1973-2052, 2134-2136,
          2405-2409). Per transfer: ``_compute_desc_ids`` for both sides and ``make_prepped_xfer``
          (nixl/push_worker.py:686-721). vLLM's functions run with the attributes that they read,
          without the code around them (prefix trimming, bookkeeping)

build     from block ids to a request that can be posted
post      ``transfer()`` until it returns. Within one host UCX moves the bytes of a write in this
          call
"""

from __future__ import annotations

import argparse
import os
import time
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from benchmarks.pair import HOST, SHARED_MEMORY, Pair, Side, produce
from connectors.planning.blocks import Ints
from connectors.planning.descriptors import Moves, build_runs
from connectors.planning.plan import plan_pair


def stretched(rng: np.random.Generator, blocks: int, stretch: int) -> Ints:
    """Return all ``blocks`` blocks in shuffled stretches of neighbours; no two stretches are
    adjacent.
    """
    starts = rng.permutation(blocks // stretch) * (stretch + 1)
    return (1 + starts[:, None] + np.arange(stretch)).ravel().astype(np.int64)


def pool(blocks: int, stretch: int) -> int:
    """Return the number of blocks of a cache that holds ``stretched``, the null block included."""
    return 1 + blocks // stretch * (stretch + 1)


class Upstream:
    """vLLM's descriptor code on one pair of agents, without the worker around it."""

    def __init__(self, side: Side, consumer: tuple[bytes, Any]) -> None:
        from nixl._api import nixl_agent, nixl_agent_config
        from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker import NixlBaseConnectorWorker
        from vllm.v1.kv_cache_interface import FullAttentionSpec

        metadata, layout = consumer
        self._worker = NixlBaseConnectorWorker
        self._agent = nixl_agent(f"upstream-{os.getpid()}", nixl_agent_config(enable_prog_thread=False))
        self._registered = self._agent.register_memory(
            [(r.address, r.length_bytes, 0, "") for r in side.regions], "DRAM"
        )
        began = time.perf_counter()
        peer = self._agent.add_remote_agent(metadata)
        self.peer = peer.decode() if isinstance(peer, bytes) else peer
        page, blocks = side.memory.shape[2], side.memory.shape[1]
        count = len(side.regions)
        self._self = SimpleNamespace(
            transfer_topo=object(),
            device_id=0,
            num_regions=count,
            block_len_per_layer=[page] * count,
            block_stride_per_layer=[page] * count,
            region_num_blocks=[blocks] * count,
            region_group_ids=[0] * count,
            _uses_region_group_mapping=False,
            _has_mamba=False,
            _transfer_layer_group_ids=(),
            _transfer_layer_region_indices=(),
            _group_spec_types=(FullAttentionSpec,),
            _is_region_replicated=lambda region: False,
            _stack_descs=NixlBaseConnectorWorker._stack_descs,
        )
        theirs = SimpleNamespace(
            kv_caches_base_addr=[region.address for region in layout.regions],
            region_num_blocks=[layout.num_blocks] * count,
            num_blocks=layout.num_blocks,
            device_id=0,
            block_strides=[page] * count,
        )
        plan = SimpleNamespace(source_ranks_per_group=[[0]], rank_offset_factor=0)
        bases = [region.address for region in side.regions]
        local = NixlBaseConnectorWorker._build_fa_local(self._self, bases, 1)
        remote = NixlBaseConnectorWorker._build_fa_remote(self._self, plan, theirs, 1)
        self._blocks = (blocks, layout.num_blocks)
        self._local = self._agent.prep_xfer_dlist("NIXL_INIT_AGENT", self._agent.get_xfer_descs(local, "DRAM"))
        self._remote = self._agent.prep_xfer_dlist(self.peer, self._agent.get_xfer_descs(remote, "DRAM"))
        self.per_pair_s = time.perf_counter() - began

    def build(self, src: list[int], dst: list[int]) -> Any:
        local, remote = (
            self._worker._compute_desc_ids(
                self._self,
                block_ids=(ids,),
                dst_num_blocks=blocks,
                block_size_ratio=None,
                physical_blocks_per_logical=1,
                region_num_blocks=[blocks] * self._self.num_regions,
                region_group_ids=self._self.region_group_ids,
                uses_region_group_mapping=False,
            )
            for ids, blocks in zip((src, dst), self._blocks, strict=True)
        )
        return self._agent.make_prepped_xfer("WRITE", self._local, local, self._remote, remote, notif_msg=b"r:1")

    def post(self, request: Any) -> str:
        return self._agent.transfer(request)

    def finish(self, request: Any, state: str) -> None:
        while state == "PROC":
            state = self._agent.check_xfer_state(request)
        self._agent.get_new_notifs()
        request.release()


class Bench:
    """Producer of one run."""

    def __init__(self, page_bytes: int, blocks: int, regions: int, consumer: tuple[bytes, Any]) -> None:
        self.side = Side(f"producer-{os.getpid()}-{blocks}", page_bytes, blocks, regions)
        self.side.memory[:] = np.random.default_rng(0).integers(0, 256, self.side.memory.shape, np.uint8)
        began = time.perf_counter()
        self.peer = self.side.transport.add_peer(consumer[0])
        self.plan = plan_pair(self.side.layout, consumer[1])
        self.per_pair_s = time.perf_counter() - began
        self.upstream = Upstream(self.side, consumer)
        self.shaped = {"ours": self.per_pair_s, "upstream": self.upstream.per_pair_s}

    def close(self) -> None:
        self.side.transport.close()

    def digest(self, ids: Ints) -> str:
        """Return the digest of the moved bytes."""
        return self.side.digest(ids)

    def ours(self, src: Ints, dst: Ints, post: bool) -> dict[str, float]:
        transport = self.side.transport
        parts = np.zeros(len(src), np.int64)
        began = time.perf_counter()
        runs = build_runs(self.plan, [Moves(0, src, parts, dst, parts)])
        planned = time.perf_counter()
        request = transport.prepare(self.peer, runs, HOST, HOST)
        took = {"plan": planned - began, "build": time.perf_counter() - began, "descriptors": float(len(runs))}
        if not post:
            transport.discard(request)
            return took
        began = time.perf_counter()
        handle = transport.post(self.peer, request)
        took["post"] = time.perf_counter() - began
        while not transport.poll(handle):
            pass
        return took

    def theirs(self, src: Ints, dst: Ints, post: bool) -> dict[str, float]:
        lists = (src.tolist(), dst.tolist())
        began = time.perf_counter()
        request = self.upstream.build(*lists)
        took = {"build": time.perf_counter() - began}
        state = "DONE"
        if post:
            began = time.perf_counter()
            state = self.upstream.post(request)
            took["post"] = time.perf_counter() - began
        self.upstream.finish(request, state)
        return took


def measure(stretch: int, arguments: argparse.Namespace) -> dict[str, Any]:
    from benchmarks.report import ratios, summary

    blocks = pool(arguments.blocks, stretch)
    pair = Pair(SHARED_MEMORY, partial(produce, Bench))
    try:
        consumer = pair.ask_consumer("shape", arguments.page_bytes, blocks, arguments.regions)
        per_pair = pair.ask("shape", arguments.page_bytes, blocks, arguments.regions, consumer)
        rng = np.random.default_rng(stretch)
        times: dict[str, list[dict[str, float]]] = {"ours": [], "theirs": []}
        for number in range(arguments.rounds + 1):
            ids = (stretched(rng, arguments.blocks, stretch), stretched(rng, arguments.blocks, stretch))
            post = number <= arguments.post_rounds
            for way in ("ours", "theirs") if number % 2 else ("theirs", "ours"):
                took = pair.ask(way, *ids, post)
                if number:
                    times[way].append(took)
                else:
                    assert pair.ask_consumer("digest", ids[1]) == pair.ask("digest", ids[0]), way
    finally:
        pair.close()
    row: dict[str, Any] = {"stretch": stretch, "per_pair_ms": {k: 1e3 * v for k, v in per_pair.items()}}
    row["descriptors"] = {
        "ours": int(times["ours"][0]["descriptors"]),
        "upstream": arguments.blocks * arguments.regions,
    }
    row["plan_ms"] = summary([1e3 * took["plan"] for took in times["ours"]])
    series: dict[str, list[list[float]]] = {"build": [], "post": [], "build_and_post": []}
    for way in ("ours", "theirs"):
        posted = [took for took in times[way] if "post" in took]
        series["build"].append([took["build"] for took in times[way]])
        series["post"].append([took["post"] for took in posted])
        series["build_and_post"].append([took["build"] + took["post"] for took in posted])
    for name, (ours, theirs) in series.items():
        row[name] = {
            "ours_ms": summary([1e3 * t for t in ours]),
            "upstream_ms": summary([1e3 * t for t in theirs]),
            "ours_over_upstream": ratios(ours, theirs) | {"of_best": min(ours) / min(theirs)},
        }
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=10_000)
    parser.add_argument("--regions", type=int, default=48)
    parser.add_argument("--page-bytes", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--post-rounds", type=int, default=3, help="at least 2")
    parser.add_argument("--stretches", default="1,8,64")
    parser.add_argument("--name", default="descriptors")
    arguments = parser.parse_args()
    rows = []
    print("stretch  descriptors       build ms ours  upstream  ratio (q1-q3)        build and post: ratio (q1-q3)")
    for stretch in map(int, arguments.stretches.split(",")):
        row = measure(stretch, arguments)
        rows.append(row)
        build, both = row["build"], row["build_and_post"]
        texts = [
            f"{r['of_medians']:.2f} ({r['q1']:.2f}-{r['q3']:.2f}) [{r['of_best']:.2f}]"
            for r in (build["ours_over_upstream"], both["ours_over_upstream"])
        ]
        print(
            f"{stretch:7} {row['descriptors']['ours']:8}/{row['descriptors']['upstream']} "
            f"{build['ours_ms']['median']:14.1f} {build['upstream_ms']['median']:9.1f}  {texts[0]:22} {texts[1]}",
            flush=True,
        )
    from benchmarks.report import write

    settings = {name: getattr(arguments, name) for name in ("blocks", "regions", "page_bytes")}
    print(f"written to {write(arguments.name, settings | {'rows': rows})}")


if __name__ == "__main__":
    main()
