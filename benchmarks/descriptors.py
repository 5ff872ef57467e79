"""Building and posting a transfer's descriptors, compared with vLLM's NixlConnector.

A producer process with a cache of REGIONS regions writes BLOCKS blocks to a consumer process. A
*stretch* is a number of neighbouring blocks that are adjacent on both sides; 1 is a fully
fragmented pool. Both sides use agents of equal configuration (one thread, no progress thread), in
turn, in one process:

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

import os
import time
from types import SimpleNamespace
from typing import Any

import numpy as np

from benchmarks.pair import HOST, Agent, Pair, Side
from benchmarks.report import ratios, spread, summary, turns, write
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
        from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker import NixlBaseConnectorWorker
        from vllm.v1.kv_cache_interface import FullAttentionSpec

        metadata, layout = consumer
        self._worker = NixlBaseConnectorWorker
        self._kept = Agent(f"upstream-{os.getpid()}", side)
        self._agent = self._kept.nixl
        began = time.perf_counter()
        self.peer = self._kept.add_peer(metadata)
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
    def __init__(self, page_bytes: int, blocks: int, regions: int, consumer: tuple[bytes, Any]) -> None:
        self.side = Side(f"producer-{os.getpid()}-{blocks}", page_bytes, blocks, regions)
        self.side.memory[:] = np.random.default_rng(0).integers(0, 256, self.side.memory.shape, np.uint8)
        began = time.perf_counter()
        self.peer = self.side.transport.add_peer(consumer[0])
        self.plan = plan_pair(self.side.layout, consumer[1])
        self.per_pair_s = time.perf_counter() - began
        self.upstream = Upstream(self.side, consumer)
        self.made = {"ours": self.per_pair_s, "upstream": self.upstream.per_pair_s}

    def close(self) -> None:
        self.side.close()

    def digest(self, ids: Ints) -> str:
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


def measure(stretch: int, blocks: int, regions: int, page_bytes: int, rounds: int, post_rounds: int) -> dict[str, Any]:
    size = pool(blocks, stretch)
    times: dict[str, list[dict[str, float]]] = {"ours": [], "theirs": []}
    rng = np.random.default_rng(stretch)
    with Pair(Bench, (page_bytes, size, regions)) as pair:
        per_pair = pair.producer.made
        for _, way, counted in turns(list(times), rounds):
            ids = stretched(rng, blocks, stretch), stretched(rng, blocks, stretch)
            took = pair.producer.call(way, *ids, len(times[way]) < post_rounds)
            if counted:
                times[way].append(took)
            else:
                assert pair.consumer.call("digest", ids[1]) == pair.producer.call("digest", ids[0]), way
    row: dict[str, Any] = {"stretch": stretch, "per_pair_ms": {k: 1e3 * v for k, v in per_pair.items()}}
    row["descriptors"] = {"ours": int(times["ours"][0]["descriptors"]), "upstream": blocks * regions}
    row["plan_ms"] = summary([1e3 * took["plan"] for took in times["ours"]])
    for name, parts in (("build", ["build"]), ("post", ["post"]), ("build_and_post", ["build", "post"])):
        ours, theirs = (
            [sum(took[part] for part in parts) for took in times[way] if took.keys() >= set(parts)] for way in times
        )
        row[name] = {
            "ours_ms": summary([1e3 * t for t in ours]),
            "upstream_ms": summary([1e3 * t for t in theirs]),
            "ours_over_upstream": ratios(ours, theirs) | {"of_best": min(ours) / min(theirs)},
        }
    return row


def main(
    *,
    blocks: int = 10_000,
    regions: int = 48,
    page_bytes: int = 512,
    rounds: int = 9,
    post_rounds: int = 3,
    stretches: tuple[int, ...] = (1, 8, 64),
) -> None:
    rows = []
    for stretch in stretches:
        row = measure(stretch, blocks, regions, page_bytes, rounds, post_rounds)
        rows.append(row)
        print(f"stretch {stretch}: {row['descriptors']} descriptors")
        for name in ("build", "post", "build_and_post"):
            ours, theirs, ratio = (row[name][key] for key in ("ours_ms", "upstream_ms", "ours_over_upstream"))
            text = f"{ours['median']:.1f} ms, upstream {theirs['median']:.1f} ms, ratio {spread(ratio)}"
            print(f"  {name:14} {text} [{ratio['of_best']:.2f}]", flush=True)
    write("descriptors", {"blocks": blocks, "regions": regions, "page_bytes": page_bytes, "rows": rows})
