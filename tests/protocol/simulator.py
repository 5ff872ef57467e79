"""A world in which producer and consumer machines are pumped at each other: deterministic, in simulated time.

Blocks carry a tag per rank instead of bytes. A write copies one block after the other at moments of its own, so it can
be torn; blocks that are given back are overwritten with a stranger's tag at once. A write may also damage what it
carries, where digests are compared. Messages pass through the wire format, and a network that can lose, double, delay
and reorder them. What must hold is checked when it happens:

    a write lands only in blocks whose request has not been told ``Received`` on that rank
    at ``Received(ok)`` every wanted block holds this prompt's content, from every rank that has a share
    ``Received`` and ``Sent`` come once a rank
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from connectors.planning.blocks import UnitShape, wanted_blocks
from connectors.planning.descriptors import Moves
from connectors.planning.heads import head_shares, partners
from connectors.planning.layout import Group, GroupKind
from connectors.protocol.actions import Connect, ConsumerAction, ProducerAction, Received, Send, Sent, Verify, Write
from connectors.protocol.consumer import Consumer as ConsumerMachine
from connectors.protocol.consumer import Order, Partner
from connectors.protocol.delivery import Consumer
from connectors.protocol.limits import TransferLimits
from connectors.protocol.params import EngineAddress
from connectors.protocol.producer import Producer
from connectors.protocol.wire import Cancel, Envelope, Message, Offer, Peer, decode, encode
from tests.protocol.tally import Tally

GROUPS = (
    Group(0, GroupKind.FULL, 4, None, ()),
    Group(1, GroupKind.SLIDING, 4, 7, ()),
    Group(2, GroupKind.SLIDING, 2, 4, ()),
)
SHAPES = tuple(UnitShape(group.block_tokens, 1, 1) for group in GROUPS)
LAYERS = 2
HEAD_BYTES = (16, 8, 4)
"""Of one head of one block, all layers together."""
LIMITS = TransferLimits(handshake_s=2, progress_s=3, cancel_s=1, lease_s=5, alive_s=1, fence_s=0.5)
TICK_S = 0.5
POOL = 400
STRANGER = ("somebody else's",)
DAMAGED = ("damaged",)
VERIFY_S = 0.3
ENGINE = EngineAddress("prefill-1", "host", 1)
DECODE = "decode-1"

Tag = tuple[object, ...]


class Violation(AssertionError):
    """A promise was broken."""


@dataclass(frozen=True)
class Weather:
    """What the network and the transport do, until ``clears_at``; then messages only take their time."""

    drop: float = 0.0
    double: float = 0.0
    delay_s: float = 0.05
    write_s: float = 0.2
    write_fails: float = 0.0
    refuses: float = 0.0
    damages: float = 0.0
    clears_at: float = 0.0


@dataclass
class Pool:
    """Block ids of one engine; the last one given back is the first one taken."""

    free: list[int] = field(default_factory=lambda: list(range(POOL - 1, 0, -1)))

    def take(self, count: int) -> list[int]:
        return [self.free.pop() for _ in range(count)]

    def give(self, ids: list[int]) -> None:
        self.free.extend(ids)


@dataclass
class ProducerRank:
    machine: Producer
    alive: bool = True
    memory: dict[tuple[int, int], Tag] = field(default_factory=dict)


@dataclass
class ConsumerRank:
    machine: ConsumerMachine
    alive: bool = True
    memory: dict[tuple[int, int, int], Tag] = field(default_factory=dict)
    owner: dict[int, str] = field(default_factory=dict)
    connecting: bool = False


@dataclass
class Consumption:
    """A decode request: what it wants, and what each rank has said."""

    request_id: str
    transfer_id: str
    prompt: str
    prompt_tokens: int
    started_at: float
    blocks: list[int]
    order: Order
    results: dict[int, str | None] = field(default_factory=dict)
    ended_at: float = 0.0


def layers_of(move: Moves) -> range:
    first, stop = move.layers or (0, LAYERS)
    return range(first, min(stop, LAYERS))


class World:
    """Both engines, the network between them, and the clock."""

    def __init__(
        self,
        rng: random.Random,
        producer_tp: int,
        consumer_tp: int,
        kv_heads: int,
        weather: Weather,
        integrity: bool = True,
    ) -> None:
        self.rng, self.weather, self.now, self.integrity = rng, weather, 0.0, integrity
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.order = 0
        self.producers = [ProducerRank(Producer(GROUPS, LIMITS)) for _ in range(producer_tp)]
        self.consumers = [ConsumerRank(ConsumerMachine(GROUPS, LIMITS)) for _ in range(consumer_tp)]
        self.pairs = partners(producer_tp, consumer_tp, [(0, kv_heads)])
        self.heads = Counter[tuple[int, int]]()
        for share in head_shares(producer_tp, consumer_tp, kv_heads):
            self.heads[share.producer_rank, share.consumer_rank] += share.stop - share.first
        self.prefill_pool, self.decode_pool = Pool(), Pool()
        self.consumptions: dict[str, Consumption] = {}
        self.sent: dict[str, Counter[int]] = {}
        self.held_blocks: dict[str, list[int]] = {}
        self.counts = Counter[str]()

    # ---- the clock -------------------------------------------------------------------------------------------------

    def at(self, when: float, event: Callable[[], None]) -> None:
        self.order += 1
        heapq.heappush(self.events, (max(when, self.now), self.order, event))

    def after(self, seconds: float, event: Callable[[], None]) -> None:
        self.at(self.now + seconds, event)

    def run(self, until: float) -> None:
        step = 0.0
        while step <= until:
            self.at(step, self.tick)
            step += TICK_S
        while self.events and self.events[0][0] <= until:
            self.now, _, event = heapq.heappop(self.events)
            event()

    def tick(self) -> None:
        for rank, producer in enumerate(self.producers):
            if producer.alive:
                self.produce(rank, producer.machine.tick(self.now))
        for rank, consumer in enumerate(self.consumers):
            if consumer.alive:
                self.consume(rank, consumer.machine.tick(self.now))

    @property
    def stormy(self) -> bool:
        return self.now < self.weather.clears_at

    # ---- the network -----------------------------------------------------------------------------------------------

    def send(self, sender: Peer, receiver: Peer, message: Message) -> None:
        frame = encode(Envelope(sender, receiver.incarnation, message))
        self.counts[message.kind] += 1
        if self.stormy and self.rng.random() < self.weather.drop:
            self.counts["dropped"] += 1
            return
        copies = 2 if self.stormy and self.rng.random() < self.weather.double else 1
        for _ in range(copies):
            self.after(self.rng.uniform(0.001, self.weather.delay_s), lambda: self.deliver(receiver, frame))

    def deliver(self, receiver: Peer, frame: bytes) -> None:
        envelope = decode(frame)
        if receiver.incarnation == ENGINE.incarnation:
            producer = self.producers[receiver.rank]
            if producer.alive and producer.machine.knows(envelope.sender):
                assert isinstance(envelope.message, Offer | Cancel)
                self.produce(receiver.rank, producer.machine.message(envelope.sender, envelope.message, self.now))
        elif self.consumers[receiver.rank].alive:
            machine = self.consumers[receiver.rank].machine
            self.consume(receiver.rank, machine.message(envelope.sender, envelope.message, self.now))

    # ---- the prefill engine ----------------------------------------------------------------------------------------

    def produce(self, rank: int, actions: list[ProducerAction]) -> None:
        for action in actions:
            match action:
                case Send(peer, message):
                    self.send(Peer(ENGINE.incarnation, rank), peer, message)
                case Write():
                    self.write(rank, action)
                case Sent(request_id):
                    self.sent.setdefault(request_id, Counter())[rank] += 1
                    if self.sent[request_id][rank] > 1:
                        raise Violation(f"{request_id} was sent twice on rank {rank}")
                    self.free_when_sent(request_id)

    def on_producer(self, rank: int, call: Callable[[Producer], list[ProducerAction]]) -> None:
        if self.producers[rank].alive:
            self.counts["discards"] += 1
            self.produce(rank, call(self.producers[rank].machine))

    def free_when_sent(self, request_id: str) -> None:
        """The scheduler frees a held request's blocks when all its workers have sent them."""
        if request_id in self.held_blocks and len(self.sent.get(request_id, ())) == len(self.producers):
            self.give_back(self.held_blocks.pop(request_id))

    def give_back(self, ids: list[int]) -> None:
        """The allocator has the blocks again, and somebody else uses them at once."""
        self.prefill_pool.give(ids)
        for producer in self.producers:
            for block in ids:
                for layer in range(LAYERS):
                    producer.memory[block, layer] = STRANGER

    def write(self, rank: int, write: Write) -> None:
        producer, target = self.producers[rank], write.peer.rank
        heads = self.heads[rank, target]
        total = sum(
            len(move.dst_ids) * HEAD_BYTES[move.group] * heads * len(layers_of(move)) // LAYERS for move in write.moves
        )
        producer.machine.write_posted(write.write_id, total)
        if not total:
            self.produce(rank, producer.machine.write_done(write.write_id, self.now))
            return
        self.counts["writes"] += 1
        lasts = self.rng.uniform(0.001, self.weather.write_s)
        fails = self.stormy and self.rng.random() < self.weather.write_fails
        if write.digest is not None:
            for move in write.moves:
                write.digest.add(move.group, move.src_ids, move.src_parts, move.layers)
        for move in write.moves:
            pairs = zip(move.src_ids.tolist(), move.dst_ids.tolist(), strict=True)
            for (src, dst), layer in itertools.product(pairs, layers_of(move)):
                if not (fails and self.rng.random() < 0.5):
                    when = self.rng.uniform(0, lasts)
                    self.after(
                        when, lambda s=src, d=dst, at=layer: self.land(rank, target, write.transfer_id, s, d, at)
                    )
        self.after(lasts, lambda: self.written(rank, target, write.write_id, fails))

    def land(self, rank: int, target: int, transfer_id: str, src: int, dst: int, layer: int) -> None:
        """One block and layer of a write reaches the consumer's memory, with what the producer's holds now."""
        producer, consumer = self.producers[rank], self.consumers[target]
        if not producer.alive or not consumer.alive:
            return
        owner = self.consumptions.get(consumer.owner.get(dst, ""))
        if owner is None or owner.transfer_id != transfer_id:
            raise Violation(f"rank {rank} wrote {transfer_id} into block {dst} of rank {target}, which it had given up")
        consumer.memory[dst, rank, layer] = producer.memory.get((src, layer), STRANGER)
        if self.stormy and self.integrity and self.rng.random() < self.weather.damages:
            consumer.memory[dst, rank, layer] = DAMAGED
            self.counts["damaged blocks"] += 1

    def written(self, rank: int, target: int, write_id: int, fails: bool) -> None:
        machine = self.producers[rank].machine
        if not self.producers[rank].alive:
            return
        if fails or not self.consumers[target].alive:
            self.counts["failed writes"] += 1
            self.produce(rank, machine.write_failed(write_id, "the weather", self.now))
        else:
            self.produce(rank, machine.write_done(write_id, self.now))

    # ---- the decode engine -----------------------------------------------------------------------------------------

    def start(self, request_id: str, transfer_id: str, prompt: str, prompt_tokens: int, start_token: int) -> None:
        """A decode request has its blocks; every worker is told in its own time."""
        end = prompt_tokens - 1
        tables = [self.decode_pool.take(-(-prompt_tokens // group.block_tokens)) for group in GROUPS]
        wanted = tuple(wanted_blocks(g, table, start_token, end) for g, table in zip(GROUPS, tables, strict=True))
        order = Order(request_id, transfer_id, ENGINE, end, prompt, wanted)
        blocks = [block for table in tables for block in table]
        self.consumptions[request_id] = Consumption(
            request_id, transfer_id, prompt, prompt_tokens, self.now, blocks, order
        )
        for rank, consumer in enumerate(self.consumers):
            for block in blocks:
                consumer.owner[block] = request_id
                for producer, layer in itertools.product(range(len(self.producers)), range(LAYERS)):
                    consumer.memory[block, producer, layer] = STRANGER
            self.after(self.rng.uniform(0, 0.1), lambda r=rank: self.on_consumer(r, lambda m: m.start(order, self.now)))

    def on_consumer(self, rank: int, call: Callable[[ConsumerMachine], list[ConsumerAction]]) -> None:
        if self.consumers[rank].alive:
            self.consume(rank, call(self.consumers[rank].machine))

    def consume(self, rank: int, actions: list[ConsumerAction]) -> None:
        for action in actions:
            match action:
                case Send(peer, message):
                    self.send(Peer(DECODE, rank), peer, message)
                case Connect():
                    self.connect(rank)
                case Verify():
                    lasts = self.rng.uniform(0, VERIFY_S)
                    self.after(lasts, lambda verify=action: self.verified(rank, verify))
                case Received(request_id, failure):
                    self.received(rank, self.consumptions[request_id], failure)

    def verified(self, rank: int, verify: Verify) -> None:
        if self.consumers[rank].alive:
            problem = verify.problem()
            self.counts["bad digests" if problem else "good digests"] += 1
            self.on_consumer(rank, lambda m: m.verified(verify.request_id, verify.peer, problem, self.now))

    def connect(self, rank: int) -> None:
        """The handshake, which either works or says why not within handshake_s."""
        if self.consumers[rank].connecting:
            return
        self.consumers[rank].connecting = True
        lasts = self.rng.uniform(0.01, LIMITS.handshake_s)
        refused = self.stormy and self.rng.random() < self.weather.refuses
        self.after(lasts, lambda: self.connected(rank, refused))

    def connected(self, rank: int, refused: bool) -> None:
        consumer = self.consumers[rank]
        consumer.connecting = False
        incarnation = ENGINE.incarnation
        if refused or not all(producer.alive for producer in self.producers):
            self.on_consumer(rank, lambda m: m.connect_failed(incarnation, "no answer", self.now))
            return
        if not consumer.alive:
            return
        found = []
        for p, c in self.pairs:
            if c == rank:
                ours = frozenset(other for producer, other in self.pairs if producer == p)
                source, target = self.digests(p, c)
                self.producers[p].machine.welcome(Peer(DECODE, rank), Consumer(ours, POOL, SHAPES, source), self.now)
                sizes = tuple(size * self.heads[p, c] for size in HEAD_BYTES)
                found.append(Partner(Peer(incarnation, p), SHAPES, sizes, target if self.integrity else None))
        self.on_consumer(rank, lambda m: m.connected(incarnation, found, self.now))

    def digests(self, p: int, c: int) -> tuple[Callable[[], Tally], Callable[[], Tally]]:
        """What makes the digests of a pair of ranks, on either end. A pair without a share moves nothing."""
        if not self.heads[p, c]:
            return (lambda: Tally(lambda *_: None)), (lambda: Tally(lambda *_: None))
        source, target = self.producers[p].memory, self.consumers[c].memory
        return (
            lambda: Tally(lambda block, layer: source.get((block, layer), STRANGER), LAYERS),
            lambda: Tally(lambda block, layer: target[block, p, layer], LAYERS),
        )

    def received(self, rank: int, request: Consumption, failure: str | None) -> None:
        consumer = self.consumers[rank]
        if rank in request.results:
            raise Violation(f"{request.request_id} was received twice on rank {rank}")
        request.results[rank] = failure
        for block in request.blocks:
            del consumer.owner[block]
        if failure is None:
            self.check_contents(rank, request)
        if len(request.results) == len(self.consumers):
            request.ended_at = self.now
            self.decode_pool.give(request.blocks)

    def check_contents(self, rank: int, request: Consumption) -> None:
        for group, blocks in zip(GROUPS, request.order.groups, strict=True):
            for position, block in zip(blocks.positions.tolist(), blocks.ids.tolist(), strict=True):
                needed = min((position + 1) * group.block_tokens, request.order.end_token)
                for p, layer in itertools.product(range(len(self.producers)), range(LAYERS)):
                    if not self.heads[p, rank]:
                        continue
                    tag = self.consumers[rank].memory[block, p, layer]
                    if tag[:3] != (request.prompt, group.index, position) or tag[3] < needed:
                        raise Violation(
                            f"{request.request_id} was told ok on rank {rank}, but group {group.index}, position "
                            f"{position} holds {tag} of rank {p} where {needed} tokens of {request.prompt} are needed"
                        )
