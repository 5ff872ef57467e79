"""State and messages of the producer, ends of peers, and transitions shared in ``producer.py``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from connectors.planning.descriptors import Moves
from connectors.planning.layout import Group
from connectors.protocol.actions import ProducerAction, Send, Sent, Write
from connectors.protocol.delivery import MAX_EARLY, Allowance, ConsumerPeer, Delivery, Gone, Stage, Transfer, take
from connectors.protocol.engines import Suspect
from connectors.protocol.limits import TransferLimits
from connectors.protocol.wire import Aborted, AwaitStart, Cancel, Cancelled, Failed, Fin, Offer, Peer, Starting


class Production:
    """Base class of ``Producer``: transfers, deliveries and writes, their progress and end.

    ``late_orders``  whether a step may overwrite blocks before the owner reports which requests
                     have lost theirs (``preempted``, ``finished``; then ``orders_applied``). True
                     with vLLM's V2 model runner
    """

    def __init__(self, groups: Sequence[Group], limits: TransferLimits, late_orders: bool = False) -> None:
        self._groups = tuple(groups)
        self._limits = limits
        self._late_orders = late_orders
        # Latest time, in seconds, at which the blocks of every live request are known to be intact.
        self._intact_at = float("-inf")
        # Transfers with a complete delivery whose Fin must wait for ``orders_applied``, by id.
        self._unconfirmed: dict[str, Transfer] = {}
        self._consumers: dict[Peer, ConsumerPeer] = {}
        # Ordered by the time of the last message, oldest first; with lost peers until their Forget.
        self._heard_at: dict[Peer, float] = {}
        self._lost: dict[Peer, None] = {}
        self._transfers: dict[str, Transfer] = {}
        self._by_request: dict[str, Transfer] = {}
        self._writes: dict[int, tuple[Transfer, Delivery]] = {}
        # Ordered by end time: all expire after lease_s.
        self._gone: dict[str, Gone] = {}
        # Reasons of failed writes, by consumer worker and transfer id. The consumer's pool bounds
        # their number: the consumer quarantines at least one block for each.
        self._failed: dict[Peer, dict[str, str]] = {}
        # Those of these workers whose end this host can prove.
        self._suspects: dict[Peer, Suspect] = {}
        self._overtaken: dict[Peer, int] = {}
        self._allowance = Allowance()
        self._last_write_id = 0
        self._stepped_at = float("-inf")

    def _heard(self, peer: Peer, now: float) -> None:
        self._heard_at.pop(peer, None)
        self._heard_at[peer] = now

    def engine_lost(self, incarnation: str, now: float) -> list[ProducerAction]:
        known = [peer for peer in {**self._consumers, **self._failed} if peer.incarnation == incarnation]
        return [action for peer in known for action in self.worker_lost(peer, now)]

    def worker_lost(self, peer: Peer, now: float) -> list[ProducerAction]:
        self._failed.pop(peer, None)
        self._suspects.pop(peer, None)
        return self.peer_lost(peer, now)

    def suspects(self) -> set[Suspect]:
        """Consumer workers with failed writes whose end this host can prove."""
        return set(self._suspects.values())

    def engines(self) -> set[str]:
        return {peer.incarnation for peer in (*self._heard_at, *self._failed)}

    def peer_lost(self, peer: Peer, now: float) -> list[ProducerAction]:
        """A consumer worker is dead or evicted: abort its deliveries after their writes."""
        if self._consumers.pop(peer, None) is not None:
            self._lost[peer] = None
        actions: list[ProducerAction] = []
        for transfer in list(self._transfers.values()):
            delivery = transfer.deliveries.get(peer.rank)
            if delivery is not None and delivery.peer == peer:
                actions += self._end(transfer, delivery, "the consumer worker has ended or has been removed", now)
        return actions

    def _claimed(self, peer: Peer, message: AwaitStart | Offer, now: float) -> tuple[Transfer, Delivery] | str:
        """Return what a message may change, or a reason for an Aborted; an empty one: no answer."""
        if self._being_written(peer, message.transfer_id) or self._too_early(peer, message.transfer_id):
            return ""
        if message.number <= self._overtaken.get(peer, -1):
            return f"{type(message).__name__} arrived after its transfer had ended and been forgotten"
        transfer = self._transfer_for(peer, message, now)
        if transfer is None:
            return "this transfer has ended or belongs to another consumer"
        delivery = transfer.deliveries.setdefault(peer.rank, Delivery(peer))
        if delivery.closed:
            # Do not repeat the first offer's Fin: this offer's blocks have not been written.
            return "the delivery to this rank has already ended"
        return "" if delivery.offer is not None else (transfer, delivery)

    def _awaits_start(self, peer: Peer, message: AwaitStart, now: float) -> list[ProducerAction]:
        claimed = self._claimed(peer, message, now)
        if isinstance(claimed, str):
            return [Send(peer, Aborted(message.transfer_id, claimed))] if claimed else []
        transfer, delivery = claimed
        delivery.awaits_start = True
        delivery.last_sent = transfer.check_at = now
        return [Send(peer, Starting(transfer.transfer_id))] if transfer.starting else []

    def _offered(self, peer: Peer, offer: Offer, now: float) -> list[ProducerAction]:
        claimed = self._claimed(peer, offer, now)
        if isinstance(claimed, str):
            return [Send(peer, Aborted(offer.transfer_id, claimed))] if claimed else []
        transfer, delivery = claimed
        delivery.awaits_start = False
        delivery.last_sent = transfer.check_at = now
        if not self._allowance.take_offer(delivery, offer, self._consumers[peer].num_blocks):
            return self._end(transfer, delivery, "the open offers have more blocks than the consumer's pool", now)
        return self._advance(transfer, now)

    def _cancelled(self, peer: Peer, cancel: Cancel, now: float) -> list[ProducerAction]:
        transfer_id = cancel.transfer_id
        for delivery in self._being_written(peer, transfer_id):
            delivery.ending, delivery.pending = Cancelled(transfer_id), None
            return []
        if self._too_early(peer, transfer_id):
            return []
        transfer = self._transfer_for(peer, cancel, now)
        if transfer is None:
            return [Send(peer, Cancelled(transfer_id))]
        delivery = transfer.deliveries.setdefault(peer.rank, Delivery(peer))
        if delivery.closed:
            return [Send(peer, Cancelled(transfer_id))]
        delivery.ending = Cancelled(transfer_id)
        delivery.pending = None
        return self._advance(transfer, now)

    def _being_written(self, peer: Peer, transfer_id: str) -> list[Delivery]:
        """[the delivery to ``peer``] if it has writes, even of an ended transfer."""
        return [
            delivery
            for transfer, delivery in self._writes.values()
            if delivery.peer == peer and transfer.transfer_id == transfer_id
        ][:1]

    def _too_early(self, peer: Peer, transfer_id: str) -> bool:
        known = transfer_id in self._transfers or transfer_id in self._gone
        return not known and self._allowance.early[peer.incarnation] >= MAX_EARLY

    def _transfer_for(self, peer: Peer, message: AwaitStart | Offer | Cancel, now: float) -> Transfer | None:
        """Return the open transfer that ``peer`` may change, or None. Record the number."""
        transfer_id = message.transfer_id
        gone, transfer = self._gone.get(transfer_id), self._transfers.get(transfer_id)
        if gone is None and transfer is None:
            transfer = self._transfers[transfer_id] = Transfer(transfer_id, Stage.EARLY, now)
        for known in (gone, transfer):
            if known is not None:
                known.numbers[peer] = max(message.number, known.numbers.get(peer, 0))
        if gone is not None or transfer is None:
            return None
        if transfer.consumer is None:
            transfer.consumer = peer.incarnation
            transfer.expected_ranks = self._consumers[peer].partner_ranks
            self._allowance.count_early(transfer, 1)
        return transfer if transfer.consumer == peer.incarnation else None

    def orders_applied(self, now: float) -> list[ProducerAction]:
        """Handle the start of a step, after all requests that have lost their blocks are reported:
        finished writes for the others have read their KV, so their Fins can be sent.
        """
        self._intact_at = now
        unconfirmed, self._unconfirmed = self._unconfirmed, {}
        actions: list[ProducerAction] = []
        for transfer in unconfirmed.values():
            if transfer.request_id is not None:  # else its end has released it meanwhile
                actions += self._advance(transfer, now)
        return actions

    def _advance(self, transfer: Transfer, now: float) -> list[ProducerAction]:
        """Write computed units, close deliveries, and release a held transfer that is delivered."""
        actions: list[ProducerAction] = []
        for delivery in list(transfer.deliveries.values()):
            if not delivery.closed:
                try:
                    actions += self._serve(transfer, delivery, now)
                except Exception as error:  # for example, no memory. Other deliveries' writes must not be lost
                    delivery.ending = Aborted(transfer.transfer_id, cannot_serve(error))
                actions += self._close(transfer, delivery)
        if transfer.stage is Stage.HELD and transfer.delivered():
            actions += self._release(transfer, now)
        return actions

    def _serve(self, transfer: Transfer, delivery: Delivery, now: float) -> list[Write]:
        offer = delivery.offer
        if delivery.ending is not None or offer is None or transfer.request_id is None:
            return []
        problem, moves = take(transfer, delivery, offer, self._groups, self._consumers.get(delivery.peer))
        if problem is not None:
            delivery.ending = Aborted(transfer.transfer_id, problem)
        elif moves:
            return [self._write(transfer, delivery, moves, now)]
        elif delivery.taken(transfer) and not delivery.in_flight and not self._intact(transfer, delivery):
            self._unconfirmed[transfer.transfer_id] = transfer
        elif delivery.taken(transfer) and not delivery.in_flight:
            problem = delivery.missing()
            digest = "" if delivery.digest is None else delivery.digest.hexdigest()
            fin = Fin(transfer.transfer_id, delivery.written_bytes, digest)
            delivery.ending = fin if problem is None else Aborted(transfer.transfer_id, problem)
        return []

    def _close(self, transfer: Transfer, delivery: Delivery) -> list[Send]:
        if delivery.ending is None or delivery.in_flight:
            return []
        delivery.closed = True
        delivery.offer = delivery.pending = delivery.digest = None
        self._allowance.give_back(delivery)
        failed = transfer.transfer_id in self._failed.get(delivery.peer, ())
        return [Send(delivery.peer, delivery.ending)] if delivery.peer in self._consumers and not failed else []

    def _intact(self, transfer: Transfer, delivery: Delivery) -> bool:
        """Return whether the finished writes of a delivery are known to have read its request's KV.

        With late orders, a write that finished after the last ``orders_applied`` may have read
        blocks that the next step already overwrites, unless the request's blocks are held.
        """
        held = transfer.stage is Stage.HELD
        return not self._late_orders or held or delivery.moved_at < self._intact_at

    def _write(self, transfer: Transfer, delivery: Delivery, moves: Sequence[Moves], now: float) -> Write:
        write_id = self._new_write_id(delivery.peer)
        delivery.begin_write(write_id, now)
        self._writes[write_id] = (transfer, delivery)
        return Write(write_id, transfer.transfer_id, delivery.peer, tuple(moves), delivery.digest)

    def _failure(self, peer: Peer, transfer_id: str) -> Send:
        return Send(peer, Failed(transfer_id, self._failed[peer][transfer_id]))

    def _new_write_id(self, peer: Peer) -> int:
        self._last_write_id += 1
        return self._last_write_id

    def _end(self, transfer: Transfer, delivery: Delivery, reason: str, now: float) -> list[ProducerAction]:
        return self._end_all(transfer, reason, now, lambda each: each is delivery)

    def _end_all(
        self, transfer: Transfer, reason: str, now: float, which: Callable[[Delivery], object] = lambda _: True
    ) -> list[ProducerAction]:
        """End the deliveries that ``which`` selects, with ``reason`` unless they have another one.

        All are marked before ``_advance``, which would otherwise serve the later ones.
        """
        chosen = [each for each in transfer.deliveries.values() if not each.closed and which(each)]
        for delivery in chosen:
            delivery.ending = delivery.ending or Aborted(transfer.transfer_id, reason)
            delivery.pending = None
        return self._advance(transfer, now) if chosen else []

    def _expire(self, transfer: Transfer, now: float) -> list[ProducerAction]:
        reason = (
            "the lease expired before an offer arrived"
            if transfer.stage is Stage.HELD
            else "the prefill request did not arrive in time"
        )
        actions = self._end_all(transfer, reason, now, lambda delivery: not delivery.in_flight)
        if any(delivery.in_flight for delivery in transfer.deliveries.values()):
            return actions
        if transfer.transfer_id not in self._transfers:
            return actions
        if transfer.stage is Stage.HELD:
            return actions + self._release(transfer, now)
        self._forget(transfer, now)
        return actions

    def _release(self, transfer: Transfer, now: float) -> list[ProducerAction]:
        assert transfer.request_id is not None
        request_id = transfer.request_id
        self._by_request.pop(request_id, None)
        transfer.request_id = None
        self._forget(transfer, now)
        return [Sent(request_id)]

    def _forget(self, transfer: Transfer, now: float) -> None:
        if self._transfers.get(transfer.transfer_id) is transfer:
            del self._transfers[transfer.transfer_id]
            self._allowance.count_early(transfer, -1)
            self._gone[transfer.transfer_id] = Gone(now, transfer.numbers)


def cannot_serve(error: Exception) -> str:
    return f"the prefill worker cannot serve the offer: {error!r}"
