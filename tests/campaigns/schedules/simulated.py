"""Parts of the simulated world: shapes and deadlines, faults, block pools, ranks, engines,
requests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from connectors.planning.blocks import UnitShape
from connectors.planning.descriptors import Moves
from connectors.planning.layout import Group, GroupKind
from connectors.protocol.consumer import Consumer
from connectors.protocol.limits import TransferLimits
from connectors.protocol.params import EngineAddress
from connectors.protocol.producer import Producer
from connectors.protocol.reception import Order
from connectors.protocol.wire import Peer

GROUPS = (
    Group(0, GroupKind.FULL, 4, None, ()),
    Group(1, GroupKind.SLIDING, 4, 7, ()),
    Group(2, GroupKind.SLIDING, 2, 4, ()),
)
SHAPES = tuple(UnitShape(group.block_tokens, 1, 1) for group in GROUPS)
LAYERS = 2
HEAD_BYTES = (16, 8, 4)
"""Units of one head of one block, all layers together."""
LIMITS = TransferLimits(handshake_s=2, progress_s=3, cancel_s=1, lease_s=5, alive_s=1, fence_s=0.5, forget_s=9)
TICK_S = 0.5
POOL = 400
STRANGER = ("somebody else's",)
DAMAGED = ("damaged",)
VERIFY_S = 0.3
LATE_S = 3 * LIMITS.lease_s
"""Time after the report of a failed write in which parts of it may arrive."""
HANG_S = 3 * LIMITS.hang_s
"""A hanging write ends after this time at most: its peer has died, or continues."""

Tag = tuple[object, ...]


class Violation(AssertionError):
    """A promise was broken."""


@dataclass(frozen=True)
class Weather:
    """Faults of the network and the transport until ``clears_at``; then messages are only
    delayed.
    """

    drop: float = 0.0
    double: float = 0.0
    delay_s: float = 0.05
    write_s: float = 0.2
    write_fails: float = 0.0
    unposted: float = 0.0
    refuses: float = 0.0
    damages: float = 0.0
    hangs: float = 0.0
    unsent: float = 0.0
    drops_peers: float = 0.0
    clears_at: float = 0.0


@dataclass
class Pool:
    """Block ids of one engine; the last one freed is allocated first."""

    free: list[int] = field(default_factory=lambda: list(range(POOL - 1, 0, -1)))

    def take(self, count: int) -> list[int]:
        return [self.free.pop() for _ in range(count)]

    def give(self, ids: list[int]) -> None:
        self.free.extend(ids)


@dataclass
class ProducerRank:
    """``plans``: the owner's record of consumer workers."""

    peer: Peer
    machine: Producer
    alive: bool = True
    memory: dict[tuple[int, int], Tag] = field(default_factory=dict)
    plans: set[Peer] = field(default_factory=set)


@dataclass
class ConsumerRank:
    peer: Peer
    machine: Consumer
    alive: bool = True
    verifying_until: float = 0.0
    memory: dict[tuple[int, int, int], Tag] = field(default_factory=dict)
    owner: dict[int, str] = field(default_factory=dict)
    connecting: set[str] = field(default_factory=set)
    plans: set[Peer] = field(default_factory=set)


@dataclass
class PrefillEngine:
    """One start of the prefill engine.

    ``held``: blocks of finished requests that not all ranks have sent.
    """

    address: EngineAddress
    ranks: list[ProducerRank]
    pool: Pool = field(default_factory=Pool)
    held: dict[str, list[int]] = field(default_factory=dict)
    sent: dict[str, Counter[int]] = field(default_factory=dict)

    @property
    def alive(self) -> bool:
        return all(rank.alive for rank in self.ranks)


@dataclass
class DecodeEngine:
    """One start of the decode engine."""

    ranks: list[ConsumerRank]
    pool: Pool = field(default_factory=Pool)

    @property
    def alive(self) -> bool:
        return all(rank.alive for rank in self.ranks)


@dataclass
class Consumption:
    """A decode request: its needs, and each rank's reports.

    ``quarantine``: ranks whose blocks may still be written to; ``failed_writes``: ranks with a
    failed write to them; ``freed_at``: time at which the pool had all blocks again.
    """

    request_id: str
    transfer_id: str
    prompt: str
    prompt_tokens: int
    started_at: float
    blocks: list[int]
    order: Order
    engine: DecodeEngine
    results: dict[int, str | None] = field(default_factory=dict)
    quarantine: set[int] = field(default_factory=set)
    failed_writes: set[int] = field(default_factory=set)
    ended_at: float = 0.0
    freed_at: float = 0.0


@dataclass
class Queued:
    """A decode request without blocks; ``bind`` gives it some once it is ``due``."""

    request_id: str
    transfer_id: str
    producer: EngineAddress
    engine: DecodeEngine
    bind: Callable[[], None]
    due: bool = False


def layers_of(move: Moves) -> range:
    first, stop = move.layers or (0, LAYERS)
    return range(first, min(stop, LAYERS))
