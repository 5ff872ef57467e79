"""The consumer's side of every transfer of one worker. Sans-I/O: events and ``now`` in, actions out.

``reception.py`` has the requests and their queue, ``engines.py`` the producer engines.

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
from connectors.protocol.engines import Partner, ProducerEngines, Suspect
from connectors.protocol.limits import TransferLimits, due
from connectors.protocol.params import EngineAddress
from connectors.protocol.reception import (
    GIVEN_UP,
    Answer,
    Order,
    Reception,
    ReceptionStage,
    RequestQueue,
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
        self._engines = ProducerEngines(limits)
        self._queue = RequestQueue(self._engines, limits)
        # Of requests that wait, by request; of those that do not, by transfer: a request's id may come again.
        self._receptions: dict[str, Reception] = {}
        self._quarantine: dict[str, Reception] = {}
        self._by_transfer: dict[str, Reception] = {}
        # Ids of transfers that are over, in the order in which they are forgotten.
        self._used: dict[str, float] = {}

    def queue(self, request_id: str, transfer_id: str, producer: EngineAddress, now: float) -> list[ConsumerAction]:
        """A request has come that takes its blocks when its prompt starts.

        ``Due`` follows, unless ``start`` or ``release`` comes first.
        """
        if self._is_used(transfer_id):
            return [Due(request_id, transfer_id, _USED_TWICE)]
        return self._queue.add(request_id, transfer_id, producer, now)

    def start(self, order: Order, now: float) -> list[ConsumerAction]:
        """A request's blocks are allocated; fetch their contents.

        Where another request receives this transfer or has (n > 1 copies its parameters), this one fails at once: a
        Fin names the transfer only, and one that comes late would be taken for this request's.
        """
        if not self._queue.remove(order.transfer_id, order.request_id) and self._is_used(order.transfer_id):
            return [Received(order.request_id, _USED_TWICE)]
        self._engines.touch(order.producer.incarnation, now)
        reception = self._receptions[order.request_id] = Reception(order, ReceptionStage.CONNECTING, now)
        self._by_transfer[order.transfer_id] = reception
        partners = self._engines.reachable(order.producer.incarnation)
        return [Connect(order.producer)] if partners is None else self._offer(reception, partners, now)

    def release(self, transfer_id: str, producer: EngineAddress, now: float) -> list[ConsumerAction]:
        """A request wants nothing of this transfer (any more) and holds no blocks for it."""
        self._queue.discard(transfer_id)
        self._engines.touch(producer.incarnation, now)
        cancels = self._engines.release(transfer_id, producer.incarnation, now)
        return [Connect(producer)] if self._engines.reachable(producer.incarnation) is None else [*cancels]

    def abort(self, request_id: str, now: float) -> list[ConsumerAction]:
        """The request has been aborted; its blocks are freed once ``Received`` or ``Freed`` says so."""
        reception = self._receptions.get(request_id)
        if reception is None:
            return []
        return self._fail(reception, "the request was aborted", now)

    def connected(self, incarnation: str, partners: Sequence[Partner], now: float) -> list[ConsumerAction]:
        """The handshake with an engine start has succeeded; ``partners`` are its ranks that talk to this worker."""
        self._engines.connected(incarnation, partners, now)
        actions: list[ConsumerAction] = [*self._queue.connected(incarnation, partners, now)]
        for reception in self._of_engine(incarnation):
            if reception.stage is ReceptionStage.CONNECTING:
                actions += self._offer(reception, partners, now)
            elif reception.stage in GIVEN_UP and reception.writing:
                actions += self._cancel(reception, now)
        return actions + self._engines.send_releases(incarnation, now)

    def connect_failed(self, incarnation: str, reason: str, now: float) -> list[ConsumerAction]:
        """The handshake failed. The next request for this engine start tries again."""
        actions: list[ConsumerAction] = [*self._queue.connect_failed(incarnation, reason)]
        for reception in self._of_engine(incarnation):
            if reception.stage is ReceptionStage.CONNECTING:
                actions += self._fail(reception, reason, now)
        self._engines.releases.pop(incarnation, None)
        return actions

    def engine_lost(self, incarnation: str, reason: str, now: float) -> list[ConsumerAction]:
        """The producer engine is known to be dead: none of its workers writes any more."""
        actions = self.connect_failed(incarnation, reason, now)
        actions += self._queue.engine_lost(incarnation, reason)
        for reception in self._of_engine(incarnation):
            if reception.writing:
                reception.writing.clear()
                actions += self._fail(reception, reason, now)
        return actions + self._engines.forget(incarnation)

    def worker_lost(self, peer: Peer, reason: str, now: float) -> list[ConsumerAction]:
        """One worker of a producer engine is known to be dead: it writes no more. The others may."""
        self._engines.mark_stale(peer.incarnation)
        actions = self._queue.worker_lost(peer, reason, now)
        for reception in self._of_engine(peer.incarnation):
            if reception.writing.pop(peer, None) is not None:
                actions += self._fail(reception, f"rank {peer.rank}: {reason}", now)
        return actions

    def awaits(self, peer: Peer) -> bool:
        """Whether ``peer`` may still write, its writes are being verified, or a handshake with its engine is wanted."""
        if peer.incarnation in self._engines.releases or self._queue.uses(peer.incarnation):
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
        if self._of_engine(incarnation) or self._queue.uses(incarnation):
            self._engines.mark_stale(incarnation)
            return []
        return self._engines.forget(incarnation)

    def message(self, peer: Peer, message: Message, now: float) -> list[ConsumerAction]:
        """A message of a producer worker."""
        if not isinstance(message, Answer):
            return []
        if message.transfer_id in self._queue.requests:
            return self._queue.message(peer, message, now)
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
        if isinstance(message, AwaitStart | Offer | Cancel):
            self._engines.mark_stale(peer.incarnation)
        if isinstance(message, AwaitStart):
            return self._queue.undelivered(peer, message, now)
        reception = self._by_transfer.get(message.transfer_id) if isinstance(message, Offer) else None
        if reception is None or reception.writing.pop(peer, None) is None:
            return []
        return self._fail(reception, f"rank {peer.rank} of the prefill engine is out of reach", now)

    def tick(self, now: float) -> list[ConsumerAction]:
        """Deadlines. Call it a few times a second."""
        actions = self._queue.tick(now)
        for reception in list(self._all()):
            if now >= reception.check_at:
                actions += self._check(reception, now)
        for transfer_id in due(self._used, lambda at: now - at >= self._limits.lease_s):
            del self._used[transfer_id]
        self._engines.drop_releases(now)
        unused = self._engines.unused(now)
        wanted = {address.incarnation for address in self._producers()} if unused else set()
        for incarnation in unused:
            if incarnation not in wanted:
                actions += self._engines.forget(incarnation)
        return actions

    def knows(self, peer: Peer) -> bool:
        return self._engines.knows(peer)

    def suspects(self) -> set[Suspect]:
        """Workers that keep blocks in quarantine: they have left a Cancel unanswered, or a write of theirs failed."""
        return {
            Suspect(each.peer, each.process, each.was_seen, each.met_at)
            for reception in self._quarantine.values()
            for each in reception.writing.values()
        }

    def addresses(self) -> set[EngineAddress]:
        """Where the known producer engines were met."""
        return self._engines.addresses()

    def engines(self) -> set[str]:
        """Every engine start that this worker has met or that a request waits for."""
        waited_for = (address.incarnation for address in self._producers())
        return {*self._engines.partners, *self._engines.releases, *waited_for}

    def counts(self) -> dict[str, int]:
        """Queued requests, and receptions by stage."""
        counts = {"queued": len(self._queue.requests)} | {stage.value: 0 for stage in ReceptionStage}
        for reception in self._all():
            counts[reception.stage.value] += 1
        return counts

    @property
    def busy(self) -> bool:
        """Whether a request is queued or a transfer is under way, in quarantine included."""
        return bool(self._queue.requests or self._by_transfer)

    @property
    def quarantined(self) -> int:
        """Number of transfers whose blocks are in quarantine."""
        return len(self._quarantine)

    def snapshot(self) -> ConsumerSnapshot:
        """Return a copy of the state, for tests and diagnosis."""
        return ConsumerSnapshot(
            queued=frozenset(self._queue.requests),
            receptions={request_id: reception.stage.value for request_id, reception in self._receptions.items()},
            quarantined=frozenset(self._quarantine),
            partners={name: tuple(each.peer for each in known) for name, known in self._engines.partners.items()},
            used=frozenset((*self._by_transfer, *self._used)),
        )

    # ---- inside ------------------------------------------------------------------------------------------------

    def _is_used(self, transfer_id: str) -> bool:
        return transfer_id in self._used or transfer_id in self._by_transfer or transfer_id in self._queue.requests

    def _producers(self) -> Iterator[EngineAddress]:
        """Engines that a request waits for."""
        yield from (queued.producer for queued in self._queue.requests.values())
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
        silence_s = self._limits.silence_s(connecting=reception.stage is ReceptionStage.CONNECTING)
        reception.check_at = reception.silent_since(now) + silence_s
        if now < reception.check_at:
            return []
        return self._fail(reception, f"nothing was heard of the transfer for {silence_s:g} s", now)

    def _of_engine(self, incarnation: str) -> list[Reception]:
        return [r for r in self._all() if r.order.producer.incarnation == incarnation]

    def _offer(self, reception: Reception, partners: Sequence[Partner], now: float) -> list[ConsumerAction]:
        order = reception.order
        reception.stage, reception.number = ReceptionStage.OFFERED, self._engines.next_number()
        reception.check_at = now
        reception.writing = {partner.peer: partner for partner in partners}
        reception.heard_at = dict.fromkeys(reception.writing, now)
        offer = Offer(order.transfer_id, order.end_token, order.prompt_digest, order.groups, number=reception.number)
        return [Send(each.peer, replace(offer, digest=each.new_digest is not None)) for each in partners]

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
            order = reception.order
            self._engines.release_later(order.transfer_id, order.producer.incarnation, now)
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
        self._engines.mark_stale(order.producer.incarnation)
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
