"""Records of a consumer's machine: orders, the producer workers that fill them, and receptions in progress."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from connectors.planning.blocks import BlockSet, UnitSet, UnitShape, wanted_units
from connectors.planning.layout import Group
from connectors.protocol.actions import Digest
from connectors.protocol.agent_metadata import NO_PROCESS, ProcessIdentity
from connectors.protocol.params import EngineAddress
from connectors.protocol.wire import Peer


@dataclass(frozen=True, slots=True)
class Order:
    """Blocks that one request needs: ``groups[g]`` of group g, filled so that it resumes at ``end_token``."""

    request_id: str
    transfer_id: str
    producer: EngineAddress
    end_token: int
    prompt_digest: str
    groups: tuple[BlockSet, ...]


@dataclass(slots=True)
class QueuedRequest:
    """A request without blocks, whose prompt its producer has not started.

    ``asked`` is the producer worker that will report the start, None before the handshake; ``heard_at`` is when it was
    last heard, or the time of arrival.
    """

    request_id: str
    producer: EngineAddress
    heard_at: float
    asked: Peer | None = None


@dataclass(frozen=True, slots=True)
class Partner:
    """One producer rank that talks to this worker; ``unit_bytes[g]`` is what it sends for a unit of group g.

    ``new_digest`` makes the digest of one transfer from it, over our memory; None where none is to be asked for.
    ``met_at`` is where its engine was met, None where nobody shook hands. A request may name the engine with another
    address, and who answers there, or nobody, says nothing about this one. ``process`` is the one that writes, and
    ``was_seen`` whether this worker's own kernel had it then.
    """

    peer: Peer
    shapes: tuple[UnitShape, ...]
    unit_bytes: tuple[int, ...]
    new_digest: Callable[[], Digest] | None = None
    met_at: EngineAddress | None = None
    process: ProcessIdentity = NO_PROCESS
    was_seen: bool = False


@dataclass(frozen=True, slots=True)
class Suspect:
    """A producer worker that keeps blocks in quarantine: is its process dead? As in its ``Partner``."""

    peer: Peer
    process: ProcessIdentity
    was_seen: bool
    met_at: EngineAddress | None


class ReceptionStage(Enum):
    """Stage of a reception; the value is its key in ``census``."""

    CONNECTING = "connecting"
    OFFERED = "offered"
    ENDING = "ending"
    QUARANTINE = "quarantined"


GIVEN_UP = (ReceptionStage.ENDING, ReceptionStage.QUARANTINE)


@dataclass(slots=True)
class Reception:
    order: Order
    stage: ReceptionStage
    since: float
    number: int = 0
    writing: dict[Peer, Partner] = field(default_factory=dict)
    heard_at: dict[Peer, float] = field(default_factory=dict)
    verifying: set[Peer] = field(default_factory=set)
    failure: str | None = None
    cancelled_at: float = 0.0
    check_at: float = float("-inf")


def units_from(partner: Partner, groups: Sequence[Group], order: Order) -> tuple[UnitSet, ...]:
    """Return the units that a partner must write for an order, by group."""
    return tuple(
        wanted_units(group, blocks, shape, order.end_token)
        for group, blocks, shape in zip(groups, order.groups, partner.shapes, strict=True)
    )


def expected_bytes(groups: Sequence[Group], order: Order, partner: Partner) -> int:
    """Return the number of bytes that a partner must report in Fin for an order."""
    units = units_from(partner, groups, order)
    return sum(len(each) * size for each, size in zip(units, partner.unit_bytes, strict=True))
