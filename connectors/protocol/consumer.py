"""State machine of all transfers that one worker receives (the consumer). Sans-I/O.

Its methods take events and the current time in seconds, and return actions. ``reception.py`` has
the requests and their queue; ``engines.py`` has the producer engines.

    reception   on                         becomes     actions
    --------------------------------------------------------------------------------------------
    (none)      queue                      queued      Connect if needed; AwaitStart to one partner
    (none)      queue, id used before      gone        Due(failed): an id is valid once
    queued      Starting                   (none)      Due(ok): allocate the blocks, then start
    queued      Aborted, Failed, silence,  (none)      Due(cancelled), Cancel to all partners; if a
                undelivered, worker_lost               handshake is needed, after the next one
    queued      connect_failed,            (none)      Due(failed)
                engine_lost
    (none)      start                      CONNECTING  Connect to the producer engine
    (none)      start, id used before      gone        Received(failed): an id is valid once
    CONNECTING  connected                  OFFERED     an Offer to every partner rank
    CONNECTING  connect_failed, silence,   gone        Received(failed): no peer has the block ids
                abort, engine_lost
    OFFERED     Alive, units have arrived  OFFERED     Verify of them, if a digest was requested
    OFFERED     Fin, expected byte count   OFFERED     Verify of the rest
    OFFERED     last Fin, all verified     gone        Received(ok)
    OFFERED     verification hangs         gone        Received(failed)
    OFFERED     an Offer cannot be sent    ENDING      Cancel to the other partners
    OFFERED     Aborted, Cancelled, abort, ENDING      Cancel
                worker_lost, engine_lost,
                silence, bad count or digest
    OFFERED     Failed                     QUARANTINE  Received(failed, quarantine), Cancel
    ENDING      no partner may write       gone        Received(failed)
    ENDING      Failed                     QUARANTINE  Received(failed, quarantine)
    ENDING      cancel_s                   QUARANTINE  Received(failed, quarantine), Cancel, Connect
    ENDING      connected                  ENDING      Cancel
    QUARANTINE  cancel_s                   QUARANTINE  Cancel, Connect: the producer may have
                                                       removed this consumer
    QUARANTINE  connected                  QUARANTINE  Cancel
    QUARANTINE  no partner may write       gone        Freed

Silence is progress_s without a message of one partner; during a handshake, handshake_s if longer. A
verification hangs if it runs hang_s after the last Fin; it then counts as ended in every stage.
From OFFERED on, Cancel goes to all partners that may write. If there is none and no verification
runs, a failed reception skips ENDING. A request of a known engine skips CONNECTING unless the
engine is stale: its last handshake failed, or since then a message could not be sent, a worker was
lost or removed, or a transfer went into quarantine. An id counts as used while it is queued or has
a reception, and for lease_s after its reception has ended.

A partner *may write* from the Offer until its Fin, Aborted or Cancelled arrives, its Offer cannot
be sent, or the owner reports its death. Failed does not end this period: parts of a write may still
arrive. ``Received`` without quarantine and ``Freed`` return blocks to the scheduler: no partner may
write, and all verifications have ended or hang. No deadline returns blocks to which a partner may
write. The state machine ignores messages of transfers that have ended. It removes an engine that is
dead, evicted, or unused for forget_s / 2, with a Forget per partner.

    worker_lost  one producer rank is dead and cannot write any more
    engine_lost  the producer is dead and none of its ranks can write any more
    release      a request needs no KV: Cancel to every partner ends the producer's lease
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from connectors.planning.layout import Group
from connectors.protocol.actions import Connect, ConsumerAction, Due, Forget, Freed, Received, Send
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

_USED_TWICE = "the transfer id has been used by another request; use a new transfer_id for each request"


class Consumer:
    """State machine of all transfers that one worker receives. The owner serialises calls."""

    def __init__(self, groups: Sequence[Group], limits: TransferLimits) -> None:
        self._groups = tuple(groups)
        self._limits = limits
        self._engines = ProducerEngines(limits)
        self._queue = RequestQueue(self._engines, limits)
        # Receptions in quarantine are keyed by transfer id: their request id may be used again.
        self._receptions: dict[str, Reception] = {}
        self._quarantine: dict[str, Reception] = {}
        self._by_transfer: dict[str, Reception] = {}
        # End time in seconds of each ended transfer, by transfer id, in the order of expiry.
        self._used: dict[str, float] = {}

    def queue(self, request_id: str, transfer_id: str, producer: EngineAddress, now: float) -> list[ConsumerAction]:
        """Queue a request until Due, ``start`` or ``release``. For a used id, Due has a failure."""
        if self._is_used(transfer_id):
            return [Due(request_id, transfer_id, _USED_TWICE)]
        return self._queue.add(request_id, transfer_id, producer, now)

    def start(self, order: Order, now: float) -> list[ConsumerAction]:
        """An id is valid once: a late Fin of a first request would match a second with its id."""
        self._queue.remove(order.transfer_id, order.request_id)
        if self._is_used(order.transfer_id):
            return [Received(order.request_id, _USED_TWICE)]
        self._engines.touch(order.producer.incarnation, now)
        reception = self._receptions[order.request_id] = Reception(order, ReceptionStage.CONNECTING, now)
        self._by_transfer[order.transfer_id] = reception
        partners = self._engines.reachable(order.producer.incarnation)
        return [Connect(order.producer)] if partners is None else self._offer(reception, partners, now)

    def release(self, transfer_id: str, producer: EngineAddress, now: float) -> list[ConsumerAction]:
        """End the producer's lease of a transfer for which this rank sends no Offer."""
        self._queue.remove(transfer_id)
        self._engines.touch(producer.incarnation, now)
        cancels = self._engines.release(transfer_id, producer.incarnation, now)
        return [Connect(producer)] if self._engines.reachable(producer.incarnation) is None else [*cancels]

    def abort(self, request_id: str, now: float) -> list[ConsumerAction]:
        """The request's blocks stay allocated until Received without quarantine or Freed."""
        reception = self._receptions.get(request_id)
        if reception is None:
            return []
        return self._fail(reception, "the request was aborted", now)

    def connected(self, incarnation: str, partners: Sequence[Partner], now: float) -> list[ConsumerAction]:
        self._engines.connected(incarnation, partners, now)
        actions: list[ConsumerAction] = [*self._queue.connected(incarnation, partners, now)]
        for reception in self._of_engine(incarnation):
            if reception.stage is ReceptionStage.CONNECTING:
                actions += self._offer(reception, partners, now)
            elif reception.stage in GIVEN_UP and reception.writing:
                actions += self._cancel(reception, now)
        return actions + self._engines.send_releases(incarnation, now)

    def connect_failed(self, incarnation: str, reason: str, now: float) -> list[ConsumerAction]:
        actions: list[ConsumerAction] = [*self._queue.connect_failed(incarnation, reason)]
        for reception in self._of_engine(incarnation):
            if reception.stage is ReceptionStage.CONNECTING:
                actions += self._fail(reception, reason, now)
        self._engines.connect_failed(incarnation)
        return actions

    def engine_lost(self, incarnation: str, reason: str, now: float) -> list[ConsumerAction]:
        actions = self.connect_failed(incarnation, reason, now)
        actions += self._queue.engine_lost(incarnation, reason)
        for reception in self._of_engine(incarnation):
            if reception.writing:
                reception.writing.clear()
                actions += self._fail(reception, reason, now)
        return actions + self._engines.forget(incarnation)

    def worker_lost(self, peer: Peer, reason: str, now: float) -> list[ConsumerAction]:
        self._engines.mark_stale(peer.incarnation)
        actions = self._queue.worker_lost(peer, reason, now)
        for reception in self._of_engine(peer.incarnation):
            if reception.writing.pop(peer, None) is not None:
                actions += self._fail(reception, f"prefill rank {peer.rank}: {reason}", now)
        return actions

    def awaits(self, peer: Peer) -> bool:
        """Return whether ``peer`` may write, or a verification, wait or handshake needs it."""
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
        """Remove an engine of which the owner evicts a worker; if in use, mark it stale."""
        if self._of_engine(incarnation) or self._queue.uses(incarnation):
            self._engines.mark_stale(incarnation)
            return []
        return self._engines.forget(incarnation)

    def message(self, peer: Peer, message: Message, now: float) -> list[ConsumerAction]:
        if not isinstance(message, Answer):
            return []
        if message.transfer_id in self._queue.requests:
            return self._queue.message(peer, message, now)
        reception = self._by_transfer.get(message.transfer_id)
        if reception is None or (partner := reception.writing.get(peer)) is None:
            return []
        if isinstance(message, Alive | Starting):
            reception.heard_at[peer] = now  # a prefill rank repeats Starting until the Offer arrives
            if isinstance(message, Alive) and reception.stage is ReceptionStage.OFFERED:
                return [*reception.verify(partner, self._groups, now, message.left)]
            return []
        if isinstance(message, Failed):
            return self._write_failed(reception, f"prefill rank {peer.rank}: {message.reason}", now)
        del reception.writing[peer]
        try:
            return self._answered(reception, partner, message, now)
        except Exception as error:  # for example, no memory. The partner sends no other message
            return self._fail(reception, f"prefill rank {peer.rank}: {error!r}", now)

    def verified(self, transfer_id: str, peer: Peer, problem: str | None, now: float) -> list[ConsumerAction]:
        """``problem`` is None if the digests are equal."""
        reception = self._by_transfer.get(transfer_id)
        if reception is None or peer not in reception.verifying:
            return []
        reception.verifying.remove(peer)
        if problem is not None:
            return self._fail(reception, f"prefill rank {peer.rank}: {problem}", now)
        return self._end_if_over(reception, now)

    def undelivered(self, peer: Peer, message: Message, now: float) -> list[ConsumerAction]:
        """A message could not be sent. A partner without the Offer cannot write."""
        if isinstance(message, AwaitStart | Offer | Cancel):
            self._engines.mark_stale(peer.incarnation)
        if isinstance(message, AwaitStart):
            return self._queue.undelivered(peer, message, now)
        reception = self._by_transfer.get(message.transfer_id) if isinstance(message, Offer) else None
        if reception is None or reception.writing.pop(peer, None) is None:
            return []
        return self._fail(reception, f"rank {peer.rank} of the prefill engine is unreachable", now)

    def tick(self, now: float) -> list[ConsumerAction]:
        """Apply deadlines. Call it several times per second."""
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
        return {
            Suspect(each.peer, each.process, each.was_seen, each.met_at)
            for reception in self._quarantine.values()
            for each in reception.writing.values()
        }

    def addresses(self) -> set[EngineAddress]:
        return self._engines.addresses()

    def engines(self) -> set[str]:
        waited_for = (address.incarnation for address in self._producers())
        return {*self._engines.partners, *self._engines.releases, *waited_for}

    def counts(self) -> dict[str, int]:
        counts = {"queued": len(self._queue.requests)} | {stage.value: 0 for stage in ReceptionStage}
        for reception in self._all():
            counts[reception.stage.value] += 1
        return counts

    @property
    def busy(self) -> bool:
        return bool(self._queue.requests or self._by_transfer)

    def _is_used(self, transfer_id: str) -> bool:
        return transfer_id in self._used or transfer_id in self._by_transfer or transfer_id in self._queue.requests

    def _producers(self) -> Iterator[EngineAddress]:
        yield from (queued.producer for queued in self._queue.requests.values())
        yield from (reception.order.producer for reception in self._all())

    def _all(self) -> Iterator[Reception]:
        yield from self._receptions.values()
        yield from self._quarantine.values()

    def _check(self, reception: Reception, now: float) -> list[ConsumerAction]:
        """Messages only postpone deadlines: none passes before ``check_at``."""
        if reception.verifying and not reception.writing:
            hang_s = self._limits.hang_s
            reception.check_at = reception.verifying_since + hang_s
            if now < reception.check_at:
                return []
            # The comparison only reads, so vLLM may reuse the blocks meanwhile.
            reception.verifying.clear()
            return self._fail(reception, f"the comparison of digests took longer than {hang_s:g} s", now)
        if reception.stage in GIVEN_UP:
            # Each handshake repeats Cancel, and must not postpone the end of the request's wait.
            ending = reception.stage is ReceptionStage.ENDING
            since = reception.ending_since if ending else reception.cancelled_at
            reception.check_at = since + self._limits.cancel_s
            if reception.writing and now >= reception.check_at:
                return self._unanswered(reception, now)
            return []
        silence_s = self._limits.silence_s(connecting=reception.stage is ReceptionStage.CONNECTING)
        reception.check_at = reception.silent_since(now) + silence_s
        if now < reception.check_at:
            return []
        return self._fail(reception, f"a prefill rank sent no message about the transfer for {silence_s:g} s", now)

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
        if isinstance(message, Fin):
            expected = expected_bytes(self._groups, reception.order, partner)
            if message.total_bytes != expected:
                failure = f"prefill rank {partner.peer.rank} wrote {message.total_bytes} bytes, expected {expected}"
                return self._fail(reception, failure, now)
            if partner.new_digest is not None and reception.stage is ReceptionStage.OFFERED:
                if not message.digest:
                    return self._fail(
                        reception, f"prefill rank {partner.peer.rank} sent no digest of the bytes that it wrote", now
                    )
                return [*reception.verify(partner, self._groups, now, [0] * len(self._groups), message.digest)]
        elif reception.stage not in GIVEN_UP:
            reason = message.reason if isinstance(message, Aborted) else "the producer cancelled the transfer"
            return self._fail(reception, f"prefill rank {partner.peer.rank}: {reason}", now)
        return self._end_if_over(reception, now)

    def _fail(self, reception: Reception, reason: str, now: float) -> list[ConsumerAction]:
        if reception.failure is None:
            reception.failure = reason
        if reception.stage is ReceptionStage.CONNECTING:
            # If the handshake still succeeds, this Cancel ends the producer's lease early.
            order = reception.order
            self._engines.release_later(order.transfer_id, order.producer.incarnation, now)
        if reception.stage in GIVEN_UP or not (reception.writing or reception.verifying):
            return self._end_if_over(reception, now)
        reception.stage, reception.ending_since = ReceptionStage.ENDING, now
        return self._cancel(reception, now)

    def _cancel(self, reception: Reception, now: float) -> list[ConsumerAction]:
        reception.cancelled_at = reception.check_at = now
        return [Send(peer, Cancel(reception.order.transfer_id, reception.number)) for peer in reception.writing]

    def _unanswered(self, reception: Reception, now: float) -> list[ConsumerAction]:
        order, met_at = reception.order, next(iter(reception.writing.values())).met_at
        actions: list[ConsumerAction] = [*self._cancel(reception, now), Connect(met_at or order.producer)]
        if reception.stage is ReceptionStage.ENDING:
            actions.append(self._keep(reception))
        return actions

    def _write_failed(self, reception: Reception, reason: str, now: float) -> list[ConsumerAction]:
        actions = self._fail(reception, reason, now)
        if reception.stage is ReceptionStage.ENDING:
            actions.append(self._keep(reception))
        return actions

    def _keep(self, reception: Reception) -> Received:
        order = reception.order
        reception.stage = ReceptionStage.QUARANTINE
        self._quarantine[order.transfer_id] = self._receptions.pop(order.request_id)
        # The engine's next requests start with a handshake: blocks offered to an engine that does
        # not answer would also end in quarantine.
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
