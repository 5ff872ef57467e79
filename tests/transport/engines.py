"""The machines of all ranks of two engines over real NIXL, in one process, without vLLM.

Ranks communicate through metadata, frames and notifications only; the handshake's order is
shortened.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from connectors.codec import decode, decode_agent_metadata, encode, encode_agent_metadata
from connectors.planning.descriptors import build_runs
from connectors.planning.layout import Region
from connectors.planning.plan import PairPlan, consumer_ranks, plan_pair
from connectors.planning.verify import prove_plans
from connectors.protocol.actions import Received, Send, Sent, Verify, Write
from connectors.protocol.agent_metadata import (
    AgentMetadata,
    ModelIdentity,
    check_peers,
)
from connectors.protocol.consumer import Consumer
from connectors.protocol.delivery import ConsumerPeer
from connectors.protocol.engines import Partner
from connectors.protocol.limits import TransferLimits
from connectors.protocol.producer import Producer
from connectors.protocol.wire import Envelope, Peer
from connectors.transport.digest import End, HostMemory, digests
from connectors.transport.nixl import NixlTransport
from tests.planning.builders import HOST, Rank, Shape, make_rank

PREFILL, DECODE = "prefill", "decode"
IDENTITY = ModelIdentity("model", "float32", "auto", "0.32.0")
DEADLINE_S = 30.0
REGIONS = 2


def agent_name(peer: Peer) -> str:
    return f"{peer.incarnation}/{peer.rank}"


class Host:
    """Registered memory and an agent for one rank of one side, for all cases of a session."""

    def __init__(self, peer: Peer, region_bytes: int) -> None:
        self.peer = peer
        self.memory = [np.zeros(region_bytes, np.uint8) for _ in range(REGIONS)]
        self.transport = NixlTransport(agent_name(peer), devices=("lo",))
        self.transport.register([Region(buffer.ctypes.data, buffer.nbytes, HOST) for buffer in self.memory])


@dataclass
class Worker:
    """One rank in one case: its layout over the host's memory, and its side's machine."""

    host: Host
    rank: Rank
    machine: Any
    plans: dict[Peer, PairPlan] = field(default_factory=dict)
    writes: dict[int, int] = field(default_factory=dict)

    def agent_metadata(self) -> AgentMetadata:
        """Return the agent metadata that a peer decodes."""
        transport = self.host.transport
        metadata = transport.metadata()
        ours = AgentMetadata(self.host.peer.incarnation, IDENTITY, self.rank.layout, transport.kind, metadata)
        return decode_agent_metadata(encode_agent_metadata(ours))


class Engines:
    """A prefill and a decode engine of given TP sizes over the hosts' memory."""

    def __init__(self, hosts: dict[Peer, Host], shapes: tuple[Shape, Shape], tp: tuple[int, int]) -> None:
        self.prefill = [self._worker(Producer, hosts[Peer(PREFILL, r)], shapes[0], r, tp[0]) for r in range(tp[0])]
        self.decode = [self._worker(Consumer, hosts[Peer(DECODE, r)], shapes[1], r, tp[1]) for r in range(tp[1])]
        self.sent: list[str] = []
        self.received: list[tuple[str, str | None]] = []
        self.messages: list[str] = []
        self.bytes_written = self.verified = 0
        for consumer in self.decode:
            self._introduce(consumer)

    def _worker(self, side: Any, host: Host, shape: Shape, rank: int, tp_size: int) -> Worker:
        built = make_rank(shape, rank, tp_size, memory=host.memory)
        return Worker(host, built, side(built.layout.groups, TransferLimits()))

    def _introduce(self, consumer: Worker) -> None:
        """Exchange agent metadata, check and plan; without Hello and Welcome."""
        ours, found = consumer.agent_metadata(), []
        plans = [plan_pair(producer.agent_metadata().layout, ours.layout) for producer in self.prefill]
        prove_plans(ours.layout, plans)
        for producer, plan in zip(self.prefill, plans, strict=True):
            theirs = producer.agent_metadata()
            ranks = consumer_ranks(theirs.layout, ours.layout)
            if ours.rank not in ranks:
                continue
            check_peers(theirs, ours)
            consumer.host.transport.add_peer(theirs.transport_metadata)
            producer.host.transport.add_peer(ours.transport_metadata)
            producer.plans[consumer.host.peer] = plan
            source = digests(plan, HostMemory(producer.rank.layout), End.SOURCE)
            target = digests(plan, HostMemory(consumer.rank.layout), End.TARGET)
            welcomed = ConsumerPeer(ranks, ours.layout.num_blocks, plan.shapes, source)
            producer.machine.welcome(consumer.host.peer, welcomed, time.monotonic())
            found.append(Partner(producer.host.peer, plan.shapes, plan.unit_bytes, target))
        self._perform(consumer, consumer.machine.connected(PREFILL, found, time.monotonic()))

    def tell(self, workers: list[Worker], event: str, *arguments: Any) -> None:
        """Report an event of the scheduler to all ranks of an engine."""
        for worker in workers:
            self._perform(worker, getattr(worker.machine, event)(*arguments, time.monotonic()))

    def _perform(self, worker: Worker, actions: list[Any]) -> None:
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
                    problem = action.problem()
                    self._perform(worker, worker.machine.verified(transfer_id, peer, problem, time.monotonic()))
                case Received(request_id, failure):
                    self.received.append((request_id, failure))
                case _:
                    raise AssertionError(action)

    def _write(self, worker: Worker, write: Write) -> None:
        runs = build_runs(worker.plans[write.peer], write.moves)
        worker.machine.write_posted(write.write_id, runs.total_bytes)
        self.bytes_written += runs.total_bytes
        if not len(runs):
            self._perform(worker, worker.machine.write_done(write.write_id, time.monotonic()))
            return
        worker.writes[write.write_id] = worker.host.transport.write(agent_name(write.peer), runs, HOST, HOST)
        for move in write.moves:
            assert write.digest is not None
            write.digest.add(move.group, move.src_ids, move.src_parts, move.layers)

    def turn(self) -> None:
        """Run one round on every rank: messages, writes, deadlines."""
        for worker in (*self.prefill, *self.decode):
            for sender, frame in worker.host.transport.notifications():
                envelope = decode(frame)
                assert (sender, envelope.receiver) == (agent_name(envelope.sender), worker.host.peer)
                actions = worker.machine.message(envelope.sender, envelope.message, time.monotonic())
                self._perform(worker, actions)
            for write_id, handle in list(worker.writes.items()):
                if worker.host.transport.poll(handle):
                    del worker.writes[write_id]
                    self._perform(worker, worker.machine.write_done(write_id, time.monotonic()))
            self._perform(worker, worker.machine.tick(time.monotonic()))

    def until(self, done: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not done():
            assert time.monotonic() < deadline, f"{what} has not happened within {DEADLINE_S} s"
            self.turn()

    def settle(self, written: int) -> None:
        """Run until all producer ranks have posted and completed this number of bytes."""
        self.until(
            lambda: self.bytes_written >= written and not any(worker.writes for worker in self.prefill),
            f"the writing of {written} bytes",
        )
