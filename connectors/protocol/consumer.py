"""The consumer's side of every transfer of one worker. Sans-I/O: events and ``now`` in, actions out.

    reception    on                          becomes
    ------------------------------------------------------------------------------------------------
    (none)       queue                       queued      the request has no blocks: AwaitStart to one partner, after
                                                         a handshake where there was none
    queued       Starting                    (none)      Due(ok): the request can allocate its blocks, then start
    queued       Aborted, Failed, no
                 handshake, progress_s
                 without a message           (none)      Due(failed): nothing was allocated; Cancel to all partners
    (none)       start                       CONNECTING  Connect: shake hands with the producer engine
    (none)       start, id used within       gone        Received(failed): an id is for one request
                 lease_s
    CONNECTING   connected                   OFFERED     an Offer to every partner rank
    CONNECTING   connect_failed, progress_s  gone        Received(failed): nobody has seen our blocks
    OFFERED      Fin, count right            OFFERED     Verify, where a digest was asked for
    OFFERED      all verified                gone        Received(ok)
    OFFERED      an Offer cannot be sent     ENDING      that partner never may write; Cancel to the others; the next
                                                         request of this engine shakes hands again
    OFFERED      Aborted, wrong count, wrong
                 digest, abort, progress_s
                 without a word of one       ENDING      Cancel to every partner that may still write
    OFFERED      Failed                      QUARANTINE  Received(failed, quarantine); Cancel to every partner that may
                                                         still write
    ENDING       last partner answers        gone        Received(failed)
    ENDING       Failed                      QUARANTINE  Received(failed, quarantine)
    ENDING       cancel_s                    QUARANTINE  Received(failed, quarantine): the request is computed in other
                                                         blocks; then as every cancel_s from here on
    ENDING       connected                   ENDING      Cancel again
    QUARANTINE   cancel_s                    QUARANTINE  Cancel again, and Connect: a producer may have forgotten us
    QUARANTINE   connected                   QUARANTINE  Cancel again
    QUARANTINE   last partner answers        gone        Freed
    (none)       start, when another of the  CONNECTING  as for a stranger: nothing is offered before the engine has
                 engine's has come into                  shaken hands again
                 QUARANTINE

A partner *may still write* from the moment an Offer was sent to it until its Fin, Aborted or Cancelled has come, or
until it is known to be dead. Failed is no such answer: parts of a write may still arrive. ``Received`` without
quarantine and ``Freed`` give the blocks back to the scheduler, so they are sent only when no partner may still write
and nothing is being verified: time alone ends the request's wait, never its blocks'. Whatever arrives for a transfer
that is gone is ignored. An engine that nothing has been wanted of for forget_s / 2 is forgotten, as is a dead one:
Forget, for each of its ranks.

    worker_lost  a producer rank is known to be dead: it may write no more
    engine_lost  the producer is known to be dead: none of its ranks may write any more
    release      a request that needs nothing from its producer: Cancel to every partner, so that its lease ends early
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from connectors.planning.layout import Group
from connectors.protocol.actions import Connect, ConsumerAction, Due, Forget, Freed, Received, Send, Verify
from connectors.protocol.limits import TransferLimits
from connectors.protocol.ordered import due
from connectors.protocol.params import EngineAddress
from connectors.protocol.reception import (
    GIVEN_UP,
    Order,
    Partner,
    QueuedRequest,
    Reception,
    ReceptionStage,
    Suspect,
    expected_bytes,
    units_from,
)
from connectors.protocol.wire import (
    Aborted,
    Alive,
    AwaitStart,
    Cancel,
    Cancelled,
    Failed,
    Fin,
    Message,
    Offer,
    Peer,
    Starting,
)

_USED_TWICE = "another request has this transfer; an id is for one request"


@dataclass(frozen=True, slots=True)
class ConsumerSnapshot:
    """State of a consumer machine at one moment; a copy.

    ``queued``       ids of the transfers whose requests wait for their prompts' start
    ``receptions``   ids of the requests that wait for KV, with the value of their stage
    ``quarantined``  ids of the transfers whose blocks are in quarantine
    ``partners``     known producer workers, by engine incarnation
    ``used``         ids of transfers that are under way or remembered
    """

    queued: frozenset[str]
    receptions: Mapping[str, str]
    quarantined: frozenset[str]
    partners: Mapping[str, tuple[Peer, ...]]
    used: frozenset[str]


class Consumer:
    """All transfers that one worker consumes. Not thread-safe; its owner serialises calls."""

    def __init__(self, groups: Sequence[Group], limits: TransferLimits) -> None:
        self._groups = tuple(groups)
        self._limits = limits
        # By transfer.
        self._queued: dict[str, QueuedRequest] = {}
        # Of requests that wait, by request; of those that do not, by transfer: a request's id may come again.
        self._receptions: dict[str, Reception] = {}
        self._quarantine: dict[str, Reception] = {}
        self._by_transfer: dict[str, Reception] = {}
        self._partners: dict[str, tuple[Partner, ...]] = {}
        self._doubtful: set[str] = set()
        # In the order in which they are forgotten: engines, and ids of transfers that are over.
        self._wanted_at: dict[str, float] = {}
        self._releases: dict[str, list[tuple[str, float]]] = {}
        self._used: dict[str, float] = {}
        self._last_number = 0

    def queue(self, request_id: str, transfer_id: str, producer: EngineAddress, now: float) -> list[ConsumerAction]:
        """A request has come that takes its blocks when its prompt starts.

        ``Due`` follows, unless ``start`` or ``release`` comes first.
        """
        if transfer_id in self._used or transfer_id in self._by_transfer or transfer_id in self._queued:
            return [Due(request_id, transfer_id, _USED_TWICE)]
        self._want(producer.incarnation, now)
        self._queued[transfer_id] = QueuedRequest(request_id, producer, now)
        partners = self._reachable(producer.incarnation)
        return [Connect(producer)] if partners is None else self._await_start(transfer_id, partners, now)

    def start(self, order: Order, now: float) -> list[ConsumerAction]:
        """A request's blocks are allocated; fetch their contents.

        Where another request receives this transfer or has (n > 1 copies its parameters), this one fails at once: a
        Fin names the transfer only, and one that comes late would be taken for this request's.
        """
        queued = self._queued.get(order.transfer_id)
        if queued is not None and queued.request_id == order.request_id:
            del self._queued[order.transfer_id]
        elif order.transfer_id in self._used or order.transfer_id in self._by_transfer or queued is not None:
            return [Received(order.request_id, _USED_TWICE)]
        self._want(order.producer.incarnation, now)
        reception = self._receptions[order.request_id] = Reception(order, ReceptionStage.CONNECTING, now)
        self._by_transfer[order.transfer_id] = reception
        partners = self._reachable(order.producer.incarnation)
        return [Connect(order.producer)] if partners is None else self._offer(reception, partners, now)

    def release(self, transfer_id: str, producer: EngineAddress, now: float) -> list[ConsumerAction]:
        """A request wants nothing of this transfer (any more) and holds no blocks for it."""
        self._queued.pop(transfer_id, None)
        partners = self._reachable(producer.incarnation)
        self._want(producer.incarnation, now)
        if partners is None:
            self._releases.setdefault(producer.incarnation, []).append((transfer_id, now))
            return [Connect(producer)]
        return self._release(transfer_id, partners)

    def abort(self, request_id: str, now: float) -> list[ConsumerAction]:
        """The request has been aborted; its blocks are freed once ``Received`` or ``Freed`` says so."""
        reception = self._receptions.get(request_id)
        if reception is None:
            return []
        return self._fail(reception, "the request was aborted", now)

    def connected(self, incarnation: str, partners: Sequence[Partner], now: float) -> list[ConsumerAction]:
        """The handshake with an engine start has succeeded; ``partners`` are its ranks that talk to this worker."""
        self._partners[incarnation] = tuple(partners)
        self._doubtful.discard(incarnation)
        self._want(incarnation, now)
        actions: list[ConsumerAction] = []
        for transfer_id, queued in self._queued_at(incarnation):
            if queued.asked is None:
                actions += self._await_start(transfer_id, self._partners[incarnation], now)
        for reception in self._of_engine(incarnation):
            if reception.stage is ReceptionStage.CONNECTING:
                actions += self._offer(reception, self._partners[incarnation], now)
            elif reception.stage in GIVEN_UP and reception.writing:
                actions += self._cancel(reception, now)
        for transfer_id, _ in self._releases.pop(incarnation, []):
            actions += self._release(transfer_id, partners)
        return actions

    def connect_failed(self, incarnation: str, reason: str, now: float) -> list[ConsumerAction]:
        """The handshake failed. The next request for this engine start tries again."""
        actions: list[ConsumerAction] = []
        for transfer_id, queued in self._queued_at(incarnation):
            if queued.asked is None:
                del self._queued[transfer_id]
                actions.append(Due(queued.request_id, transfer_id, reason))
        for reception in self._of_engine(incarnation):
            if reception.stage is ReceptionStage.CONNECTING:
                actions += self._fail(reception, reason, now)
        self._releases.pop(incarnation, None)
        return actions

    def engine_lost(self, incarnation: str, reason: str, now: float) -> list[ConsumerAction]:
        """The producer engine is known to be dead: none of its workers writes any more."""
        actions = self.connect_failed(incarnation, reason, now)
        for transfer_id, queued in self._queued_at(incarnation):
            del self._queued[transfer_id]
            actions.append(Due(queued.request_id, transfer_id, reason))
        for reception in self._of_engine(incarnation):
            if reception.writing:
                reception.writing.clear()
                actions += self._fail(reception, reason, now)
        return actions + self._forget(incarnation)

    def worker_lost(self, peer: Peer, reason: str, now: float) -> list[ConsumerAction]:
        """One worker of a producer engine is known to be dead: it writes no more. The others may."""
        if peer.incarnation in self._partners:
            self._doubtful.add(peer.incarnation)
        actions: list[ConsumerAction] = []
        for transfer_id, queued in self._queued_at(peer.incarnation):
            if queued.asked == peer:
                actions += self._will_not_start(transfer_id, f"rank {peer.rank}: {reason}", now)
        for reception in self._of_engine(peer.incarnation):
            if reception.writing.pop(peer, None) is not None:
                actions += self._fail(reception, f"rank {peer.rank}: {reason}", now)
        return actions

    def awaits(self, peer: Peer) -> bool:
        """Whether ``peer`` may still write, its writes are being verified, or a handshake with its engine is wanted."""
        if peer.incarnation in self._releases or self._queued_at(peer.incarnation):
            return True
        return any(
            peer in reception.writing
            or peer in reception.verifying
            or (
                reception.stage is ReceptionStage.CONNECTING
                and reception.order.producer.incarnation == peer.incarnation
            )
            for reception in self._all()
        )

    def forget(self, incarnation: str) -> list[Forget]:
        """The owner has dropped one of the engine's workers: its next request begins with a handshake.

        Its other ranks are forgotten too, unless requests still wait for them.
        """
        if self._of_engine(incarnation) or self._queued_at(incarnation):
            self._doubtful.add(incarnation)
            return []
        return self._forget(incarnation)

    def message(self, peer: Peer, message: Message, now: float) -> list[ConsumerAction]:
        """A message of a producer worker."""
        if not isinstance(message, Starting | Fin | Aborted | Failed | Cancelled | Alive):
            return []
        queued = self._queued.get(message.transfer_id)
        if queued is not None and queued.asked == peer:
            return self._heard_of_queue(queued, message, now)
        reception = self._by_transfer.get(message.transfer_id)
        partner = reception.writing.get(peer) if reception is not None else None
        if reception is None or partner is None:
            return []
        if isinstance(message, Alive | Starting):
            # A prefill rank repeats Starting until it has the offer.
            reception.heard_at[peer] = now
            return []
        if isinstance(message, Failed):
            return self._write_failed(reception, f"rank {peer.rank}: {message.reason}", now)
        del reception.writing[peer]
        return self._answered(reception, partner, message, now)

    def verified(self, transfer_id: str, peer: Peer, problem: str | None, now: float) -> list[ConsumerAction]:
        """What ``peer`` has written has been compared with its digest; ``problem`` says what is wrong."""
        reception = self._by_transfer[transfer_id]
        reception.verifying.remove(peer)
        if problem is not None:
            return self._fail(reception, f"rank {peer.rank}: {problem}", now)
        return self._end_if_over(reception, now)

    def undelivered(self, peer: Peer, message: Message, now: float) -> list[ConsumerAction]:
        """A message could not be sent. A partner that an Offer has not reached knows no block to write to."""
        if isinstance(message, AwaitStart | Offer | Cancel) and peer.incarnation in self._partners:
            self._doubtful.add(peer.incarnation)
        if isinstance(message, AwaitStart) and message.transfer_id in self._queued:
            reason = f"rank {peer.rank} of the prefill engine is out of reach"
            return self._will_not_start(message.transfer_id, reason, now)
        reception = self._by_transfer.get(message.transfer_id) if isinstance(message, Offer) else None
        if reception is None or reception.writing.pop(peer, None) is None:
            return []
        return self._fail(reception, f"rank {peer.rank} of the prefill engine is out of reach", now)

    def tick(self, now: float) -> list[ConsumerAction]:
        """Deadlines. Call it a few times a second."""
        actions: list[ConsumerAction] = []
        for transfer_id, queued in list(self._queued.items()):
            silence_s = self._silence_s(queued.asked is None)
            if now - queued.heard_at >= silence_s:
                reason = f"nothing was heard of the queued transfer for {silence_s:g} s"
                actions += self._will_not_start(transfer_id, reason, now)
        for reception in list(self._all()):
            if now >= reception.check_at:
                actions += self._check(reception, now)
        for transfer_id in due(self._used, lambda at: now - at >= self._limits.lease_s):
            del self._used[transfer_id]
        for incarnation, waiting in list(self._releases.items()):
            self._releases[incarnation] = [item for item in waiting if now - item[1] < self._limits.lease_s]
            if not self._releases[incarnation]:
                del self._releases[incarnation]
        unused = due(self._wanted_at, lambda at: now - at >= self._limits.forget_s / 2)
        wanted = {address.incarnation for address in self._producers()} if unused else set()
        for incarnation in unused:
            if incarnation not in wanted:
                actions += self._forget(incarnation)
        return actions

    def knows(self, peer: Peer) -> bool:
        return any(partner.peer == peer for partner in self._partners.get(peer.incarnation, ()))

    def suspects(self) -> set[Suspect]:
        """Workers that keep blocks in quarantine: they have left a Cancel unanswered, or a write of theirs failed."""
        return {
            Suspect(each.peer, each.process, each.was_seen, each.met_at)
            for reception in self._quarantine.values()
            for each in reception.writing.values()
        }

    def addresses(self) -> set[EngineAddress]:
        """Where the known producer engines were met."""
        return {each.met_at for known in self._partners.values() for each in known if each.met_at is not None}

    def engines(self) -> set[str]:
        """Every engine start that this worker has met or that a request waits for."""
        return {*self._partners, *self._releases, *(address.incarnation for address in self._producers())}

    def census(self) -> dict[str, int]:
        """Queued requests, and receptions by stage."""
        counts = {"queued": len(self._queued)} | {stage.value: 0 for stage in ReceptionStage}
        for reception in self._all():
            counts[reception.stage.value] += 1
        return counts

    @property
    def busy(self) -> bool:
        """Whether a request is queued or a transfer is under way, in quarantine included."""
        return bool(self._queued or self._by_transfer)

    @property
    def quarantined(self) -> int:
        """Number of transfers whose blocks are in quarantine."""
        return len(self._quarantine)

    def snapshot(self) -> ConsumerSnapshot:
        """Return a copy of the state, for tests and diagnosis."""
        return ConsumerSnapshot(
            queued=frozenset(self._queued),
            receptions={request_id: reception.stage.value for request_id, reception in self._receptions.items()},
            quarantined=frozenset(self._quarantine),
            partners={name: tuple(each.peer for each in known) for name, known in self._partners.items()},
            used=frozenset((*self._by_transfer, *self._used)),
        )

    # ---- inside ------------------------------------------------------------------------------------------------

    def _await_start(self, transfer_id: str, partners: Sequence[Partner], now: float) -> list[ConsumerAction]:
        """Ask one rank of the producer engine: its scheduler starts a prompt on all of them at once."""
        queued = self._queued[transfer_id]
        queued.asked, queued.heard_at = partners[0].peer, now
        return [Send(queued.asked, AwaitStart(transfer_id, self._next_number()))]

    def _heard_of_queue(self, queued: QueuedRequest, message: Message, now: float) -> list[ConsumerAction]:
        """A message of the rank that was asked."""
        match message:
            case Starting(transfer_id):
                del self._queued[transfer_id]
                return [Due(queued.request_id, transfer_id, None)]
            case Aborted(transfer_id, reason) | Failed(transfer_id, reason):
                return self._will_not_start(transfer_id, reason, now)
            case Alive():
                queued.heard_at = now
        return []

    def _will_not_start(self, transfer_id: str, reason: str, now: float) -> list[ConsumerAction]:
        """The request is computed here, and its producer need not hold the KV under a lease."""
        queued = self._queued.pop(transfer_id)
        actions: list[ConsumerAction] = [Due(queued.request_id, transfer_id, reason)]
        partners = self._reachable(queued.producer.incarnation)
        if partners is not None:
            return actions + self._release(transfer_id, partners)
        self._releases.setdefault(queued.producer.incarnation, []).append((transfer_id, now))
        return actions

    def _queued_at(self, incarnation: str) -> list[tuple[str, QueuedRequest]]:
        return [item for item in self._queued.items() if item[1].producer.incarnation == incarnation]

    def _producers(self) -> Iterator[EngineAddress]:
        """Engines that a request waits for."""
        yield from (queued.producer for queued in self._queued.values())
        yield from (reception.order.producer for reception in self._all())

    def _all(self) -> Iterator[Reception]:
        yield from self._receptions.values()
        yield from self._quarantine.values()

    def _check(self, reception: Reception, now: float) -> list[ConsumerAction]:
        """The deadlines of one reception, and when to look at them again: what is heard only puts them off."""
        if reception.stage in GIVEN_UP:
            reception.check_at = reception.cancelled_at + self._limits.cancel_s
            if reception.writing and now >= reception.check_at:
                return self._unanswered(reception, now)
            return []
        silence_s = self._silence_s(reception.stage is ReceptionStage.CONNECTING)
        reception.check_at = self._silent_since(reception, now) + silence_s
        if now < reception.check_at:
            return []
        return self._fail(reception, f"nothing was heard of the transfer for {silence_s:g} s", now)

    def _silence_s(self, connecting: bool) -> float:
        return max(self._limits.handshake_s, self._limits.progress_s) if connecting else self._limits.progress_s

    def _silent_since(self, reception: Reception, now: float) -> float:
        """When the one was last heard that has been silent longest, of those that owe a word: none speaks for all."""
        if reception.stage is ReceptionStage.CONNECTING:
            return reception.since
        return min((reception.heard_at[peer] for peer in reception.writing), default=now)

    def _reachable(self, incarnation: str) -> tuple[Partner, ...] | None:
        """The engine's ranks, unless it must be greeted first: it is a stranger, or was out of reach last time."""
        return None if incarnation in self._doubtful else self._partners.get(incarnation)

    def _forget(self, incarnation: str) -> list[Forget]:
        """The next request for this engine start begins with a handshake."""
        self._wanted_at.pop(incarnation, None)
        self._doubtful.discard(incarnation)
        return [Forget(partner.peer) for partner in self._partners.pop(incarnation, ())]

    def _of_engine(self, incarnation: str) -> list[Reception]:
        return [r for r in self._all() if r.order.producer.incarnation == incarnation]

    def _want(self, incarnation: str, now: float) -> None:
        self._wanted_at.pop(incarnation, None)
        self._wanted_at[incarnation] = now

    def _offer(self, reception: Reception, partners: Sequence[Partner], now: float) -> list[ConsumerAction]:
        order = reception.order
        reception.stage, reception.number = ReceptionStage.OFFERED, self._next_number()
        reception.check_at = now
        reception.writing = {partner.peer: partner for partner in partners}
        reception.heard_at = dict.fromkeys(reception.writing, now)
        offer = Offer(order.transfer_id, order.end_token, order.prompt_digest, order.groups, number=reception.number)
        return [Send(each.peer, replace(offer, digest=each.new_digest is not None)) for each in partners]

    def _release(self, transfer_id: str, partners: Sequence[Partner]) -> list[ConsumerAction]:
        number = self._next_number()
        return [Send(partner.peer, Cancel(transfer_id, number)) for partner in partners]

    def _next_number(self) -> int:
        self._last_number += 1
        return self._last_number

    def _answered(
        self, reception: Reception, partner: Partner, message: Fin | Aborted | Cancelled, now: float
    ) -> list[ConsumerAction]:
        """A partner writes no more. Is the reception over, and is what it wrote what was wanted?"""
        if isinstance(message, Fin):
            expected = expected_bytes(self._groups, reception.order, partner)
            if message.total_bytes != expected:
                failure = f"rank {partner.peer.rank} wrote {message.total_bytes} bytes where {expected} were offered"
                return self._fail(reception, failure, now)
            if partner.new_digest is not None and reception.stage is ReceptionStage.OFFERED:
                if not message.digest:
                    return self._fail(reception, f"rank {partner.peer.rank} sent no digest of what it wrote", now)
                reception.verifying.add(partner.peer)
                units = units_from(partner, self._groups, reception.order)
                transfer_id = reception.order.transfer_id
                return [Verify(transfer_id, partner.peer, units, partner.new_digest(), message.digest)]
        elif reception.stage not in GIVEN_UP:
            reason = message.reason if isinstance(message, Aborted) else "the producer has cancelled the transfer"
            return self._fail(reception, f"rank {partner.peer.rank}: {reason}", now)
        return self._end_if_over(reception, now)

    def _fail(self, reception: Reception, reason: str, now: float) -> list[ConsumerAction]:
        if reception.failure is None:
            reception.failure = reason
        if reception.stage is ReceptionStage.CONNECTING:
            # Should the handshake succeed after all, the producer need not hold its blocks until the lease ends.
            waiting = self._releases.setdefault(reception.order.producer.incarnation, [])
            waiting.append((reception.order.transfer_id, now))
        if reception.stage in GIVEN_UP or not (reception.writing or reception.verifying):
            return self._end_if_over(reception, now)
        reception.stage = ReceptionStage.ENDING
        return self._cancel(reception, now)

    def _cancel(self, reception: Reception, now: float) -> list[ConsumerAction]:
        reception.cancelled_at = reception.check_at = now
        return [Send(peer, Cancel(reception.order.transfer_id, reception.number)) for peer in reception.writing]

    def _unanswered(self, reception: Reception, now: float) -> list[ConsumerAction]:
        """cancel_s after a Cancel: the request waits no longer; whoever may still write is asked again."""
        order, met_at = reception.order, next(iter(reception.writing.values())).met_at
        actions: list[ConsumerAction] = [*self._cancel(reception, now), Connect(met_at or order.producer)]
        if reception.stage is ReceptionStage.ENDING:
            actions.append(self._keep(reception))
        return actions

    def _write_failed(self, reception: Reception, reason: str, now: float) -> list[ConsumerAction]:
        """Parts of a write may still arrive, and nothing but the producer's end will tell that they cannot."""
        actions = self._fail(reception, reason, now)
        if reception.stage is ReceptionStage.ENDING:
            actions.append(self._keep(reception))
        return actions

    def _keep(self, reception: Reception) -> Received:
        """The request waits no longer; its blocks go into quarantine."""
        order = reception.order
        reception.stage = ReceptionStage.QUARANTINE
        self._quarantine[order.transfer_id] = self._receptions.pop(order.request_id)
        # Requests that come now shake hands before they offer blocks: a second quarantine would teach us nothing.
        self._doubtful.add(order.producer.incarnation)
        return Received(order.request_id, reception.failure, quarantine=order.transfer_id)

    def _end_if_over(self, reception: Reception, now: float) -> list[ConsumerAction]:
        if reception.writing or reception.verifying:
            return []
        del self._by_transfer[reception.order.transfer_id]
        self._used[reception.order.transfer_id] = now
        if reception.stage is ReceptionStage.QUARANTINE:
            del self._quarantine[reception.order.transfer_id]
            return [Freed(reception.order.request_id, reception.order.transfer_id)]
        del self._receptions[reception.order.request_id]
        return [Received(reception.order.request_id, reception.failure)]


def failures(actions: Sequence[ConsumerAction]) -> Mapping[str, str]:
    """request id -> reason, of the receptions that some actions report as failed."""
    return {a.request_id: a.failure for a in actions if isinstance(a, Received) and a.failure is not None}
