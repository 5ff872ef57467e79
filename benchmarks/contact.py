"""First contact of two workers, compared with vLLM's NixlConnector, for caches of the same shape.

Two processes. Each round creates new agents, registers their memory and serves their metadata (not
timed), then times one contact of each kind, in turn. UCX opens new connections in every round.

ours           from a request at the consumer's ``WorkerRuntime`` to its ``_connected``: it fetches
               the metadata over the side channel, makes and proves plans, adds peers, and exchanges
               Hello and Welcome over NIXL through both progress threads. At the end both sides have
               opened their connections
upstream       ``_nixl_handshake`` against ``_nixl_handshake_listener`` (nixl/base_worker.py:985,
               nixl/base_scheduler.py:337), with ``add_remote_agent`` reduced to NIXL's,
               ``_build_fa_remote``, ``get_xfer_descs`` and ``prep_xfer_dlist`` (2264-2266,
               2385-2409). Without its checks of the peer and its executor; at the end the
               connection is not open yet
first_message  upstream's connection: a notification to the peer and one back, both sides polling
               without pause
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

from benchmarks.pair import SHARED_MEMORY, Fabric, Pair, Side, enter
from benchmarks.report import ratios, summary, write

HASH = "benchmark"


def our_worker(side: Side, name: str, connected: threading.Event) -> Any:
    """Return a WorkerRuntime over ``side`` that reports when it has connected, and its agent
    metadata.
    """
    import torch

    from connectors.protocol.agent_metadata import AgentMetadata, ModelIdentity
    from connectors.vllm_hma.config import ConnectorConfig
    from connectors.vllm_hma.worker_side.runtime import WorkerRuntime
    from connectors.vllm_hma.worker_side.steps import StepFence

    class Runtime(WorkerRuntime):
        def _connected(self, *arguments: Any) -> None:
            super()._connected(*arguments)
            connected.set()

    identity = ModelIdentity("benchmark", "float32", "auto", "0")
    agent_metadata = AgentMetadata(name, identity, side.layout, side.transport.kind, side.transport.metadata())
    return Runtime(ConnectorConfig(), agent_metadata, side.transport, StepFence(torch.device("cpu")))


class Theirs:
    """Return an agent as vLLM's connector creates it, over the memory of a ``Side``."""

    def __init__(self, side: Side, name: str) -> None:
        from nixl._api import nixl_agent, nixl_agent_config

        self.agent = nixl_agent(name, nixl_agent_config(enable_prog_thread=False))
        self._regions = [(r.address, r.length_bytes, 0, "") for r in side.regions]
        self._registered = self.agent.register_memory(self._regions, "DRAM")

    def close(self) -> None:
        self.agent.deregister_memory(self._registered)


class Producer:
    """Producer of one round: our worker with its side channel, and an agent with vLLM's
    listener.
    """

    def __init__(self, number: int, shape: tuple[int, int, int]) -> None:
        import msgspec
        from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_scheduler import NixlBaseConnectorScheduler
        from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlAgentMetadata, NixlHandshakePayload
        from vllm.utils.network_utils import get_open_port

        from connectors.codec import encode_agent_metadata
        from connectors.vllm_hma.handshake.side_channel import MetadataServer

        page, blocks, layers = shape
        self.incarnation = f"producer-{os.getpid()}-{number}"
        self.side = Side(f"{self.incarnation}/0", page, blocks, layers)
        self.runtime = our_worker(self.side, self.incarnation, threading.Event())
        self.server = MetadataServer("127.0.0.1", 0, [encode_agent_metadata(self.runtime.agent_metadata)])

        self.theirs = Theirs(self.side, f"theirs-{self.incarnation}")
        metadata = NixlAgentMetadata(
            engine_id="engine",
            agent_metadata=self.theirs.agent.get_agent_metadata(),
            kv_caches_base_addr=[region.address for region in self.side.regions],
            device_id=0,
            num_blocks=blocks,
            block_lens=[page] * layers,
            block_strides=[page] * layers,
            kv_cache_layout="HND",
            block_size=16,
            ssm_sizes=(0, 0),
            attn_backend_name="CPU_ATTN",
            physical_blocks_per_logical_kv_block=1,
        )
        payload = NixlHandshakePayload(HASH, msgspec.msgpack.encode(metadata))
        encoded = {(0, 0): msgspec.msgpack.encode(payload)}
        self.port = get_open_port()
        self.stop, ready = threading.Event(), threading.Event()
        self.thread = threading.Thread(
            target=NixlBaseConnectorScheduler._nixl_handshake_listener,
            args=(encoded, ready, self.stop, "127.0.0.1", self.port),
        )
        self.thread.start()
        ready.wait()

    def echo(self, metadata: bytes) -> None:
        """Answer the next notification."""
        agent = self.theirs.agent
        peer = agent.add_remote_agent(metadata)
        while not agent.get_new_notifs():
            pass
        agent.send_notif(peer, b"back")
        deadline = time.perf_counter() + 0.2
        while time.perf_counter() < deadline:
            agent.get_new_notifs()

    def close(self) -> None:
        self.stop.set()
        self.server.close()
        self.theirs.close()
        self.runtime.close()
        self.thread.join()


def _base_worker() -> Any:
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker import NixlBaseConnectorWorker

    return NixlBaseConnectorWorker


class Consumer:
    """Consumer of one round."""

    def __init__(self, number: int, shape: tuple[int, int, int]) -> None:
        page, blocks, layers = shape
        self.shape = shape
        incarnation = f"consumer-{os.getpid()}-{number}"
        self.side = Side(f"{incarnation}/0", page, blocks, layers)
        self.connected = threading.Event()
        self.runtime = our_worker(self.side, incarnation, self.connected)
        self.theirs = Theirs(self.side, f"theirs-{incarnation}")
        self.kept: Any = None

    def ours_s(self, incarnation: str, port: int) -> float:
        from connectors.protocol.params import EngineAddress, prompt_digest
        from connectors.vllm_hma.orders import Orders, Receive

        address = EngineAddress(incarnation, "127.0.0.1", port)
        began = time.perf_counter()
        self.runtime.after_forward(Orders(receives=[Receive("r", "t", address, prompt_digest([1]), ((1,),), 0, 1)]))
        assert self.connected.wait(60)
        return time.perf_counter() - began

    def upstream_s(self, port: int) -> float:
        from vllm.v1.kv_cache_interface import FullAttentionSpec

        base = _base_worker()
        page, _, layers = self.shape
        me = SimpleNamespace(
            _is_csa_linear=False,
            use_host_buffer=True,
            device_id=0,
            compat_hash=HASH,
            enforce_compat_hash=True,
            transfer_topo=SimpleNamespace(handshake_target_ranks=lambda *sizes: [0]),
            block_len_per_layer=[page] * layers,
            _transfer_layer_region_indices=(),
            _group_spec_types=(FullAttentionSpec,),
            _is_region_replicated=lambda region: False,
            _stack_descs=base._stack_descs,
            _validate_remote_parallel_config=lambda metadata: None,
        )

        def add_remote_agent(metadata: Any, *ranks: int) -> str:
            name: str = self.theirs.agent.add_remote_agent(metadata.agent_metadata)
            plan = SimpleNamespace(source_ranks_per_group=[[0]], rank_offset_factor=0)
            rows = base._build_fa_remote(me, plan, metadata, 1)
            descriptors = self.theirs.agent.get_xfer_descs(rows, "DRAM")
            self.kept = self.theirs.agent.prep_xfer_dlist(name, descriptors)
            return name

        me.add_remote_agent = add_remote_agent
        began = time.perf_counter()
        names, _ = base._nixl_handshake(me, "127.0.0.1", port, 1, "engine")
        took = time.perf_counter() - began
        self.peer = names[(0, 0)]
        return took

    def first_message_s(self) -> float:
        began = time.perf_counter()
        self.theirs.agent.send_notif(self.peer, b"there")
        while not self.theirs.agent.get_new_notifs():
            pass
        return time.perf_counter() - began

    def close(self) -> None:
        if self.kept is not None:
            self.theirs.agent.release_dlist_handle(self.kept)
        self.runtime.close()
        self.theirs.close()


def work(pipe: Connection, fabric: Fabric, environment: Mapping[str, str]) -> None:
    """Run one of the two processes: execute the commands from `pipe`."""
    enter(fabric, environment)
    end: Any = None
    while True:
        word, *arguments = pipe.recv()
        if word in ("new", "stop"):
            if end is not None:
                end.close()
            if word == "stop":
                return
            end = {"producer": Producer, "consumer": Consumer}[arguments[0]](*arguments[1:])
            pipe.send((end.incarnation, end.server.port, end.port) if isinstance(end, Producer) else None)
        elif word == "metadata":
            pipe.send(end.theirs.agent.get_agent_metadata())
        else:
            pipe.send(getattr(end, word)(*arguments))


def main(*, blocks: int = 10_000, layers: int = 48, page_bytes: int = 512, rounds: int = 7) -> None:
    shape = (page_bytes, blocks, layers)
    seconds: dict[str, list[float]] = {"ours": [], "upstream": [], "first_message": []}
    pair = Pair(SHARED_MEMORY, work, {}, consumer=work)
    try:
        for number in range(rounds + 1):
            incarnation, our_port, their_port = pair.ask("new", "producer", number, shape)
            pair.ask_consumer("new", "consumer", number, shape)
            took: dict[str, float] = {}
            for way in ("ours", "upstream") if number % 2 else ("upstream", "ours"):
                where = (incarnation, our_port) if way == "ours" else (their_port,)
                took[way] = pair.ask_consumer(f"{way}_s", *where)
            pair.tell("echo", pair.ask_consumer("metadata"))
            took["first_message"] = pair.ask_consumer("first_message_s")
            pair.hear()
            for name, took_s in took.items() if number else ():
                seconds[name].append(took_s)
    finally:
        pair.close()
    both = [a + b for a, b in zip(seconds["upstream"], seconds["first_message"], strict=True)]
    document = {
        "blocks": blocks,
        "layers": layers,
        "ms": {name: summary([1e3 * t for t in values]) for name, values in seconds.items()},
        "ours_over_upstream": ratios(seconds["ours"], seconds["upstream"]),
        "ours_over_upstream_with_first_message": ratios(seconds["ours"], both),
    }
    print(json.dumps(document, indent=2))
    write("contact", document)
