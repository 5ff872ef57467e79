"""State machine of all transfers that one worker sends (the producer). Sans-I/O.

Its methods take events and the current time in seconds, and return actions. A *transfer* is one
request's KV for one consumer engine. It has one *delivery* for each consumer rank that this rank
serves.

    transfer  on                        becomes  actions
    -----------------------------------------------------------------------------------------
    (none)    AwaitStart, Offer, Cancel EARLY    remembered for lease_s
    (none)    expect                    LIVE     the request is queued or computing
    EARLY     expect                    LIVE
    EARLY     lease_s                   gone     open deliveries: Aborted
    LIVE      starting                  LIVE     Starting to ranks that sent AwaitStart; again
                                                 every alive_s until their offer
    LIVE      finished, held            HELD     blocks stay allocated, under a lease
    LIVE      finished, not held        gone     open deliveries: Aborted after their writes
    HELD      all deliveries closed     gone     Sent: the scheduler may free the blocks
    HELD      lease_s without an offer  gone     Sent
    LIVE      discard                   LIVE     open deliveries: Aborted after their writes
    (other)   discard                   gone     open deliveries: Aborted after their writes;
                                                 HELD: then Sent

In LIVE and HELD, the producer sends Alive for open deliveries with an AwaitStart or an Offer. Alive
stops in LIVE if the engine finishes no step (``stepped``) for step_s, and in both stages if a write
fails or makes no progress for progress_s. So none of these makes a consumer wait forever.

The producer can write layers during a step: ``begin``, ``layers_computed``, then ``progress``.

    delivery  on                        becomes  actions
    -----------------------------------------------------------------------------------------
    AWAITED   AwaitStart                AWAITED  Starting, when the prompt is about to start
    AWAITED   Offer                     OPEN     Write what is computed, then each chunk
    AWAITED   Cancel                    CLOSED   Cancelled
    OPEN      all written               CLOSED   Fin, with a digest if the offer requests one.
                                                 With ``late_orders``, after
                                                 the next ``orders_applied`` or in HELD
    OPEN      Cancel                    CLOSED   Cancelled, after its writes have ended
    (any)     a failure                 CLOSED   Aborted, after its writes have ended
    OPEN      a write fails             CLOSED   Failed. The producer acknowledges no later
                                                 Cancel: parts of the write may still arrive
                                                 while this process lives (docs/decisions/0024)
    OPEN      no progress for hang_s    OPEN     Aborted is pending and the write counts as
                                                 hanging; blocks stay allocated until the write
                                                 has ended (docs/decisions/0009)

The producer never writes for a closed delivery: Fin, Aborted and Cancelled allow the consumer to
use or free its blocks. Failed does not. After a failed write, the producer answers the worker's
messages about the transfer with Failed until the worker is dead (``engine_lost``, ``worker_lost``),
even if it has removed both.

The producer keeps the ids of ended transfers for lease_s. It answers offers with such an id with
Aborted, or not at all while a write for that consumer rank is in flight. After lease_s, it keeps
only the highest message number that each known consumer worker has sent for these transfers. It
answers offers up to that number with Aborted: if a cancelled offer that arrives late counted as
new, the producer would write into blocks of another request.

A consumer worker is known from ``welcome`` until ``peer_lost``, or until forget_s without a message
and without an open delivery. A Forget follows once a removed worker has no open delivery.
``Allowance`` limits the state that a consumer can create in this rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from connectors.protocol.actions import Forget, ProducerAction, Send, Sent
from connectors.protocol.delivery import NO_CONSUMER, ConsumerPeer, Gone, Stage, Transfer, take_layers
from connectors.protocol.engines import Suspect
from connectors.protocol.limits import due
from connectors.protocol.production import Production, cannot_serve
from connectors.protocol.wire import Alive, AwaitStart, Cancel, Message, Offer, Peer, Starting

_PREEMPTED = "the prefill was preempted during a write"


class Producer(Production):
    """State machine of all transfers that one worker sends. The owner serialises calls."""

    # Events of the scheduler and the engine.

    def expect(
        self, request_id: str, transfer_id: str, prompt_tokens: int, prompt_digest: str, now: float
    ) -> list[ProducerAction]:
        """Add a prefill request. Send no KV if its transfer id is in use, ended or discarded."""
        transfer = self._transfers.get(transfer_id)
        if transfer_id in self._gone or (transfer is not None and transfer.stage is not Stage.EARLY):
            # vLLM can free the blocks when the request finishes.
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
        """``new_ids[g]``: block ids to append to group g's block table at the end of a chunk."""
        transfer = self._by_request.get(request_id)
        if transfer is None:
            return []
        for table, ids in zip(transfer.tables, new_ids, strict=True):
            table.extend(ids)
        transfer.computed_tokens, transfer.coming_tokens = computed_tokens, 0
        return self._advance(transfer, now)

    def begin(self, request_id: str, new_ids: Sequence[Sequence[int]], computed_tokens: int) -> None:
        """A step that reports computed layers starts; then call ``progress`` without ids."""
        transfer = self._by_request.get(request_id)
        if transfer is None:
            return
        for table, ids in zip(transfer.tables, new_ids, strict=True):
            table.extend(ids)
        transfer.coming_tokens = computed_tokens

    def layers_computed(self, request_ids: Iterable[str], group: int, stop: int, now: float) -> list[ProducerAction]:
        actions: list[ProducerAction] = []
        for request_id in request_ids:
            transfer = self._by_request.get(request_id)
            if transfer is None or transfer.coming_tokens <= transfer.computed_tokens:
                continue
            for delivery in transfer.deliveries.values():
                consumer = self._consumers.get(delivery.peer)
                if delivery.ending is None and delivery.pending is not None and consumer is not None:
                    try:
                        moves = take_layers(transfer, delivery, self._groups[group], consumer, stop)
                        if moves:
                            actions.append(self._write(transfer, delivery, moves, now))
                    except Exception as error:  # as in ``_advance``
                        actions += self._end(transfer, delivery, cannot_serve(error), now)
        return actions

    def preempted(self, request_id: str, now: float) -> list[ProducerAction]:
        """vLLM has freed the request's blocks and will recompute it: no new write reads the old
        blocks.

        A delivery with part of a step's layers is aborted. The others go on until ``fenced``.
        """
        transfer = self._by_request.get(request_id)
        if transfer is None:
            return []
        transfer.tables = [[] for _ in self._groups]
        transfer.coming_tokens = 0
        return self._end_all(transfer, _PREEMPTED, now, lambda delivery: delivery.early)

    def fenced(self, request_id: str, now: float) -> list[ProducerAction]:
        """Abort a preempted request's deliveries whose writes may have read overwritten blocks."""
        transfer = self._by_request.get(request_id)
        if transfer is None:
            return []
        transfer.computed_tokens = 0
        return self._end_all(
            transfer,
            _PREEMPTED,
            now,
            lambda delivery: delivery.in_flight or (delivery.written_bytes and not self._intact(transfer, delivery)),
        )

    def stepped(self, now: float) -> None:
        self._stepped_at = now

    def finished(self, request_id: str, held: bool, reason: str, now: float) -> list[ProducerAction]:
        """A request has ended, with blocks ``held`` until ``Sent``, or only its transfer."""
        transfer = self._by_request.get(request_id)
        if transfer is None:
            return [Sent(request_id)] if held else []
        transfer.since = transfer.check_at = now
        if held:
            transfer.stage = Stage.HELD
            return self._advance(transfer, now)
        del self._by_request[request_id]
        transfer.request_id = None
        actions = self._end_all(transfer, reason, now)
        self._forget(transfer, now)
        return actions

    def discard(self, transfer_id: str, now: float) -> list[ProducerAction]:
        """No engine will fetch the KV of this transfer. vLLM still computes its request."""
        transfer = self._transfers.get(transfer_id)
        if transfer is None:
            self._gone.setdefault(transfer_id, Gone(now))
            return []
        actions = self._end_all(transfer, "the router has discarded the transfer", now)
        if transfer.stage is Stage.EARLY:
            self._forget(transfer, now)
            return actions
        if transfer_id not in self._transfers:
            # The end of the last delivery of a held transfer has released the transfer.
            return actions
        transfer.consumer, transfer.expected_ranks = NO_CONSUMER, frozenset()
        return actions + self._advance(transfer, now)

    def writes_in_flight(self, request_id: str) -> tuple[int, ...]:
        transfer = self._by_request.get(request_id)
        if transfer is None:
            return ()
        return tuple(write_id for delivery in transfer.deliveries.values() for write_id in delivery.in_flight)

    # Events of peers.

    def welcome(self, peer: Peer, consumer: ConsumerPeer, now: float) -> None:
        self._consumers[peer] = consumer
        self._lost.pop(peer, None)
        self._heard(peer, now)

    def knows(self, peer: Peer) -> bool:
        return peer in self._consumers

    def serves(self, peer: Peer) -> bool:
        return any(
            delivery.peer == peer and not delivery.closed
            for transfer in (*self._transfers.values(), *(transfer for transfer, _ in self._writes.values()))
            for delivery in transfer.deliveries.values()
        )

    def message(self, peer: Peer, message: Message, now: float) -> list[ProducerAction]:
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

    # Events of the transport and the clock.

    def write_done(self, write_id: int, now: float) -> list[ProducerAction]:
        transfer, delivery = self._writes.pop(write_id)
        delivery.written_bytes += delivery.in_flight.pop(write_id)
        delivery.moved_at = now
        left = delivery.arrived()
        actions = self._advance(transfer, now)
        if left and delivery.digest is not None and delivery.ending is None:
            # The consumer hashes what has arrived while the rest arrives.
            actions.insert(0, Send(delivery.peer, Alive(transfer.transfer_id, left)))
        return actions

    def wants(self, write_id: int) -> bool:
        """Return whether to post more of an unfinished write: its delivery has not ended."""
        return self._writes[write_id][1].ending is None

    def write_refused(self, write_id: int, reason: str, now: float) -> list[ProducerAction]:
        """The write was not posted, or in part: all that was posted has arrived."""
        transfer, delivery = self._writes.pop(write_id)
        delivery.in_flight.pop(write_id)
        return self._end(transfer, delivery, f"a write could not be posted: {reason}", now)

    def write_failed(self, write_id: int, reason: str, now: float) -> list[ProducerAction]:
        """The write failed during or after its post: parts of it may still arrive."""
        transfer, delivery = self._writes.pop(write_id)
        delivery.in_flight.pop(write_id)
        actions: list[ProducerAction] = []
        peer, consumer = delivery.peer, self._consumers.get(delivery.peer)
        # A worker with a write in flight is removed only if it is dead: it sends no more messages.
        if consumer is not None and transfer.transfer_id not in self._failed.get(peer, ()):
            self._failed.setdefault(peer, {})[transfer.transfer_id] = f"a write failed: {reason}"
            if consumer.was_seen:
                self._suspects[peer] = Suspect(peer, consumer.process, True, None)
            actions.append(self._failure(peer, transfer.transfer_id))
        return actions + self._end(transfer, delivery, f"a write failed: {reason}", now)

    def write_posted(self, write_id: int, total_bytes: int) -> None:
        _, delivery = self._writes[write_id]
        delivery.in_flight[write_id] = total_bytes

    def tick(self, now: float) -> list[ProducerAction]:
        """Apply deadlines. Call it at least every alive_s / 2."""
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
        actions: list[ProducerAction] = []
        transfer.check_at = float("inf") if transfer.stage is Stage.LIVE else transfer.since + self._limits.lease_s
        for delivery in transfer.deliveries.values():
            awaits_start = delivery.awaits_start and not delivery.closed
            if (delivery.offer is None and not awaits_start) or delivery.closed or transfer.request_id is None:
                continue
            # No Alive while a write makes no progress: the consumer's progress_s must end its wait.
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
        progress_at = max(self._stepped_at, transfer.since)
        return transfer.stage is Stage.LIVE and now - progress_at >= self._limits.step_s

    def _give_up_hanging_writes(self, now: float) -> list[ProducerAction]:
        actions: list[ProducerAction] = []
        for transfer, delivery in list(self._writes.values()):
            if not delivery.hangs and now - delivery.moved_at >= self._limits.hang_s:
                delivery.hangs = True
                reason = f"a write made no progress for {self._limits.hang_s:g} s"
                actions += self._end(transfer, delivery, reason, now)
        return actions

    def _forget_silent_peers(self, now: float) -> list[ProducerAction]:
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
        counts = {stage.name.lower(): 0 for stage in Stage}
        for transfer in self._transfers.values():
            counts[transfer.stage.name.lower()] += 1
        hanging = sum(delivery.hangs for _, delivery in self._writes.values())
        return counts | {"writes": len(self._writes), "remembered": len(self._gone), "hanging": hanging}

    @property
    def busy(self) -> bool:
        """True if a transfer is open, in any stage. Writes of ended transfers do not count."""
        return bool(self._transfers)
