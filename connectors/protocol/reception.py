"""Requests of a consumer: queued without blocks, and receptions with them. For ``consumer.py``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from connectors.planning.blocks import BlockSet, UnitSet, offered_units
from connectors.planning.layout import Group
from connectors.protocol.actions import Connect, ConsumerAction, Digest, Due, Send, Verify
from connectors.protocol.engines import Partner, ProducerEngines
from connectors.protocol.limits import TransferLimits
from connectors.protocol.params import EngineAddress
from connectors.protocol.wire import Aborted, Alive, AwaitStart, Cancelled, Failed, Fin, Peer, Starting

Answer = Starting | Fin | Aborted | Failed | Cancelled | Alive
"""A message about one transfer from one of its producer ranks."""


@dataclass(frozen=True, slots=True)
class Order:
    """KV that one request needs on this rank from ``producer``; see ``Offer`` for other fields."""

    request_id: str
    transfer_id: str
    producer: EngineAddress
    end_token: int
    prompt_digest: str
    groups: tuple[BlockSet, ...]


@dataclass(slots=True)
class QueuedRequest:
    """A request without blocks, whose prompt the producer has not reported as starting.

    ``heard_at``  time of the last message from ``asked``, else of AwaitStart, else of the request's
                  arrival; in seconds
    ``asked``     producer worker to which AwaitStart was sent; None before the handshake
    """

    request_id: str
    producer: EngineAddress
    heard_at: float
    asked: Peer | None = None


class RequestQueue:
    """Requests without blocks, by transfer id. A wait ends with ``Due``, or by removal."""

    def __init__(self, engines: ProducerEngines, limits: TransferLimits) -> None:
        self._engines = engines
        self._limits = limits
        self.requests: dict[str, QueuedRequest] = {}

    def add(self, request_id: str, transfer_id: str, producer: EngineAddress, now: float) -> list[ConsumerAction]:
        """Return the request's AwaitStart, or a Connect if a handshake is needed first."""
        self._engines.touch(producer.incarnation, now)
        queued = self.requests[transfer_id] = QueuedRequest(request_id, producer, now)
        partners = self._engines.reachable(producer.incarnation)
        return [Connect(producer)] if partners is None else [self._ask(transfer_id, queued, partners, now)]

    def remove(self, transfer_id: str, request_id: str | None = None) -> None:
        """Remove a request, or any of this transfer."""
        queued = self.requests.get(transfer_id)
        if queued is not None and request_id in (None, queued.request_id):
            del self.requests[transfer_id]

    def connected(self, incarnation: str, partners: Sequence[Partner], now: float) -> list[Send]:
        waiting = [item for item in self._of_engine(incarnation) if item[1].asked is None]
        return [self._ask(transfer_id, queued, partners, now) for transfer_id, queued in waiting]

    def connect_failed(self, incarnation: str, reason: str) -> list[Due]:
        """No AwaitStart was sent, so no Cancel is."""
        waiting = [item for item in self._of_engine(incarnation) if item[1].asked is None]
        return [self._end(transfer_id, reason) for transfer_id, _ in waiting]

    def engine_lost(self, incarnation: str, reason: str) -> list[Due]:
        return [self._end(transfer_id, reason) for transfer_id, _ in self._of_engine(incarnation)]

    def worker_lost(self, peer: Peer, reason: str, now: float) -> list[ConsumerAction]:
        actions: list[ConsumerAction] = []
        for transfer_id, queued in self._of_engine(peer.incarnation):
            if queued.asked == peer:
                actions += self._fail(transfer_id, f"prefill rank {peer.rank}: {reason}", now)
        return actions

    def undelivered(self, peer: Peer, message: AwaitStart, now: float) -> list[ConsumerAction]:
        if message.transfer_id not in self.requests:
            return []
        return self._fail(message.transfer_id, f"rank {peer.rank} of the prefill engine is unreachable", now)

    def message(self, peer: Peer, message: Answer, now: float) -> list[ConsumerAction]:
        """Ignores ranks other than ``asked``."""
        queued = self.requests[message.transfer_id]
        if queued.asked != peer:
            return []
        match message:
            case Starting(transfer_id):
                return [self._end(transfer_id, None)]
            case Aborted(transfer_id, reason) | Failed(transfer_id, reason):
                return self._fail(transfer_id, reason, now)
            case Alive():
                queued.heard_at = now
        return []

    def tick(self, now: float) -> list[ConsumerAction]:
        actions: list[ConsumerAction] = []
        for transfer_id, queued in list(self.requests.items()):
            silence_s = self._limits.silence_s(connecting=queued.asked is None)
            if now - queued.heard_at >= silence_s:
                reason = f"the prefill engine sent no message about the queued transfer for {silence_s:g} s"
                actions += self._fail(transfer_id, reason, now)
        return actions

    def uses(self, incarnation: str) -> bool:
        return any(queued.producer.incarnation == incarnation for queued in self.requests.values())

    def _of_engine(self, incarnation: str) -> list[tuple[str, QueuedRequest]]:
        return [item for item in self.requests.items() if item[1].producer.incarnation == incarnation]

    def _ask(self, transfer_id: str, queued: QueuedRequest, partners: Sequence[Partner], now: float) -> Send:
        """One rank suffices: a prompt starts on all producer ranks at once."""
        queued.asked, queued.heard_at = partners[0].peer, now
        return Send(queued.asked, AwaitStart(transfer_id, self._engines.next_number()))

    def _end(self, transfer_id: str, failure: str | None, cancelled: bool = False) -> Due:
        return Due(self.requests.pop(transfer_id).request_id, transfer_id, failure, cancelled)

    def _fail(self, transfer_id: str, reason: str, now: float) -> list[ConsumerAction]:
        """End the request's wait and the producer's lease; this engine then computes the prompt."""
        incarnation = self.requests[transfer_id].producer.incarnation
        return [self._end(transfer_id, reason, cancelled=True), *self._engines.release(transfer_id, incarnation, now)]


class ReceptionStage(Enum):
    """The value is the stage's name in ``counts``."""

    CONNECTING = "connecting"
    OFFERED = "offered"
    ENDING = "ending"
    QUARANTINE = "quarantined"


GIVEN_UP = (ReceptionStage.ENDING, ReceptionStage.QUARANTINE)


@dataclass(slots=True)
class Reception:
    """One request with blocks, from ``start`` until its blocks are safe: no partner may write to
    them. The consumer also waits for verifications, at most ``hang_s`` after ``verifying_since``: a
    verification reads the blocks, and would mean nothing once they belong to another request. Times
    are in seconds.

    ``writing``          partners that may still write
    ``heard_at``         time of each partner's last Alive or Starting, else of the Offer
    ``digests``          digest of each partner's bytes from its first Verify on, its units, and how
                         many of each group are in a Verify
    ``verifying``        partners whose bytes are being hashed, once for each Verify
    ``check_at``         time before which no deadline passes
    """

    order: Order
    stage: ReceptionStage
    since: float
    number: int = 0
    writing: dict[Peer, Partner] = field(default_factory=dict)
    heard_at: dict[Peer, float] = field(default_factory=dict)
    digests: dict[Peer, tuple[Digest, tuple[UnitSet, ...], list[int]]] = field(default_factory=dict)
    verifying: list[Peer] = field(default_factory=list)
    verifying_since: float = 0.0
    failure: str | None = None
    ending_since: float = 0.0
    cancelled_at: float = 0.0
    check_at: float = float("-inf")

    def verify(
        self, partner: Partner, groups: Sequence[Group], now: float, left: Sequence[int], expected: str = ""
    ) -> list[Verify]:
        """Return a Verify of the units that have arrived since the last one.

        ``left``      units of each group that have not arrived
        ``expected``  digest in Fin; without it, nothing follows if no unit has arrived
        """
        if partner.new_digest is None or len(left) != len(groups):
            return []
        if partner.peer not in self.digests:
            units = tuple(offered_units(groups, self.order.groups, partner.shapes, self.order.end_token))
            self.digests[partner.peer] = (partner.new_digest(), units, [0] * len(units))
        digest, units, done = self.digests[partner.peer]
        stops = [max(first, len(each) - n) for first, each, n in zip(done, units, left, strict=True)]
        if stops == done and not expected:
            return []
        new = tuple(each.where(slice(*ends)) for each, *ends in zip(units, done, stops, strict=True))
        done[:] = stops
        self.verifying.append(partner.peer)
        self.verifying_since = now
        return [Verify(self.order.transfer_id, partner.peer, new, digest, expected)]

    def silent_since(self, now: float) -> float:
        """``heard_at`` of the most silent partner that may write; before the Offer, ``since``."""
        if self.stage is ReceptionStage.CONNECTING:
            return self.since
        return min((self.heard_at[peer] for peer in self.writing), default=now)


def expected_bytes(groups: Sequence[Group], order: Order, partner: Partner) -> int:
    units = offered_units(groups, order.groups, partner.shapes, order.end_token)
    return sum(len(each) * size for each, size in zip(units, partner.unit_bytes, strict=True))
