"""The small transfers of the exploration: orders of the schedulers, and possible faults."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from connectors.planning.blocks import BlockSet, UnitShape
from connectors.planning.layout import Group, GroupKind
from connectors.protocol import delivery
from connectors.protocol.engines import Partner
from connectors.protocol.limits import TransferLimits
from connectors.protocol.reception import Order
from connectors.protocol.wire import Peer
from tests.campaigns.protocol.automata import (
    DECODE,
    ENGINE,
    LAYERS,
    UNIT_BYTES,
    Cell,
    CellDigest,
    ExplorableConsumer,
    ExplorableProducer,
    Tag,
)

GROUPS = (Group(0, GroupKind.FULL, 2, None, ()), Group(1, GroupKind.SLIDING, 2, 2, ()))
SHAPES = (UnitShape(2, 1, 1), UnitShape(2, 1, 1))
PROMPT_TOKENS = 4
FOR_EVER = 1e9
TARGETS = {(0, 0): 50, (0, 1): 51, (1, 1): 60}
"""(group, position) -> the consumer's block. Only the second block of the window is needed."""

EXPECT = ("expect", "r", "t", PROMPT_TOKENS, "prompt")
HELD = ("finished", "r", True, "")


def sources(attempt: int) -> dict[tuple[int, int], int]:
    """(group, position) -> the producer's block; a preempted request gets other blocks."""
    return {key: 1 + 4 * attempt + number for number, key in enumerate([(0, 0), (0, 1), (1, 0), (1, 1)])}


def new_ids(attempt: int, position: int) -> tuple[tuple[int, ...], ...]:
    return tuple((sources(attempt)[group, position],) for group in (0, 1))


def filled(attempt: int, chunks: int, layers: int = LAYERS) -> dict[Cell, Tag]:
    """Return a rank's memory after this number of chunks, the last one up to ``layers``."""
    return {
        (block, layer): ("prompt", group, position)
        for (group, position), block in sources(attempt).items()
        for layer in range(LAYERS)
        if position + 1 < chunks or (position + 1 == chunks and layer < layers)
    }


def chunk(attempt: int, number: int) -> tuple[object, ...]:
    return ("progress", "r", new_ids(attempt, number - 1), 2 * number)


Legs = tuple[tuple[tuple[Any, ...], dict[Cell, Tag]], ...]

PLAIN: Legs = (
    (EXPECT, {}),
    (chunk(0, 1), filled(0, 1)),
    (chunk(0, 2), filled(0, 2)),
    (HELD, filled(0, 2)),
)
PREEMPTED: Legs = (
    (EXPECT, {}),
    (chunk(0, 1), filled(0, 1)),
    (("preempted", "r"), filled(0, 1)),
    (("fenced", "r"), {}),
    (chunk(1, 1), filled(1, 1)),
    (chunk(1, 2), filled(1, 2)),
    (HELD, filled(1, 2)),
)
STARTS = ("starting", "r")
LAYER_WISE: Legs = (
    (EXPECT, {}),
    (chunk(0, 1), filled(0, 1)),
    (("begin", "r", new_ids(0, 1), 4), filled(0, 1)),
    (("layers_computed", ("r",), 0, 1), filled(0, 2, 1)),
    (("layers_computed", ("r",), 1, 1), filled(0, 2, 1)),
    (("progress", "r", ((), ()), 4), filled(0, 2)),
    (HELD, filled(0, 2)),
)


def limits(**deadlines: float) -> TransferLimits:
    """Every deadline is one jump of a clock long, unless stated otherwise."""
    one = {"handshake_s": 1, "progress_s": 1, "cancel_s": 1, "lease_s": 1, "alive_s": 0.5, "forget_s": FOR_EVER}
    return TransferLimits(**(one | deadlines))


NEVER = -1


class Budget(NamedTuple):
    """Faults that may still happen.

    ``early``     jumps of clocks, NEVER for any number of them
    ``fail``      a write is reported as failed, and may arrive later
    ``unposted``  a write is reported as failed after a part of it, or nothing, has arrived
    ``unsent``    the transport refuses a message of a decode rank, and reports it
    ``cut``       the prefill request was aborted after this number of orders
    """

    drop: int = 0
    double: int = 0
    crash_prefill: int = 0
    crash_decode: int = 0
    abort: int = 0
    leave: int = 0
    discard: int = 0
    fail: int = 0
    unposted: int = 0
    hang: int = 0
    refuse: int = 0
    unsent: int = 0
    early: int = NEVER
    cut: int = NEVER
    freed: bool = False


@dataclass(frozen=True)
class Scenario:
    """One exploration.

    ``budget`` has the possible faults, ``legs`` the prefill scheduler's orders. ``queued``:
    decode's request allocates its blocks when the prompt is about to start.
    """

    name: str
    producer_tp: int
    consumer_tp: int
    budget: Budget
    legs: tuple[tuple[tuple[Any, ...], dict[Cell, Tag]], ...] = PLAIN
    integrity: bool = False
    handshake: bool = False
    words_to_prefill: bool = False
    queued: bool = False
    deadlines: dict[str, float] = field(default_factory=dict)

    @property
    def orders(self) -> list[tuple[Any, ...]]:
        return [order for order, _ in self.legs]

    @property
    def memories(self) -> list[dict[Cell, Tag]]:
        """Return a rank's memory after 0, 1, ... orders."""
        return [{}, *(memory for _, memory in self.legs)]

    @property
    def wanted(self) -> dict[Cell, Tag]:
        return {
            (block, layer): ("prompt", group, position)
            for (group, position), block in TARGETS.items()
            for layer in range(LAYERS)
        }

    @cached_property
    def partners(self) -> tuple[Partner, ...]:
        new_digest = CellDigest if self.integrity else None
        return tuple(
            Partner(Peer(ENGINE.incarnation, p), SHAPES, UNIT_BYTES, new_digest) for p in range(self.producer_tp)
        )

    def peer(self, rank: int) -> Peer:
        return Peer(DECODE, rank)

    @cached_property
    def order(self) -> Order:
        blocks = [
            BlockSet(
                np.array([p for g, p in TARGETS if g == group]),
                np.array([i for (g, _), i in TARGETS.items() if g == group]),
            )
            for group in (0, 1)
        ]
        return _HashableOrder("d", "t", ENGINE, PROMPT_TOKENS, "prompt", tuple(blocks))

    def producer(self) -> ExplorableProducer:
        """Writes hang only in these scenarios: elsewhere no deadline distinguishes a slow one
        from another.
        """
        hang = {} if self.budget.hang else {"progress_s": FOR_EVER}
        machine = ExplorableProducer(GROUPS, limits(**(self.deadlines | hang)))
        ranks = frozenset(range(self.consumer_tp))
        for rank in range(self.consumer_tp):
            machine.welcome(self.peer(rank), delivery.ConsumerPeer(ranks, 100, SHAPES, CellDigest), 0.0)
        return machine

    def consumer(self) -> ExplorableConsumer:
        machine = ExplorableConsumer(GROUPS, limits(**self.deadlines))
        if not self.handshake:
            machine.connected(ENGINE.incarnation, self.partners, 0.0)
        return machine


class _HashableOrder(Order):
    """Orders are arguments of events, which need a hash."""

    __slots__ = ()

    def __hash__(self) -> int:
        return hash(self.request_id)

    def __eq__(self, other: object) -> bool:
        return self is other
