"""Random schedules for the simulator, each drawn from one seed, and what must be true at their end."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from connectors.planning.blocks import NULL_BLOCK, first_needed_token
from connectors.planning.layout import GroupKind
from connectors.protocol.wire import Peer
from tests.protocol.simulator import (
    DECODE,
    ENGINE,
    GROUPS,
    LAYERS,
    LIMITS,
    POOL,
    TICK_S,
    VERIFY_S,
    Consumption,
    Violation,
    Weather,
    World,
)

CLEARS_AT = 9.0
TP_PAIRS = [(1, 1), (1, 2), (2, 1), (2, 2), (3, 2), (2, 3), (1, 3), (3, 1)]


@dataclass
class Prefill:
    """A prefill request: chunks, perhaps a preemption, and an end that is held or not."""

    world: World
    request_id: str
    transfer_id: str
    prompt: str
    prompt_tokens: int
    by_layers: bool = False
    ends_at: float = 0.0
    held: bool = True
    computed: int = 0
    tables: list[list[int]] = field(default_factory=list)
    owned: list[int] = field(default_factory=list)

    def schedule(self, when: float, rng: random.Random, abort: bool, preempt: bool) -> None:
        """Engine steps one after the other; within a step, ranks are done at different moments."""
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
                self.world.at(when + rng.uniform(0.005, done), lambda r=rank: self.first_layer_on(r))
            self.world.at(when + done, lambda r=rank: self.computed_on(r))
        return when + lasts + 0.001

    @property
    def dead(self) -> bool:
        return not all(producer.alive for producer in self.world.producers)

    def expect(self) -> None:
        self.tables = [[] for _ in GROUPS]
        for rank, producer in enumerate(self.world.producers):
            if producer.alive:
                actions = producer.machine.expect(
                    self.request_id, self.transfer_id, self.prompt_tokens, self.prompt, self.world.now
                )
                self.world.produce(rank, actions)

    def begin(self, chunk: int) -> None:
        """The scheduler frees what the window has left, and allocates blocks for the chunk."""
        if self.dead:
            return
        for group, table in zip(GROUPS, self.tables, strict=True):
            kept = first_needed_token(group, self.computed) // group.block_tokens
            freed = [block for block in table[:kept] if block != NULL_BLOCK]
            if group.kind is GroupKind.SLIDING and freed:
                table[:kept] = [NULL_BLOCK] * kept
                self.owned = [block for block in self.owned if block not in freed]
                self.world.give_back(freed)
        self.computed = min(self.computed + chunk, self.prompt_tokens)
        self.new = []
        for group, table in zip(GROUPS, self.tables, strict=True):
            ids = self.world.prefill_pool.take(-(-self.computed // group.block_tokens) - len(table))
            table += ids
            self.owned += ids
            self.new.append(ids)
        if self.by_layers:
            for producer in self.world.producers:
                producer.machine.begin(self.request_id, self.new, self.computed)
            self.new = [[] for _ in GROUPS]

    def first_layer_on(self, rank: int) -> None:
        """This rank has computed the chunk's first layer, of every group."""
        if self.dead:
            return
        self.fill(rank, 1)
        for group in GROUPS:
            actions = self.world.producers[rank].machine.layers_computed(
                [self.request_id], group.index, 1, self.world.now
            )
            self.world.counts["layers that left early"] += len(actions)
            self.world.produce(rank, actions)

    def computed_on(self, rank: int) -> None:
        """This rank's part of the chunk is in its memory."""
        producer = self.world.producers[rank]
        if self.dead:
            return
        self.fill(rank, LAYERS)
        actions = producer.machine.progress(self.request_id, self.new, self.computed, self.world.now)
        self.world.produce(rank, actions)

    def fill(self, rank: int, layers: int) -> None:
        """The first layers of all blocks hold what has been computed."""
        for group, table in zip(GROUPS, self.tables, strict=True):
            for position, block in enumerate(table):
                if block != NULL_BLOCK:
                    filled = min((position + 1) * group.block_tokens, self.computed)
                    for layer in range(layers):
                        memory = self.world.producers[rank].memory
                        memory[block, layer] = (self.prompt, group.index, position, filled)

    def preempt(self) -> None:
        if self.dead:
            return
        for rank, producer in enumerate(self.world.producers):
            self.world.produce(rank, producer.machine.preempted(self.request_id, self.world.now))
        self.world.give_back(self.owned)
        self.owned, self.computed, self.tables = [], 0, [[] for _ in GROUPS]
        self.world.counts["preemptions"] += 1

    def finish(self) -> None:
        if self.dead:
            return
        if self.held:
            self.world.held_blocks[self.request_id] = self.owned
        for rank, producer in enumerate(self.world.producers):
            reason = "" if self.held else "the client left"
            self.world.produce(rank, producer.machine.finished(self.request_id, self.held, reason, self.world.now))
        if not self.held:
            self.world.give_back(self.owned)


@dataclass
class Schedule:
    """One seed's world and what was drawn for it."""

    seed: int
    calm: bool
    world: World
    prefills: list[Prefill]
    last_event: float
    producers_die: bool
    consumers_die: bool


def draw(seed: int) -> Schedule:
    """Every fourth schedule is calm: no fault of any kind, so everything must arrive."""
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
            refuses=rng.choice([0, 0, 0.3]),
            damages=rng.choice([0, 0, 0.02]),
            clears_at=CLEARS_AT,
        )
    world = World(rng, producer_tp, consumer_tp, rng.choice([1, 2, 3, 4, 6]), weather, rng.random() < 0.8)
    prefills, last = [], CLEARS_AT if not calm else 0.0
    for number in range(rng.randint(1, 4)):
        last = max(last, add_request(world, prefills, rng, number, calm))
    kill = {side: not calm and rng.random() < 0.12 for side in ("prefill", "decode")}
    for side, dies in kill.items():
        if dies:
            last = max(last, add_death(world, rng, side))
    return Schedule(seed, calm, world, prefills, last, kill["prefill"], kill["decode"])


def add_request(world: World, prefills: list[Prefill], rng: random.Random, number: int, calm: bool) -> float:
    """One transfer, its legs in any order; in bad weather with a leg missing, doubled, aborted or of another prompt."""

    def chance(probability: float) -> bool:
        return not calm and rng.random() < probability

    transfer, prompt, tokens = f"t{number}", f"prompt-{number}", rng.randint(2, 40)
    begins, by_layers = rng.uniform(0, 4), rng.random() < 0.4
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
            world.at(when, lambda r=rank: world.on_consumer(r, lambda m: m.release(transfer, ENGINE, world.now)))
    if chance(0.1):
        discards = when + rng.uniform(-1, 2)
        for rank in range(len(world.producers)):
            at = discards + rng.uniform(0, 0.1)
            world.at(at, lambda r=rank: world.on_producer(r, lambda m: m.discard(transfer, world.now)))
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

    def start() -> None:
        if all(consumer.alive for consumer in world.consumers):
            world.start(name, transfer, prompt, tokens, prefix)

    world.at(when, start)
    if abort:
        at = when + 0.1 + rng.uniform(0, 3)
        for rank in range(len(world.consumers)):
            world.at(
                at + rng.uniform(0, 0.1),
                lambda r=rank: world.on_consumer(r, lambda m: m.abort(name, world.now)),
            )


def add_death(world: World, rng: random.Random, side: str) -> float:
    """One rank dies, the others a little later; the survivors' side is told when the whole engine is gone."""
    ranks = world.producers if side == "prefill" else world.consumers
    dies = rng.uniform(0, 8)
    first = rng.randrange(len(ranks))
    gone = dies + rng.uniform(0.01, 1.0)
    for rank, body in enumerate(ranks):
        world.at(dies if rank == first else gone, lambda b=body: setattr(b, "alive", False))
    told = gone + rng.uniform(0.01, 2.0)

    def tell() -> None:
        for rank, consumer in enumerate(world.consumers):
            if side == "prefill" and consumer.alive:
                world.consume(rank, consumer.machine.engine_lost(ENGINE.incarnation, "no process", world.now))
        for rank, producer in enumerate(world.producers):
            for target in range(len(world.consumers)):
                if side == "decode" and producer.alive:
                    world.produce(rank, producer.machine.peer_lost(Peer(DECODE, target), world.now))

    world.at(told, tell)
    return told


def bound_s(world: World) -> float:
    """How long after the last thing that happened from outside a request may still take."""
    weather = world.weather
    waits = LIMITS.handshake_s + LIMITS.progress_s + LIMITS.cancel_s
    return waits + 4 * weather.delay_s + 2 * weather.write_s + VERIFY_S + 4 * TICK_S


def run(seed: int) -> Schedule:
    """Play one schedule to its end. Raises Violation, which names what was broken."""
    schedule = draw(seed)
    world = schedule.world
    world.run(schedule.last_event + bound_s(world) + LIMITS.lease_s)
    check_requests(schedule)
    world.run(world.now + 3 * LIMITS.lease_s + 1)
    check_nothing_remains(schedule)
    return schedule


def check_requests(schedule: Schedule) -> None:
    """Every request has ended within the bound; in calm weather it has its KV."""
    world = schedule.world
    for request in world.consumptions.values():
        if schedule.consumers_die:
            continue
        if len(request.results) < len(world.consumers):
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
    """After the leases: empty machines, full pools, one Sent a rank for every held request."""
    world = schedule.world
    for rank, producer in enumerate(world.producers):
        if producer.alive and any(producer.machine.census().values()):
            raise Violation(f"prefill rank {rank} still has {producer.machine.census()}")
    for rank, consumer in enumerate(world.consumers):
        if consumer.alive and (any(consumer.machine.census().values()) or consumer.owner):
            raise Violation(f"decode rank {rank} still has {consumer.machine.census()}, {len(consumer.owner)} blocks")
    if not schedule.producers_die:
        for prefill in schedule.prefills:
            expected = [1] * len(world.producers) if prefill.held else []
            if list(world.sent.get(prefill.request_id, {}).values()) != expected:
                raise Violation(
                    f"{prefill.request_id} (held: {prefill.held}): sent {world.sent.get(prefill.request_id)}"
                )
        if len(world.prefill_pool.free) != POOL - 1:
            raise Violation(f"{POOL - 1 - len(world.prefill_pool.free)} prefill blocks have leaked")
    if not schedule.consumers_die and len(world.decode_pool.free) != POOL - 1:
        raise Violation(f"{POOL - 1 - len(world.decode_pool.free)} decode blocks have leaked")
