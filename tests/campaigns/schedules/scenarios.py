"""Random schedules for the simulator, each drawn from one seed, and the conditions at their end."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from connectors.planning.blocks import NULL_BLOCK, first_needed_token
from connectors.planning.layout import GroupKind
from connectors.protocol.params import EngineAddress
from connectors.protocol.wire import Peer
from tests.campaigns.schedules.simulated import (
    GROUPS,
    HANG_S,
    LATE_S,
    LAYERS,
    LIMITS,
    POOL,
    TICK_S,
    VERIFY_S,
    ConsumerRank,
    Consumption,
    PrefillEngine,
    ProducerRank,
    Queued,
    Violation,
    Weather,
)
from tests.campaigns.schedules.simulator import World

CLEARS_AT = 9.0
TP_PAIRS = [(1, 1), (1, 2), (2, 1), (2, 2), (3, 2), (2, 3), (1, 3), (3, 1)]


@dataclass
class Prefill:
    """A prefill request: chunks, perhaps a preemption, and an end with or without hold.

    ``engine`` runs it.
    """

    world: World
    request_id: str
    transfer_id: str
    prompt: str
    prompt_tokens: int
    by_layers: bool = False
    ends_at: float = 0.0
    held: bool = True
    computed: int = 0
    engine: PrefillEngine = field(init=False)
    tables: list[list[int]] = field(default_factory=list)
    owned: list[int] = field(default_factory=list)

    def schedule(self, when: float, rng: random.Random, abort: bool, preempt: bool) -> None:
        """Run engine steps one after the other; within a step, ranks finish at different
        moments.
        """
        chunk = rng.randint(2, 12)
        steps = -(-self.prompt_tokens // chunk)
        stop = rng.randint(0, steps) if abort else steps
        again = rng.randint(1, max(1, stop)) if preempt and stop else 0
        self.world.at(when, self.expect)
        for step in range(1, stop + 1):
            when = self.step(when, chunk, rng)
            if step == again:
                self.world.at(when, self.preempt)
                for _ in range(step):
                    when = self.step(when + rng.uniform(0, 0.3), chunk, rng)
        self.held = not abort
        self.ends_at = when
        self.world.at(when, self.finish)

    def step(self, when: float, chunk: int, rng: random.Random) -> float:
        self.world.at(when, lambda: self.begin(chunk))
        lasts = rng.uniform(0.02, 0.5)
        for rank in range(len(self.world.producers)):
            done = rng.uniform(0.01, lasts)
            if self.by_layers:
                self.world.at(when + rng.uniform(0.005, done), partial(self.first_layer_on, rank))
            self.world.at(when + done, partial(self.computed_on, rank))
        return when + lasts + 0.001

    @property
    def dead(self) -> bool:
        return not self.engine.alive

    def expect(self) -> None:
        self.engine, self.tables = self.world.prefill, [[] for _ in GROUPS]
        for producer in self.engine.ranks:
            if producer.alive:
                actions = producer.machine.expect(
                    self.request_id, self.transfer_id, self.prompt_tokens, self.prompt, self.world.now
                )
                self.world.produce(producer, actions)

    def begin(self, chunk: int) -> None:
        """Free the blocks that the window has left, and allocate blocks for the chunk."""
        if self.dead:
            return
        for group, table in zip(GROUPS, self.tables, strict=True):
            kept = first_needed_token(group, self.computed) // group.block_tokens
            freed = [block for block in table[:kept] if block != NULL_BLOCK]
            if group.kind is GroupKind.SLIDING and freed:
                table[:kept] = [NULL_BLOCK] * kept
                self.owned = [block for block in self.owned if block not in freed]
                self.world.give_back(self.engine, freed)
        for producer in self.engine.ranks:
            self.world.produce(producer, producer.machine.starting(self.request_id, self.world.now))
        self.computed = min(self.computed + chunk, self.prompt_tokens)
        self.new = []
        for group, table in zip(GROUPS, self.tables, strict=True):
            ids = self.engine.pool.take(-(-self.computed // group.block_tokens) - len(table))
            table += ids
            self.owned += ids
            self.new.append(ids)
        if self.by_layers:
            for producer in self.engine.ranks:
                producer.machine.begin(self.request_id, self.new, self.computed)
            self.new = [[] for _ in GROUPS]

    def first_layer_on(self, rank: int) -> None:
        """This rank has computed the chunk's first layer, of every group."""
        if self.dead:
            return
        self.fill(rank, 1)
        for group in GROUPS:
            producer = self.engine.ranks[rank]
            actions = producer.machine.layers_computed([self.request_id], group.index, 1, self.world.now)
            self.world.counts["layers that left early"] += len(actions)
            self.world.produce(producer, actions)

    def computed_on(self, rank: int) -> None:
        """This rank's part of the chunk is in its memory."""
        producer = self.engine.ranks[rank]
        if self.dead:
            return
        self.fill(rank, LAYERS)
        actions = producer.machine.progress(self.request_id, self.new, self.computed, self.world.now)
        self.world.produce(producer, actions)

    def fill(self, rank: int, layers: int) -> None:
        """The first layers of all blocks have the computed content."""
        for group, table in zip(GROUPS, self.tables, strict=True):
            for position, block in enumerate(table):
                if block != NULL_BLOCK:
                    filled = min((position + 1) * group.block_tokens, self.computed)
                    for layer in range(layers):
                        memory = self.engine.ranks[rank].memory
                        memory[block, layer] = (self.prompt, group.index, position, filled)

    def preempt(self) -> None:
        if self.dead:
            return
        for producer in self.engine.ranks:
            self.world.produce(producer, producer.machine.preempted(self.request_id, self.world.now))
            self.world.produce(producer, producer.machine.fenced(self.request_id, self.world.now))
        self.world.give_back(self.engine, self.owned)
        self.owned, self.computed, self.tables = [], 0, [[] for _ in GROUPS]
        self.world.counts["preemptions"] += 1

    def finish(self) -> None:
        if self.dead:
            return
        if self.held:
            self.engine.held[self.request_id] = self.owned
        for producer in self.engine.ranks:
            reason = "" if self.held else "the client left"
            self.world.produce(producer, producer.machine.finished(self.request_id, self.held, reason, self.world.now))
        if not self.held:
            self.world.give_back(self.engine, self.owned)


@dataclass
class Schedule:
    """One seed's world and its drawn parameters."""

    seed: int
    calm: bool
    world: World
    prefills: list[Prefill]
    last_event: float


def draw(seed: int) -> Schedule:
    """Every fourth schedule is calm: without faults, so all KV must arrive."""
    rng = random.Random(seed)
    calm = seed % 4 == 0
    producer_tp, consumer_tp = rng.choice(TP_PAIRS)
    weather = Weather(delay_s=rng.choice([0.01, 0.2]), write_s=rng.choice([0.05, 0.4]))
    if not calm:
        weather = Weather(
            drop=rng.choice([0, 0, 0.1, 0.4]),
            double=rng.choice([0, 0.3]),
            delay_s=rng.choice([0.01, 0.2, 2.0]),
            write_s=rng.choice([0.05, 0.4, 3.0]),
            write_fails=rng.choice([0, 0, 0.2]),
            unposted=rng.choice([0, 0, 0.1]),
            refuses=rng.choice([0, 0, 0.3]),
            damages=rng.choice([0, 0, 0.02]),
            hangs=rng.choice([0, 0, 0, 0.05]),
            unsent=rng.choice([0, 0, 0.2]),
            drops_peers=rng.choice([0, 0, 0.2]),
            clears_at=CLEARS_AT,
        )
    world = World(rng, producer_tp, consumer_tp, rng.choice([1, 2, 3, 4, 6]), weather, rng.random() < 0.8)
    prefills: list[Prefill] = []
    last = CLEARS_AT if not calm else 0.0
    numbers = itertools.count()
    for _ in range(rng.randint(1, 4)):
        last = max(last, add_request(world, prefills, rng, next(numbers), calm))
    for side in ("prefill", "decode"):
        if not calm and rng.random() < 0.2:
            back = add_death(world, rng, side)
            last = max(last, back)
            for _ in range(rng.randint(0, 2)):
                last = max(last, add_request(world, prefills, rng, next(numbers), calm, back - 1.0))
    return Schedule(seed, calm, world, prefills, last)


def add_request(
    world: World, prefills: list[Prefill], rng: random.Random, number: int, calm: bool, after: float = 0.0
) -> float:
    """Draw one transfer, its legs in any order; with faults, a leg may be missing, doubled,
    aborted or of another prompt.
    """

    def chance(probability: float) -> bool:
        return not calm and rng.random() < probability

    transfer, prompt, tokens = f"t{number}", f"prompt-{number}", rng.randint(2, 40)
    begins, by_layers = after + rng.uniform(0, 4), rng.random() < 0.4
    prefill = Prefill(world, f"p{number}", transfer, prompt, tokens - 1, by_layers)
    comes, ends = not chance(0.1), begins
    if comes:
        prefill.schedule(begins + (rng.uniform(0, 4) if chance(0.3) else 0.0), rng, chance(0.15), chance(0.2))
        prefills.append(prefill)
        ends = prefill.ends_at
    if comes and chance(0.1):
        twin = Prefill(world, f"p{number}-twin", transfer, prompt, tokens - 1, by_layers)
        twin.schedule(begins + rng.uniform(0, 2), rng, False, False)
        prefills.append(twin)
        ends = max(ends, twin.ends_at)
    when = rng.choice([max(0.0, begins - rng.uniform(0, 1.5)), begins, rng.uniform(begins, ends + 0.001), ends + 1.0])
    if chance(0.1):
        when = ends + rng.uniform(0, 2 * LIMITS.lease_s)
    if chance(0.1):
        for rank in range(len(world.consumers)):
            world.at(
                when,
                partial(world.on_consumer, rank, lambda m: m.release(transfer, world.prefill.address, world.now)),
            )
    if chance(0.1):
        discards = when + rng.uniform(-1, 2)
        for rank in range(len(world.producers)):
            at = discards + rng.uniform(0, 0.1)
            world.at(at, partial(world.on_producer, rank, lambda m: m.discard(transfer, world.now)))
    if not chance(0.1):
        asked = "another prompt" if chance(0.05) else prompt
        prefix = 4 * rng.randint(0, (tokens - 1) // 4) if rng.random() < 0.3 else 0
        add_consumption(world, rng, f"d{number}", transfer, (asked, tokens, prefix), when, chance(0.2))
        if chance(0.15):
            later = when + rng.choice([0.0, rng.uniform(0, 6)])
            add_consumption(world, rng, f"d{number}-twin", transfer, (asked, tokens, prefix), later, chance(0.2))
            when = later
    return max(ends, when) + 3.0


def add_consumption(
    world: World, rng: random.Random, name: str, transfer: str, what: tuple[str, int, int], when: float, abort: bool
) -> None:
    prompt, tokens, prefix = what
    known: list[EngineAddress] = []
    queues = rng.random() < 0.5

    def start() -> None:
        if not world.decode.alive:
            return
        bind = partial(world.start, name, transfer, prompt, tokens, prefix, known[0])
        if queues:
            world.queue(Queued(name, transfer, known[0], world.decode, bind))
        else:
            bind()

    def leave() -> None:
        if world.leave_queue(name):
            return
        for rank in range(len(world.consumers)):
            world.after(
                rng.uniform(0, 0.1),
                partial(world.on_consumer, rank, lambda m: m.abort(name, world.now)),
            )

    # The router may have known the prefill engine for some time.
    world.at(when - rng.choice([0.0, 0.0, 2.0]), lambda: known.append(world.prefill.address))
    world.at(when, start)
    if abort:
        world.at(when + 0.1 + rng.uniform(0, 3), leave)


def add_death(world: World, rng: random.Random, side: str) -> float:
    """One rank dies, the others a little later; usually the engine starts again.

    Return the time at which these events end.

    The loss of the whole engine is always reported to a consumer, and sometimes to a producer.
    """
    dies, first = rng.uniform(0, 8), rng.random()
    gone = dies + rng.uniform(0.01, 1.0)
    again = gone + rng.uniform(0.1, 3.0) if rng.random() < 0.7 else 0.0
    told, tells = gone + rng.uniform(0.01, 2.0), side == "prefill" or rng.random() < 0.5

    def start_again() -> None:
        world.counts[f"{side} engines started again"] += 1
        world.start_prefill() if side == "prefill" else world.start_decode()

    def fall(ranks: Sequence[ProducerRank | ConsumerRank]) -> None:
        for rank in ranks:
            rank.alive = False

    def die() -> None:
        ranks = world.producers if side == "prefill" else world.consumers
        world.counts[f"{side} engines died"] += 1
        ranks[int(first * len(ranks))].alive = False
        world.at(gone, lambda: fall(ranks))
        if side == "prefill":
            # Each worker's death is detected separately.
            world.at(dies + (told - gone), lambda: tell([ranks[int(first * len(ranks))].peer]))
        world.at(told, lambda: tell([rank.peer for rank in ranks]))
        if again:
            world.at(again, start_again)

    def tell(lost: list[Peer]) -> None:
        if side == "prefill":
            for consumer in world.consumers:
                for peer in lost:
                    world.on(consumer, partial(lambda m, peer: m.worker_lost(peer, "no process", world.now), peer=peer))
        elif tells:
            for producer in world.producers:
                for peer in lost:
                    if producer.alive:
                        world.produce(producer, producer.machine.peer_lost(peer, world.now))

    world.at(dies, die)
    return max(told, again)


def bound_s(world: World) -> float:
    """Return the longest time that a request may take after the last external event, with
    hanging writes.
    """
    weather = world.weather
    waits = LIMITS.handshake_s + LIMITS.progress_s + LIMITS.cancel_s
    return waits + 4 * weather.delay_s + 2 * weather.write_s + VERIFY_S + 4 * TICK_S


def run(seed: int) -> Schedule:
    """Run one schedule to its end. Raises Violation, which names the broken promise."""
    schedule = draw(seed)
    world = schedule.world
    world.run(schedule.last_event + 2 * bound_s(world) + LIMITS.lease_s)
    check_requests(schedule)
    world.run(world.now + HANG_S + LATE_S + 3 * LIMITS.lease_s + 1)
    end_quarantine(world)
    check_nothing_remains(schedule)
    return schedule


def end_quarantine(world: World) -> None:
    """Check that blocks in quarantine have a failed write, and are freed at its producer's
    death.
    """
    for consumer in world.consumers:
        for request in world.consumptions.values():
            if request.engine.alive and consumer.peer.rank in request.quarantine:
                if consumer.peer.rank not in request.failed_writes:
                    raise Violation(
                        f"{request.request_id} is in quarantine on {consumer.peer}, and no write has failed"
                    )
                world.counts["quarantines for good"] += 1
    if any(consumer.alive and consumer.machine.counts()["quarantined"] for consumer in world.consumers):
        for producer in world.producers:
            producer.alive = False
        for consumer in world.consumers:
            incarnation = world.prefill.address.incarnation
            world.on(
                consumer, partial(lambda machine, name: machine.engine_lost(name, "dead", world.now), name=incarnation)
            )
        world.run(world.now + 3 * LIMITS.lease_s + LIMITS.forget_s)


def check_requests(schedule: Schedule) -> None:
    """Check that every request has ended within the bound; in a calm schedule it has its KV."""
    world = schedule.world
    for queued in world.queued.values():
        if queued.engine.alive:
            raise Violation(f"{queued.request_id} still waits for its prompt's start")
    if schedule.calm and world.counts["queued in vain"]:
        raise Violation("a prompt never started in calm weather")
    for request in world.consumptions.values():
        if not request.engine.alive:
            continue
        if len(request.results) < len(request.engine.ranks):
            raise Violation(f"{request.request_id} has not ended: {request.results}")
        late = request.ended_at - max(schedule.last_event, request.started_at)
        if late > bound_s(world):
            raise Violation(
                f"{request.request_id} ended {late:.1f} s after the last event, {bound_s(world):.1f} allowed"
            )
        if schedule.calm and not delivered(request):
            raise Violation(f"{request.request_id} failed in calm weather: {request.results}")


def delivered(request: Consumption) -> bool:
    return bool(request.results) and all(failure is None for failure in request.results.values())


def check_nothing_remains(schedule: Schedule) -> None:
    """Check after the leases: empty machines without peers, full pools, one Sent per rank for
    every held request.
    """
    world = schedule.world
    for producer in world.producers:
        if producer.alive and (any(producer.machine.counts().values()) or producer.plans):
            raise Violation(f"{producer.peer} still has {producer.machine.counts()}, knows {producer.plans}")
    for consumer in world.consumers:
        if consumer.alive and (any(consumer.machine.counts().values()) or consumer.owner or consumer.plans):
            raise Violation(
                f"{consumer.peer} still has {consumer.machine.counts()}, {len(consumer.owner)} blocks, "
                f"knows {consumer.plans}"
            )
    for prefill in schedule.prefills:
        if prefill.engine.alive:
            expected = [1] * len(world.producers) if prefill.held else []
            sent: Mapping[int, int] = prefill.engine.sent.get(prefill.request_id, {})
            if list(sent.values()) != expected:
                raise Violation(f"{prefill.request_id} (held: {prefill.held}): sent {sent}")
    for engine in (world.prefill, world.decode):
        if engine.alive and len(engine.pool.free) != POOL - 1:
            raise Violation(f"{POOL - 1 - len(engine.pool.free)} blocks of {engine.ranks[0].peer} have leaked")
