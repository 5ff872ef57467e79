"""The machines of all ranks of two engines over real NIXL, in one process, without vLLM.

Ranks communicate through metadata, frames and notifications only; the handshake's order is
shortened. Agents live as long as the test session: each case builds its layouts over the same
registered memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np

from connectors.codec import decode, decode_agent_metadata, encode, encode_agent_metadata
from connectors.planning.descriptors import build_runs
from connectors.planning.layout import Region
from connectors.planning.plan import PairPlan, consumer_ranks, plan_pair
from connectors.planning.verify import prove_plans
from connectors.protocol.actions import Connect, ConsumerAction, ProducerAction, Received, Send, Sent, Verify, Write
from connectors.protocol.agent_metadata import AgentMetadata, ModelIdentity, check_peers
from connectors.protocol.consumer import Consumer
from connectors.protocol.delivery import ConsumerPeer
from connectors.protocol.engines import Partner
from connectors.protocol.limits import TransferLimits
from connectors.protocol.params import EngineAddress
from connectors.protocol.producer import Producer
from connectors.protocol.reception import Order
from connectors.protocol.wire import Envelope, Peer
from connectors.transport.digest import End, HostMemory, digests
from connectors.transport.nixl import NixlTransport
from tests.planning.builders import HOST, Rank, Shape, make_rank

PREFILL, DECODE = "prefill", "decode"
ADDRESS = EngineAddress(PREFILL, "host", 1)
IDENTITY = ModelIdentity("model", "float32", "auto", "0.32.0")
DEADLINE_S = 30.0
REGIONS = 2


Machine = TypeVar("Machine", Producer, Consumer)


def agent_name(peer: Peer) -> str:
    return f"{peer.incarnation}/{peer.rank}"


class Host:
    """Registered memory and an agent for one rank of one side, for all cases."""

    def __init__(self, peer: Peer, region_bytes: int) -> None:
        self.peer = peer
        self.memory = [np.zeros(region_bytes, np.uint8) for _ in range(REGIONS)]
        self.transport = NixlTransport(agent_name(peer), devices=("lo",))
        self.transport.register([Region(buffer.ctypes.data, buffer.nbytes, HOST) for buffer in self.memory])


@dataclass
class Worker(Generic[Machine]):
    """One rank in one case: its layout over the host's memory, and its side's machine."""

    host: Host
    rank: Rank
    machine: Machine
    plans: dict[Peer, PairPlan] = field(default_factory=dict)
    writes: dict[int, int] = field(default_factory=dict)

    @property
    def agent_metadata(self) -> bytes:
        layout, transport = self.rank.layout, self.host.transport
        agent_metadata = AgentMetadata(
            self.host.peer.incarnation, IDENTITY, layout, transport.kind, transport.metadata()
        )
        return encode_agent_metadata(agent_metadata)


class Engines:
    """A prefill and a decode engine of given TP sizes over the hosts' memory."""

    def __init__(self, hosts: dict[Peer, Host], shapes: tuple[Shape, Shape], tp: tuple[int, int]) -> None:
        self.limits = TransferLimits()
        self.prefill = [self._worker(Producer, hosts[Peer(PREFILL, r)], shapes[0], r, tp[0]) for r in range(tp[0])]
        self.decode = [self._worker(Consumer, hosts[Peer(DECODE, r)], shapes[1], r, tp[1]) for r in range(tp[1])]
        self.sent: list[str] = []
        self.received: list[tuple[str, str | None]] = []
        self.bytes_written = 0
        self.messages: list[str] = []
        self.verified = 0
        target = self.decode[0].rank.layout
        talking = [consumer_ranks(worker.rank.layout, target) for worker in self.prefill]
        self._introduce(tuple((p, c) for p, ranks in enumerate(talking) for c in sorted(ranks)))

    def _worker(self, side: type[Machine], host: Host, shape: Shape, rank: int, tp_size: int) -> Worker[Machine]:
        built = make_rank(shape, rank, tp_size, memory=host.memory)
        return Worker(host, built, side(built.layout.groups, self.limits))

    def _introduce(self, pairs: tuple[tuple[int, int], ...]) -> None:
        """Exchange agent metadata, check and plan; without Hello and Welcome."""
        for c, consumer in enumerate(self.decode):
            ours = decode_agent_metadata(consumer.agent_metadata)
            rank_metadata = [decode_agent_metadata(producer.agent_metadata) for producer in self.prefill]
            plans = [plan_pair(agent_metadata.layout, ours.layout) for agent_metadata in rank_metadata]
            prove_plans(ours.layout, plans)
            found = []
            for p, producer in enumerate(self.prefill):
                if (p, c) not in pairs:
                    continue
                check_peers(rank_metadata[p], ours)
                consumer.host.transport.add_peer(rank_metadata[p].transport_metadata)
                producer.host.transport.add_peer(ours.transport_metadata)
                producer.plans[consumer.host.peer] = plans[p]
                talking = frozenset(other for rank, other in pairs if rank == p)
                source = digests(plans[p], HostMemory(producer.rank.layout), End.SOURCE)
                target = digests(plans[p], HostMemory(consumer.rank.layout), End.TARGET)
                welcomed = ConsumerPeer(talking, ours.layout.num_blocks, plans[p].shapes, source)
                producer.machine.welcome(consumer.host.peer, welcomed, self.now)
                found.append(Partner(producer.host.peer, plans[p].shapes, plans[p].unit_bytes, target))
            self.perform(consumer, consumer.machine.connected(PREFILL, found, self.now))

    @property
    def now(self) -> float:
        return time.monotonic()

    # ---- reports of the schedulers ---------------------------------------------------------------

    def expect(self, request_id: str, transfer_id: str, prompt_tokens: int, digest: str) -> None:
        for worker in self.prefill:
            self.perform(worker, worker.machine.expect(request_id, transfer_id, prompt_tokens, digest, self.now))

    def progress(self, request_id: str, new_ids: list[list[int]], computed_tokens: int) -> None:
        for worker in self.prefill:
            self.perform(worker, worker.machine.progress(request_id, new_ids, computed_tokens, self.now))

    def finished(self, request_id: str) -> None:
        for worker in self.prefill:
            self.perform(worker, worker.machine.finished(request_id, True, "", self.now))

    def start(self, order: Order) -> None:
        for worker in self.decode:
            self.perform(worker, worker.machine.start(order, self.now))

    # ---- wheels ----------------------------------------------------------------------------------

    def perform(self, worker: Worker, actions: list[ProducerAction] | list[ConsumerAction]) -> None:
        for action in actions:
            match action:
                case Send(peer, message):
                    self.messages.append(message.kind)
                    frame = encode(Envelope(worker.host.peer, peer, message))
                    worker.host.transport.notify(agent_name(peer), frame)
                case Write():
                    self._write(worker, action)
                case Sent(request_id):
                    self.sent.append(request_id)
                case Verify(transfer_id, peer):
                    self.verified += bool(action.expected)
                    self.perform(worker, worker.machine.verified(transfer_id, peer, action.problem(), self.now))
                case Received(request_id, failure):
                    self.received.append((request_id, failure))
                case Connect():
                    raise AssertionError("engines exchange metadata before the first request")

    def _write(self, worker: Worker, write: Write) -> None:
        runs = build_runs(worker.plans[write.peer], write.moves)
        worker.machine.write_posted(write.write_id, runs.total_bytes)
        self.bytes_written += runs.total_bytes
        if len(runs):
            handle = worker.host.transport.write(agent_name(write.peer), runs, HOST, HOST)
            worker.writes[write.write_id] = handle
            for move in write.moves:
                assert write.digest is not None
                write.digest.add(move.group, move.src_ids, move.src_parts, move.layers)
        else:
            self.perform(worker, worker.machine.write_done(write.write_id, self.now))

    def turn(self) -> None:
        """Run one round on every rank: messages, writes, deadlines."""
        workers: list[Worker[Any]] = [*self.prefill, *self.decode]
        for worker in workers:
            for sender, frame in worker.host.transport.notifications():
                envelope = decode(frame)
                assert sender == agent_name(envelope.sender)
                assert envelope.receiver == worker.host.peer
                self.perform(worker, worker.machine.message(envelope.sender, envelope.message, self.now))
            for write_id, handle in list(worker.writes.items()):
                if worker.host.transport.poll(handle):
                    del worker.writes[write_id]
                    self.perform(worker, worker.machine.write_done(write_id, self.now))
            self.perform(worker, worker.machine.tick(self.now))

    def until(self, done: Callable[[], bool], what: str) -> None:
        deadline = self.now + DEADLINE_S
        while not done():
            assert self.now < deadline, f"{what} has not happened within {DEADLINE_S} s"
            self.turn()

    def settle(self, writes: int) -> None:
        """Run until all producer ranks together have posted and completed this number of written
        bytes.
        """
        self.until(
            lambda: self.bytes_written >= writes and not any(worker.writes for worker in self.prefill),
            f"the writing of {writes} bytes",
        )
