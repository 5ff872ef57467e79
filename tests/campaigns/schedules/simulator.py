"""Run producer and consumer machines against each other, deterministically, in simulated time.

Blocks have a tag per rank instead of bytes. A write copies one block after the other at separate
moments, so it can be torn; freed blocks are overwritten with another tag at once. A write may also
be damaged if digests are compared. Messages pass through the wire format, and through a network
that can lose, double, delay and reorder them. Each condition is checked when its event happens:

- a write arrives only in blocks whose request has not received ``Received`` on that rank, or whose
  quarantine lasts
- at ``Received(ok)`` every requested block has this prompt's content, from every rank with a share
- ``Received`` and ``Sent`` occur once per rank, and ``Freed`` once after a ``Received`` with
  quarantine
- a machine sends to no peer that its owner was told to remove

Either engine can die, and start again at the same address as a new incarnation: new machines, empty
pools.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial

from connectors.codec import decode, encode
from connectors.planning.blocks import wanted_blocks
from connectors.planning.heads import head_shares
from connectors.protocol.actions import (
    Connect,
    ConsumerAction,
    Due,
    Forget,
    Freed,
    ProducerAction,
    Received,
    Send,
    Sent,
    Verify,
    Write,
)
from connectors.protocol.consumer import Consumer
from connectors.protocol.delivery import ConsumerPeer
from connectors.protocol.engines import Partner
from connectors.protocol.params import EngineAddress
from connectors.protocol.producer import Producer
from connectors.protocol.reception import Order
from connectors.protocol.wire import AwaitStart, Cancel, Envelope, Message, Offer, Peer
from tests.campaigns.schedules.simulated import (
    DAMAGED,
    GROUPS,
    HANG_S,
    HEAD_BYTES,
    LATE_S,
    LAYERS,
    LIMITS,
    POOL,
    SHAPES,
    STRANGER,
    TICK_S,
    VERIFY_S,
    ConsumerRank,
    Consumption,
    DecodeEngine,
    PrefillEngine,
    ProducerRank,
    Queued,
    Violation,
    Weather,
    layers_of,
)
from tests.campaigns.schedules.tally import Tally


def owners(target: ConsumerRank, write: Write) -> set[str]:
    """Requests that own the blocks of a write."""
    return {target.owner[block] for move in write.moves for block in move.dst_ids.tolist() if block in target.owner}


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
        self.producer_tp, self.consumer_tp, self.starts = producer_tp, consumer_tp, 0
        self.prefill, self.decode = self.start_prefill(), self.start_decode()
        self.heads = Counter[tuple[int, int]]()
        for share in head_shares(producer_tp, consumer_tp, kv_heads):
            self.heads[share.producer_rank, share.consumer_rank] += share.stop - share.first
        idle = set(range(producer_tp)) - {producer for producer, _ in self.heads}
        self.pairs = sorted({*self.heads, *((rank, rank % consumer_tp) for rank in idle)})
        self.consumptions: dict[str, Consumption] = {}
        self.queued: dict[str, Queued] = {}
        self.counts = Counter[str]()

    # ---- engines start --------------------------------------------------------------------------

    def start_prefill(self) -> PrefillEngine:
        """Start the prefill engine: a new incarnation, at the same address."""
        self.starts += 1
        name = f"prefill-{self.starts}"
        ranks = [ProducerRank(Peer(name, rank), Producer(GROUPS, LIMITS)) for rank in range(self.producer_tp)]
        self.prefill = PrefillEngine(EngineAddress(name, "host", 1), ranks)
        return self.prefill

    def start_decode(self) -> DecodeEngine:
        self.starts += 1
        name = f"decode-{self.starts}"
        self.decode = DecodeEngine(
            [ConsumerRank(Peer(name, rank), Consumer(GROUPS, LIMITS)) for rank in range(self.consumer_tp)]
        )
        return self.decode

    @property
    def producers(self) -> list[ProducerRank]:
        return self.prefill.ranks

    @property
    def consumers(self) -> list[ConsumerRank]:
        return self.decode.ranks

    # ---- the clock ------------------------------------------------------------------------------

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
        for producer in self.producers:
            if producer.alive:
                self.produce(producer, producer.machine.tick(self.now))
        for consumer in self.consumers:
            if consumer.alive:
                self.consume(consumer, consumer.machine.tick(self.now))
                if self.stormy and self.rng.random() < self.weather.drops_peers:
                    self.drop_peer(consumer)

    def drop_peer(self, consumer: ConsumerRank) -> None:
        """The owner evicts an idle peer, and tells the machine."""
        idle = [peer for peer in consumer.plans if not consumer.machine.awaits(peer)]
        if idle:
            peer = self.rng.choice(sorted(idle, key=lambda one: (one.incarnation, one.rank)))
            self.counts["dropped peers"] += 1
            self.consume(consumer, consumer.machine.forget(peer.incarnation))
            consumer.plans.discard(peer)

    @property
    def stormy(self) -> bool:
        return self.now < self.weather.clears_at

    # ---- the network ----------------------------------------------------------------------------

    def send(self, sender: Peer, receiver: Peer, message: Message) -> None:
        frame = encode(Envelope(sender, receiver, message))
        self.counts[message.kind] += 1
        if self.stormy and self.rng.random() < self.weather.drop:
            self.counts["dropped"] += 1
            return
        copies = 2 if self.stormy and self.rng.random() < self.weather.double else 1
        for _ in range(copies):
            self.after(self.rng.uniform(0.001, self.weather.delay_s), lambda: self.deliver(receiver, frame))

    def deliver(self, receiver: Peer, frame: bytes) -> None:
        """Drop messages for another start, or for a dead rank."""
        envelope = decode(frame)
        for producer in self.producers:
            if producer.peer == receiver and producer.alive and producer.machine.knows(envelope.sender):
                assert isinstance(envelope.message, AwaitStart | Offer | Cancel)
                self.produce(producer, producer.machine.message(envelope.sender, envelope.message, self.now))
        for consumer in self.consumers:
            if consumer.peer == receiver and consumer.alive:
                self.consume(consumer, consumer.machine.message(envelope.sender, envelope.message, self.now))

    def send_from(self, rank: ProducerRank | ConsumerRank, receiver: Peer, message: Message) -> None:
        if receiver not in rank.plans:
            raise Violation(f"{rank.peer} sends {message.kind} to {receiver}, which its owner has removed")
        self.send(rank.peer, receiver, message)

    # ---- the prefill engine ---------------------------------------------------------------------

    def produce(self, producer: ProducerRank, actions: list[ProducerAction]) -> None:
        for action in actions:
            match action:
                case Send(peer, message):
                    self.send_from(producer, peer, message)
                case Write():
                    self.write(producer, action)
                case Forget(peer):
                    self.counts["forgotten consumers"] += 1
                    producer.plans.remove(peer)
                case Sent(request_id):
                    engine = self.prefill
                    engine.sent.setdefault(request_id, Counter())[producer.peer.rank] += 1
                    if engine.sent[request_id][producer.peer.rank] > 1:
                        raise Violation(f"{request_id} was sent twice on {producer.peer}")
                    if request_id in engine.held and len(engine.sent[request_id]) == len(engine.ranks):
                        # The scheduler frees a held request's blocks when all its workers have sent
                        # them.
                        self.give_back(engine, engine.held.pop(request_id))

    def on_producer(self, rank: int, call: Callable[[Producer], list[ProducerAction]]) -> None:
        producer = self.producers[rank]
        if producer.alive:
            self.counts["discards"] += 1
            self.produce(producer, call(producer.machine))

    def give_back(self, engine: PrefillEngine, ids: list[int]) -> None:
        """The allocator has the blocks again, and another request uses them at once."""
        engine.pool.give(ids)
        for producer in engine.ranks:
            for block in ids:
                for layer in range(LAYERS):
                    producer.memory[block, layer] = STRANGER

    def write(self, producer: ProducerRank, write: Write) -> None:
        if write.peer not in producer.plans:
            raise Violation(f"{producer.peer} writes to {write.peer}, which its owner has removed")
        target = next((each for each in self.consumers if each.peer == write.peer), None)
        heads = self.heads[producer.peer.rank, write.peer.rank]
        total = sum(
            len(move.dst_ids) * HEAD_BYTES[move.group] * heads * len(layers_of(move)) // LAYERS for move in write.moves
        )
        producer.machine.write_posted(write.write_id, total)
        if not total:
            self.produce(producer, producer.machine.write_done(write.write_id, self.now))
            return
        self.counts["writes"] += 1
        if self.stormy and self.rng.random() < self.weather.unposted:
            self.counts["writes that were not posted"] += 1
            self.produce(producer, producer.machine.write_refused(write.write_id, "the weather", self.now))
            return
        hangs = self.stormy and self.rng.random() < self.weather.hangs
        self.counts["hanging writes"] += hangs
        lasts = self.rng.uniform(0.001, HANG_S if hangs else self.weather.write_s)
        fails = self.stormy and self.rng.random() < (0.5 if hangs else self.weather.write_fails)
        if write.digest is not None:
            for move in write.moves:
                write.digest.add(move.group, move.src_ids, move.src_parts, move.layers)
        for move in write.moves:
            pairs = zip(move.src_ids.tolist(), move.dst_ids.tolist(), strict=True)
            for (src, dst), layer in itertools.product(pairs, layers_of(move)):
                if target is not None and not (fails and self.rng.random() < 0.5):
                    # Parts of a failed write arrive after the transport has reported it.
                    when = self.rng.uniform(0, lasts + LATE_S if fails else lasts)
                    self.after(
                        when,
                        partial(self.land, producer, target, write, src, dst, layer),
                    )
        if fails and target is not None:
            request = self.consumptions.get(next(iter(owners(target, write)), ""))
            if request is not None:
                request.failed_writes.add(target.peer.rank)
        self.after(lasts, lambda: self.written(producer, target, write.write_id, fails))

    def land(
        self, producer: ProducerRank, consumer: ConsumerRank, write: Write, src: int, dst: int, layer: int
    ) -> None:
        """Copy one block and layer of a write to the consumer's memory, with the producer's current
        content.
        """
        if not producer.alive or not consumer.alive:
            return
        owner = self.consumptions.get(consumer.owner.get(dst, ""))
        if owner is None or owner.transfer_id != write.transfer_id:
            raise Violation(
                f"{producer.peer} wrote {write.transfer_id} into block {dst} of {consumer.peer}, which had freed it"
            )
        consumer.memory[dst, producer.peer.rank, layer] = producer.memory.get((src, layer), STRANGER)
        if self.stormy and self.integrity and self.rng.random() < self.weather.damages:
            consumer.memory[dst, producer.peer.rank, layer] = DAMAGED
            self.counts["damaged blocks"] += 1

    def written(self, producer: ProducerRank, target: ConsumerRank | None, write_id: int, fails: bool) -> None:
        if not producer.alive:
            return
        if fails or target is None or not target.alive:
            self.counts["failed writes"] += 1
            self.produce(producer, producer.machine.write_failed(write_id, "the weather", self.now))
        else:
            self.produce(producer, producer.machine.write_done(write_id, self.now))

    # ---- the decode engine ----------------------------------------------------------------------

    def queue(self, queued: Queued) -> None:
        """A decode request arrives; it allocates its blocks when its prompt is about to start.

        The first rank sends the AwaitStart.
        """
        self.counts["queued"] += 1
        self.queued[queued.request_id] = queued
        machine = queued.engine.ranks[0].machine
        actions = machine.queue(queued.request_id, queued.transfer_id, queued.producer, self.now)
        self.consume(queued.engine.ranks[0], actions)

    def due(self, request_id: str, failure: str | None) -> None:
        """The scheduler gets the report: the request allocates its blocks, or is computed by
        this engine alone.
        """
        queued = self.queued[request_id]
        if queued.due:
            raise Violation(f"{request_id} was due twice")
        queued.due = True
        if failure is not None:
            self.counts["queued in vain"] += 1
            del self.queued[request_id]
            return
        self.after(self.rng.uniform(0, 0.1), partial(self.bind, queued))

    def bind(self, queued: Queued) -> None:
        if self.queued.get(queued.request_id) is queued:
            del self.queued[queued.request_id]
            if queued.engine.alive:
                queued.bind()

    def leave_queue(self, request_id: str) -> bool:
        """Abort the request. Return False if it already has blocks."""
        queued = self.queued.pop(request_id, None)
        if queued is None:
            return False
        for consumer in queued.engine.ranks:
            release = partial(Consumer.release, transfer_id=queued.transfer_id, producer=queued.producer, now=self.now)
            self.on(consumer, release)
        return True

    def start(
        self, request_id: str, transfer_id: str, prompt: str, prompt_tokens: int, start_token: int, at: EngineAddress
    ) -> None:
        """A decode request has its blocks; every worker gets the order at its own time."""
        end, engine = prompt_tokens - 1, self.decode
        tables = [engine.pool.take(-(-prompt_tokens // group.block_tokens)) for group in GROUPS]
        wanted = tuple(wanted_blocks(g, table, start_token, end) for g, table in zip(GROUPS, tables, strict=True))
        order = Order(request_id, transfer_id, at, end, prompt, wanted)
        blocks = [block for table in tables for block in table]
        self.consumptions[request_id] = Consumption(
            request_id, transfer_id, prompt, prompt_tokens, self.now, blocks, order, engine
        )
        for consumer in engine.ranks:
            for block in blocks:
                consumer.owner[block] = request_id
                for producer, layer in itertools.product(range(self.producer_tp), range(LAYERS)):
                    consumer.memory[block, producer, layer] = STRANGER
            self.after(self.rng.uniform(0, 0.1), partial(self.on, consumer, lambda m: m.start(order, self.now)))

    def on_consumer(self, rank: int, call: Callable[[Consumer], list[ConsumerAction]]) -> None:
        self.on(self.consumers[rank], call)

    def on(self, consumer: ConsumerRank, call: Callable[[Consumer], list[ConsumerAction]]) -> None:
        if consumer.alive:
            self.consume(consumer, call(consumer.machine))

    def consume(self, consumer: ConsumerRank, actions: Sequence[ConsumerAction]) -> None:
        todo = deque(actions)
        while todo:
            match todo.popleft():
                case Send(peer, message):
                    if self.stormy and self.rng.random() < self.weather.unsent:
                        self.counts["unsent"] += 1
                        todo.extend(consumer.machine.undelivered(peer, message, self.now))
                    else:
                        self.send_from(consumer, peer, message)
                case Connect(engine):
                    self.connect(consumer, engine)
                case Forget(peer):
                    self.counts["forgotten producers"] += 1
                    consumer.plans.discard(peer)
                case Verify() as verify:
                    # A worker verifies in order.
                    start = max(self.now, consumer.verifying_until)
                    consumer.verifying_until = start + self.rng.uniform(0, VERIFY_S)
                    self.after(consumer.verifying_until - self.now, partial(self.verified, consumer, verify))
                case Due(request_id, _, failure):
                    self.due(request_id, failure)
                case Received(request_id, failure, quarantine):
                    self.received(consumer, self.consumptions[request_id], failure, quarantine)
                case Freed(request_id):
                    self.freed(consumer, self.consumptions[request_id])

    def verified(self, consumer: ConsumerRank, verify: Verify) -> None:
        if consumer.alive:
            problem = verify.problem()
            kind = "bad" if problem else "good" if verify.expected else "partial"
            self.counts[f"{kind} digests"] += 1
            self.on(consumer, lambda m: m.verified(verify.transfer_id, verify.peer, problem, self.now))

    def connect(self, consumer: ConsumerRank, engine: EngineAddress) -> None:
        """Run the handshake, which succeeds or fails with a reason within handshake_s."""
        if engine.incarnation in consumer.connecting:
            return
        self.counts["handshakes"] += 1
        consumer.connecting.add(engine.incarnation)
        lasts = self.rng.uniform(0.01, LIMITS.handshake_s)
        refused = self.stormy and self.rng.random() < self.weather.refuses
        self.after(lasts, lambda: self.connected(consumer, engine.incarnation, refused))

    def connected(self, consumer: ConsumerRank, incarnation: str, refused: bool) -> None:
        consumer.connecting.discard(incarnation)
        if refused or not self.prefill.alive or self.prefill.address.incarnation != incarnation:
            self.on(consumer, lambda m: m.connect_failed(incarnation, "no answer, or another start's", self.now))
            return
        if not consumer.alive:
            return
        found = []
        for p, c in self.pairs:
            if c == consumer.peer.rank:
                producer = self.producers[p]
                ours = frozenset(other for rank, other in self.pairs if rank == p)
                source, target = self.digests(producer, consumer)
                producer.plans.add(consumer.peer)
                producer.machine.welcome(consumer.peer, ConsumerPeer(ours, POOL, SHAPES, source), self.now)
                consumer.plans.add(producer.peer)
                sizes = tuple(size * self.heads[p, c] for size in HEAD_BYTES)
                found.append(Partner(producer.peer, SHAPES, sizes, target if self.integrity else None))
        self.on(consumer, lambda m: m.connected(incarnation, found, self.now))

    def digests(
        self, producer: ProducerRank, consumer: ConsumerRank
    ) -> tuple[Callable[[], Tally], Callable[[], Tally]]:
        """Return the digest factory of a pair of ranks, for either end.

        A pair without a share moves nothing.
        """
        p = producer.peer.rank
        if not self.heads[p, consumer.peer.rank]:
            return (lambda: Tally(lambda *_: None)), (lambda: Tally(lambda *_: None))
        source, target = producer.memory, consumer.memory
        return (
            lambda: Tally(lambda block, layer: source.get((block, layer), STRANGER), LAYERS),
            lambda: Tally(lambda block, layer: target[block, p, layer], LAYERS),
        )

    def received(
        self, consumer: ConsumerRank, request: Consumption, failure: str | None, quarantine: str | None
    ) -> None:
        rank = consumer.peer.rank
        if rank in request.results:
            raise Violation(f"{request.request_id} was received twice on {consumer.peer}")
        request.results[rank] = failure
        if failure is None:
            self.check_contents(consumer, request)
        if quarantine is not None:
            if failure is None or quarantine != request.transfer_id:
                raise Violation(f"{request.request_id} (failure: {failure}) is in quarantine for {quarantine}")
            self.counts["quarantines"] += 1
            request.quarantine.add(rank)
        else:
            self.disown(consumer, request)
        if len(request.results) == len(request.engine.ranks):
            request.ended_at = self.now
        self.give_back_if_free(request)

    def freed(self, consumer: ConsumerRank, request: Consumption) -> None:
        if consumer.peer.rank not in request.quarantine:
            raise Violation(f"{request.request_id} is freed on {consumer.peer} and was not in quarantine")
        request.quarantine.remove(consumer.peer.rank)
        self.disown(consumer, request)
        self.give_back_if_free(request)

    def disown(self, consumer: ConsumerRank, request: Consumption) -> None:
        for block in request.blocks:
            del consumer.owner[block]

    def give_back_if_free(self, request: Consumption) -> None:
        """Return whether every rank has reported, and no rank's blocks are in quarantine."""
        if len(request.results) == len(request.engine.ranks) and not request.quarantine:
            request.freed_at = self.now
            request.engine.pool.give(request.blocks)

    def check_contents(self, consumer: ConsumerRank, request: Consumption) -> None:
        rank = consumer.peer.rank
        for group, blocks in zip(GROUPS, request.order.groups, strict=True):
            for position, block in zip(blocks.positions.tolist(), blocks.ids.tolist(), strict=True):
                needed = min((position + 1) * group.block_tokens, request.order.end_token)
                for p, layer in itertools.product(range(self.producer_tp), range(LAYERS)):
                    if not self.heads[p, rank]:
                        continue
                    tag = consumer.memory[block, p, layer]
                    if tag[:3] != (request.prompt, group.index, position) or tag[3] < needed:
                        raise Violation(
                            f"{request.request_id} was told ok on rank {rank}, but group {group.index}, position "
                            f"{position} holds {tag} of rank {p} where {needed} tokens of {request.prompt} are needed"
                        )
