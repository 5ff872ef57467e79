"""The producer's side of every transfer of one worker. Sans-I/O: events and ``now`` in, actions out.

A *transfer* is one request's KV for one consumer engine; each consumer rank that talks to this rank has a *delivery*.

    transfer   on                        becomes
    -------------------------------------------------------------------------------------
    (none)     AwaitStart, Offer, Cancel EARLY    the consumer is early: remembered for lease_s
    (none)     expect                    LIVE     the request waits or is being computed
    EARLY      expect                    LIVE
    EARLY      lease_s                   gone     open deliveries: Aborted
    LIVE       starting                  LIVE     Starting to those that have sent AwaitStart; again every alive_s to
                                                  those that have not offered since
    LIVE       finished, held            HELD     blocks stay allocated, under a lease
    LIVE       finished, not held        gone     open deliveries: Aborted once their writes have ended
    HELD       all deliveries closed     gone     Sent: the scheduler may free the blocks
    HELD       lease_s, no offer         gone     Sent
    (any)      discard                   (same)   open deliveries: Aborted; nobody is waited for: HELD becomes gone

Alive is sent for a request that waits or is computed (LIVE) only while the engine ends steps (stepped): a forward
pass that hangs must not keep a consumer waiting for ever. It also answers AwaitStart until the prompt starts.

While a step computes a chunk (begin), layers that it has run (layers_computed) can leave before it ends (progress).

    delivery   on                        becomes
    -------------------------------------------------------------------------------------
    AWAITED    AwaitStart                AWAITED  Starting, now or once the prompt is about to start
    AWAITED    Offer                     OPEN     what is complete is written at once, the rest chunk by chunk
    AWAITED    Cancel                    CLOSED   Cancelled
    OPEN       all written               CLOSED   Fin, with the digest of what was written if the offer asks for it
    OPEN       Cancel                    CLOSED   Cancelled, once its writes have ended
    OPEN       a failure                 CLOSED   Aborted, once its writes have ended
    OPEN       a write fails             CLOSED   Failed, and no Cancel is ever acknowledged: parts of the write may
                                                  still arrive while this process lives (docs/decisions/0024)
    OPEN       no write ends for hang_s  OPEN     given up: nothing more is written, and the write counts as hanging;
                                                  blocks stay allocated until it has ended (docs/decisions/0009)

A delivery that is closed is never written for again: its Fin, Aborted or Cancelled is the consumer's licence to use or
free its blocks. One that a failed write has closed gives no licence: its Offers and Cancels are answered with Failed,
also when the transfer or the consumer has been forgotten. Ids of transfers that are gone are remembered for lease_s;
offers for them are answered with Aborted, but nothing is answered while a write for that consumer rank is still in
flight. After that the highest number that a consumer worker had named with them remains: offers up to it are overtaken,
and answered with Aborted however late they come. (One that was called off and came as a new one would write into blocks
that are somebody else's.)

A consumer worker is known from ``welcome`` until ``peer_lost``, or until it has said nothing for forget_s and nothing
is under way for it; then Forget.
What a consumer can make this rank remember is bounded (``Allowance``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from connectors.protocol.actions import Forget, ProducerAction, Send, Sent
from connectors.protocol.delivery import NOBODY, ConsumerPeer, Gone, Stage, Transfer, take_layers
from connectors.protocol.limits import due
from connectors.protocol.production import Production
from connectors.protocol.wire import Alive, AwaitStart, Cancel, Message, Offer, Peer, Starting

_PREEMPTED = "the prefill was preempted during a write"


@dataclass(frozen=True, slots=True)
class ProducerSnapshot:
    """State of a producer machine at one moment; a copy.

    ``consumers``       known consumer workers, with what the machine knows of them
    ``heard_at``        time of the last message of each consumer worker that is not forgotten
    ``transfers``       ids of open transfers, with their stage
    ``remembered``      ids of transfers that are over
    ``offered_blocks``  blocks in open offers, by consumer worker
    ``early``           transfers whose requests have not come, by consumer engine
    ``closed``          (transfer id, consumer worker) of deliveries that are closed in open transfers
    ``offers``          (transfer id, consumer worker) of deliveries that keep their offer
    ``writes``          ids of the writes that have not ended
    ``failed``          ids of the transfers of each consumer worker that a write has failed for
    """

    consumers: Mapping[Peer, ConsumerPeer]
    heard_at: Mapping[Peer, float]
    transfers: Mapping[str, Stage]
    remembered: frozenset[str]
    offered_blocks: Mapping[Peer, int]
    early: Mapping[str, int]
    closed: frozenset[tuple[str, Peer]]
    offers: frozenset[tuple[str, Peer]]
    writes: frozenset[int]
    failed: Mapping[Peer, frozenset[str]]


class Producer(Production):
    """All transfers that one worker produces. Not thread-safe; its owner serialises calls."""

    # ---- what the scheduler says -------------------------------------------------------------------------------

    def expect(
        self, request_id: str, transfer_id: str, prompt_tokens: int, prompt_digest: str, now: float
    ) -> list[ProducerAction]:
        """A request that is to be produced has reached this engine."""
        transfer = self._transfers.get(transfer_id)
        if transfer_id in self._gone or (transfer is not None and transfer.stage is not Stage.EARLY):
            # The id has been used. The request runs, and its blocks are given back as soon as it has finished.
            transfer = Transfer(transfer_id, Stage.LIVE, now, expected_ranks=frozenset())
        elif transfer is None:
            transfer = self._transfers[transfer_id] = Transfer(transfer_id, Stage.LIVE, now)
        else:
            self._allowance.count_early(transfer, -1)
        transfer.stage, transfer.since, transfer.request_id = Stage.LIVE, now, request_id
        transfer.check_at = now
        transfer.prompt_tokens, transfer.prompt_digest = prompt_tokens, prompt_digest
        transfer.tables = [[] for _ in self._groups]
        self._by_request[request_id] = transfer
        return self._advance(transfer, now)

    def starting(self, request_id: str, now: float) -> list[ProducerAction]:
        """The scheduler computes the first chunk of this prompt in this step or is about to."""
        transfer = self._by_request.get(request_id)
        if transfer is None:
            return []
        transfer.starting = True
        waiting = [each for each in transfer.deliveries.values() if each.awaits_start and not each.closed]
        for delivery in waiting:
            delivery.last_sent = now
        return [Send(delivery.peer, Starting(transfer.transfer_id)) for delivery in waiting]

    def progress(
        self, request_id: str, new_ids: Sequence[Sequence[int]], computed_tokens: int, now: float
    ) -> list[ProducerAction]:
        """A chunk is computed: KV of ``computed_tokens`` tokens is there. ``new_ids[g]`` extend group g's table."""
        transfer = self._by_request.get(request_id)
        if transfer is None:
            return []
        for table, ids in zip(transfer.tables, new_ids, strict=True):
            table.extend(ids)
        transfer.computed_tokens, transfer.coming_tokens = computed_tokens, 0
        return self._advance(transfer, now)

    def begin(self, request_id: str, new_ids: Sequence[Sequence[int]], computed_tokens: int) -> None:
        """A chunk is about to be computed, after which KV of ``computed_tokens`` tokens will be there.

        For owners that can tell when a layer has been computed; ``progress`` still ends the chunk, with no new ids.
        """
        transfer = self._by_request.get(request_id)
        if transfer is None:
            return
        for table, ids in zip(transfer.tables, new_ids, strict=True):
            table.extend(ids)
        transfer.coming_tokens = computed_tokens

    def layers_computed(self, request_ids: Iterable[str], group: int, stop: int, now: float) -> list[ProducerAction]:
        """The step that computes these requests' chunks has computed the first ``stop`` layers of a group.

        What the chunks complete of them can leave.
        """
        actions: list[ProducerAction] = []
        for request_id in request_ids:
            transfer = self._by_request.get(request_id)
            if transfer is None or transfer.coming_tokens <= transfer.computed_tokens:
                continue
            for delivery in transfer.deliveries.values():
                consumer = self._consumers.get(delivery.peer)
                if delivery.ending is None and delivery.pending is not None and consumer is not None:
                    moves = take_layers(transfer, delivery, self._groups[group], consumer, stop)
                    if moves:
                        actions.append(self._write(transfer, delivery, moves, now))
        return actions

    def preempted(self, request_id: str, now: float) -> list[ProducerAction]:
        """The request's blocks were taken back; it will be computed again, into other blocks.

        Nothing more is written from the old ones. Writes in flight (``writes_in_flight``) may go on until ``fenced``:
        what has been written by then stays right.
        """
        transfer = self._by_request.get(request_id)
        if transfer is None:
            return []
        transfer.tables = [[] for _ in self._groups]
        transfer.coming_tokens = 0
        actions: list[ProducerAction] = []
        for delivery in transfer.deliveries.values():
            if delivery.early:
                actions += self._end(transfer, delivery, _PREEMPTED, now)
        return actions

    def fenced(self, request_id: str, now: float) -> list[ProducerAction]:
        """The old blocks of a preempted request will be overwritten now.

        Deliveries whose writes still read them are given up: they may carry bytes of whoever owns the blocks next.
        """
        transfer = self._by_request.get(request_id)
        if transfer is None:
            return []
        transfer.computed_tokens = 0
        actions: list[ProducerAction] = []
        for delivery in transfer.deliveries.values():
            if delivery.in_flight:
                actions += self._end(transfer, delivery, _PREEMPTED, now)
        return actions

    def stepped(self, now: float) -> None:
        """A step of the engine has ended."""
        self._stepped_at = now

    def finished(self, request_id: str, held: bool, reason: str, now: float) -> list[ProducerAction]:
        """The request has ended. Its blocks stay allocated until ``Sent`` if ``held``; if not, ``reason`` says why."""
        transfer = self._by_request.get(request_id)
        if transfer is None:
            return [Sent(request_id)] if held else []
        transfer.since = transfer.check_at = now
        if held:
            transfer.stage = Stage.HELD
            return self._advance(transfer, now)
        del self._by_request[request_id]
        transfer.request_id = None
        actions: list[ProducerAction] = []
        for delivery in list(transfer.deliveries.values()):
            actions += self._end(transfer, delivery, reason, now)
        self._forget(transfer, now)
        return actions

    def discard(self, transfer_id: str, now: float) -> list[ProducerAction]:
        """Whoever asked for this transfer has given it up: its KV is not held for anybody.

        Its request may be here or come later; then it runs, and is Sent as soon as it has finished.
        """
        transfer = self._transfers.get(transfer_id)
        if transfer is None:
            self._gone.setdefault(transfer_id, Gone(now))
            return []
        actions: list[ProducerAction] = []
        for delivery in transfer.deliveries.values():
            actions += self._end(transfer, delivery, "the router has given the transfer up", now)
        if transfer.stage is Stage.EARLY:
            self._forget(transfer, now)
            return actions
        if transfer_id not in self._transfers:
            # The last delivery waited for the start of a prompt that had been computed.
            return actions
        transfer.consumer, transfer.expected_ranks = NOBODY, frozenset()
        return actions + self._advance(transfer, now)

    def writes_in_flight(self, request_id: str) -> tuple[int, ...]:
        """Ids of the writes that read this request's blocks."""
        transfer = self._by_request.get(request_id)
        if transfer is None:
            return ()
        return tuple(write_id for delivery in transfer.deliveries.values() for write_id in delivery.in_flight)

    # ---- what peers say ----------------------------------------------------------------------------------------

    def welcome(self, peer: Peer, consumer: ConsumerPeer, now: float) -> None:
        """A consumer worker has said hello and fits. One that is known may do so again, at any time."""
        self._consumers[peer] = consumer
        self._lost.pop(peer, None)
        self._heard(peer, now)

    def knows(self, peer: Peer) -> bool:
        return peer in self._consumers

    def serves(self, peer: Peer) -> bool:
        """Return whether ``peer`` still waits for an answer."""
        return any(
            delivery.peer == peer and not delivery.closed
            for transfer in (*self._transfers.values(), *(transfer for transfer, _ in self._writes.values()))
            for delivery in transfer.deliveries.values()
        )

    def message(self, peer: Peer, message: Message, now: float) -> list[ProducerAction]:
        """A message of a consumer that has been welcomed."""
        self._heard(peer, now)
        if isinstance(message, AwaitStart | Offer | Cancel) and message.transfer_id in self._failed.get(peer, ()):
            return [self._failure(peer, message.transfer_id)]
        match message:
            case AwaitStart():
                return self._awaits_start(peer, message, now)
            case Offer():
                return self._offered(peer, message, now)
            case Cancel():
                return self._cancelled(peer, message, now)
        return []

    def engine_lost(self, incarnation: str, now: float) -> list[ProducerAction]:
        """The consumer engine is known to be dead: none of its workers will ask for anything."""
        for peer in [peer for peer in self._failed if peer.incarnation == incarnation]:
            del self._failed[peer]
        known = [peer for peer in self._consumers if peer.incarnation == incarnation]
        return [action for peer in known for action in self.peer_lost(peer, now)]

    def engines(self) -> set[str]:
        """Every consumer engine start that this worker remembers."""
        return {peer.incarnation for peer in (*self._heard_at, *self._failed)}

    def peer_lost(self, peer: Peer, now: float) -> list[ProducerAction]:
        """The consumer worker is gone. Its writes end by themselves (done or failed); nobody is answered."""
        if self._consumers.pop(peer, None) is not None:
            self._lost[peer] = None
        actions: list[ProducerAction] = []
        for transfer in list(self._transfers.values()):
            delivery = transfer.deliveries.get(peer.rank)
            if delivery is not None and delivery.peer == peer:
                actions += self._end(transfer, delivery, "the consumer is gone", now)
        return actions

    # ---- what the transport and the clock say ------------------------------------------------------------------

    def write_done(self, write_id: int, now: float) -> list[ProducerAction]:
        transfer, delivery = self._writes.pop(write_id)
        delivery.written_bytes += delivery.in_flight.pop(write_id)
        delivery.moved_at = now
        return self._advance(transfer, now)

    def write_refused(self, write_id: int, reason: str, now: float) -> list[ProducerAction]:
        """Nothing of the write was posted."""
        transfer, delivery = self._writes.pop(write_id)
        delivery.in_flight.pop(write_id)
        return self._end(transfer, delivery, f"a write could not be posted: {reason}", now)

    def write_failed(self, write_id: int, reason: str, now: float) -> list[ProducerAction]:
        """The write failed after its start: parts of it may still reach the consumer's blocks."""
        transfer, delivery = self._writes.pop(write_id)
        delivery.in_flight.pop(write_id)
        actions: list[ProducerAction] = []
        failed = self._failed.setdefault(delivery.peer, {})
        if transfer.transfer_id not in failed:
            failed[transfer.transfer_id] = f"a write failed: {reason}"
            if delivery.peer in self._consumers:
                actions.append(self._failure(delivery.peer, transfer.transfer_id))
        return actions + self._end(transfer, delivery, f"a write failed: {reason}", now)

    def write_posted(self, write_id: int, total_bytes: int) -> None:
        """The transport has taken the write; ``total_bytes`` are counted into Fin when it is done."""
        _, delivery = self._writes[write_id]
        delivery.in_flight[write_id] = total_bytes

    def tick(self, now: float) -> list[ProducerAction]:
        """Deadlines. Call it at least every alive_s / 2."""
        actions: list[ProducerAction] = []
        for transfer in list(self._transfers.values()):
            if now >= transfer.check_at:
                actions += self._check(transfer, now)
        for transfer_id in due(self._gone, lambda gone: now - gone.at >= self._limits.lease_s):
            for peer, number in self._gone.pop(transfer_id).numbers.items():
                if peer in self._heard_at:
                    self._overtaken[peer] = max(number, self._overtaken.get(peer, number))
        return actions + self._give_up_hanging_writes(now) + self._forget_silent_peers(now)

    def _check(self, transfer: Transfer, now: float) -> list[ProducerAction]:
        """The deadlines of one transfer, and when to look at them again if nothing happens to it until then."""
        actions: list[ProducerAction] = []
        transfer.check_at = float("inf") if transfer.stage is Stage.LIVE else transfer.since + self._limits.lease_s
        for delivery in transfer.deliveries.values():
            awaits_start = delivery.awaits_start and not delivery.closed
            if (delivery.offer is None and not awaits_start) or delivery.closed or transfer.request_id is None:
                continue
            # A write that hangs is no sign of life: the consumer's progress_s must end its wait.
            hangs = delivery.in_flight and now - delivery.moved_at >= self._limits.progress_s
            failed = transfer.transfer_id in self._failed.get(delivery.peer, ())
            alive = not hangs and not failed and not self._engine_hangs(transfer, now)
            if alive and now - delivery.last_sent >= self._limits.alive_s:
                delivery.last_sent = now
                repeats = awaits_start and transfer.starting
                actions.append(Send(delivery.peer, (Starting if repeats else Alive)(transfer.transfer_id)))
            transfer.check_at = min(transfer.check_at, delivery.last_sent + self._limits.alive_s)
        if transfer.stage is not Stage.LIVE and now - transfer.since >= self._limits.lease_s:
            actions += self._expire(transfer, now)
        return actions

    def _engine_hangs(self, transfer: Transfer, now: float) -> bool:
        """Return whether the engine has had this request to compute for step_s and has ended no step."""
        got_on_at = max(self._stepped_at, transfer.since)
        return transfer.stage is Stage.LIVE and now - got_on_at >= self._limits.step_s

    def _give_up_hanging_writes(self, now: float) -> list[ProducerAction]:
        actions: list[ProducerAction] = []
        for transfer, delivery in list(self._writes.values()):
            if not delivery.hangs and now - delivery.moved_at >= self._limits.hang_s:
                delivery.hangs = True
                reason = f"a write made no progress for {self._limits.hang_s:g} s"
                actions += self._end(transfer, delivery, reason, now)
        return actions

    def _forget_silent_peers(self, now: float) -> list[ProducerAction]:
        """Those that were lost, as soon as nothing is under way to them, and those that have long been silent."""
        silent = {**self._lost, **dict.fromkeys(due(self._heard_at, lambda at: now - at >= self._limits.forget_s))}
        if not silent:
            return []
        busy = {delivery.peer for _, delivery in self._writes.values()}
        for transfer in self._transfers.values():
            busy |= {delivery.peer for delivery in transfer.deliveries.values() if not delivery.closed}
        forgotten = [peer for peer in silent if peer not in busy]
        for peer in forgotten:
            del self._heard_at[peer]
            self._lost.pop(peer, None)
            self._consumers.pop(peer, None)
            self._overtaken.pop(peer, None)
        return [Forget(peer) for peer in forgotten]

    def counts(self) -> dict[str, int]:
        """Return counts of transfers by stage, writes in flight, remembered ids, and hanging writes."""
        counts = {stage.name.lower(): 0 for stage in Stage}
        for transfer in self._transfers.values():
            counts[transfer.stage.name.lower()] += 1
        hanging = sum(delivery.hangs for _, delivery in self._writes.values())
        return counts | {"writes": len(self._writes), "remembered": len(self._gone), "hanging": hanging}

    @property
    def busy(self) -> bool:
        """Return whether a transfer is open, in any stage."""
        return bool(self._transfers)

    def snapshot(self) -> ProducerSnapshot:
        """Return a copy of the state, for tests and diagnosis."""
        deliveries = [(t.transfer_id, d) for t in self._transfers.values() for d in t.deliveries.values()]
        return ProducerSnapshot(
            consumers=dict(self._consumers),
            heard_at=dict(self._heard_at),
            transfers={transfer_id: transfer.stage for transfer_id, transfer in self._transfers.items()},
            remembered=frozenset(self._gone),
            offered_blocks=dict(self._allowance.blocks),
            early=dict(self._allowance.early),
            closed=frozenset((transfer_id, each.peer) for transfer_id, each in deliveries if each.closed),
            offers=frozenset((transfer_id, each.peer) for transfer_id, each in deliveries if each.offer is not None),
            writes=frozenset(self._writes),
            failed={peer: frozenset(transfers) for peer, transfers in self._failed.items()},
        )
