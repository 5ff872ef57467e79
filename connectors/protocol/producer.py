"""The producer's side of every transfer of one worker. Sans-I/O: events and ``now`` in, actions out.

A *transfer* is one request's KV for one consumer engine; each consumer rank that talks to this rank has a *delivery*.

    transfer   on                        becomes
    -------------------------------------------------------------------------------------
    (none)     Offer, Cancel             ORPHAN   the consumer is early: remembered for lease_s
    (none)     expect                    LIVE     the request waits or is being computed
    ORPHAN     expect                    LIVE
    ORPHAN     lease_s                   gone     open deliveries: Aborted
    LIVE       finished, held            HELD     blocks stay allocated, under a lease
    LIVE       finished, not held        gone     open deliveries: Aborted once their writes have ended
    HELD       all deliveries closed     gone     Sent: the scheduler may free the blocks
    HELD       lease_s, no offer         gone     Sent

    delivery   on                        becomes
    -------------------------------------------------------------------------------------
    AWAITED    Offer                     OPEN     what is complete is written at once, the rest chunk by chunk
    AWAITED    Cancel                    CLOSED   Cancelled
    OPEN       all written               CLOSED   Fin
    OPEN       Cancel                    CLOSED   Cancelled, once its writes have ended
    OPEN       a failure                 CLOSED   Aborted, once its writes have ended

A delivery that is closed is never written for again: its Fin, Aborted or Cancelled is the consumer's licence to use or
free its blocks. Ids of transfers that are gone are remembered for lease_s; offers for them are answered with Aborted,
but nothing is answered while a write for that consumer rank is still in flight.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

import numpy as np

from connectors.planning.blocks import NULL_BLOCK, BlockSet, complete_positions, first_needed_token
from connectors.planning.descriptors import BlockMoves
from connectors.planning.layout import Group
from connectors.protocol.limits import TransferLimits
from connectors.protocol.wire import Aborted, Alive, Cancel, Cancelled, Fin, Message, Offer, Peer


@dataclass(frozen=True, slots=True)
class Send:
    """Send ``message`` to ``peer``. Losing it is allowed: deadlines cover that."""

    peer: Peer
    message: Message


@dataclass(frozen=True, slots=True)
class Write:
    """Write these blocks to ``peer`` and report ``write_done`` or ``write_failed`` with ``write_id``."""

    write_id: int
    transfer_id: str
    peer: Peer
    moves: tuple[BlockMoves, ...]


@dataclass(frozen=True, slots=True)
class Sent:
    """This rank needs the request's blocks no longer."""

    request_id: str


Action = Send | Write | Sent


@dataclass(frozen=True, slots=True)
class Consumer:
    """What the producer knows of a consumer worker after its Hello.

    ``partner_ranks`` are the ranks of that engine which talk to this producer rank, ``num_blocks`` its pool's size.
    """

    partner_ranks: frozenset[int]
    num_blocks: int


class _Stage(Enum):
    ORPHAN = auto()
    LIVE = auto()
    HELD = auto()


@dataclass(slots=True)
class _Delivery:
    """``pending[g]`` are the offered blocks of group g that have not been written yet.

    ``in_flight`` are the writes under way and their bytes; ``moved_at`` is when one was last posted or done.
    """

    peer: Peer
    offer: Offer | None = None
    pending: list[BlockSet] = field(default_factory=list)
    in_flight: dict[int, int] = field(default_factory=dict)
    written_bytes: int = 0
    ending: Message | None = None
    closed: bool = False
    last_sent: float = 0.0
    moved_at: float = 0.0


@dataclass(slots=True)
class _Transfer:
    transfer_id: str
    stage: _Stage
    since: float
    request_id: str | None = None
    prompt_tokens: int = 0
    prompt_digest: str = ""
    computed_tokens: int = 0
    tables: list[list[int]] = field(default_factory=list)
    consumer: str | None = None
    expected_ranks: frozenset[int] | None = None
    deliveries: dict[int, _Delivery] = field(default_factory=dict)

    def delivered(self) -> bool:
        """Every rank of the consumer that was to be served has been, or wants nothing."""
        return self.expected_ranks is not None and all(
            rank in self.deliveries and self.deliveries[rank].closed for rank in self.expected_ranks
        )


class Producer:
    """All transfers that one worker produces. Not thread-safe; its owner serialises calls."""

    def __init__(self, groups: Sequence[Group], limits: TransferLimits) -> None:
        self._groups = tuple(groups)
        self._limits = limits
        self._consumers: dict[Peer, Consumer] = {}
        self._transfers: dict[str, _Transfer] = {}
        self._by_request: dict[str, _Transfer] = {}
        self._writes: dict[int, tuple[_Transfer, _Delivery]] = {}
        self._gone: dict[str, float] = {}
        self._next_write_id = 0

    # ---- what the scheduler says -------------------------------------------------------------------------------

    def expect(
        self, request_id: str, transfer_id: str, prompt_tokens: int, prompt_digest: str, now: float
    ) -> list[Action]:
        """A request that is to be produced has reached this engine."""
        transfer = self._transfers.get(transfer_id)
        if transfer_id in self._gone or (transfer is not None and transfer.stage is not _Stage.ORPHAN):
            # The id has been used. The request runs, and its blocks are given back as soon as it has finished.
            transfer = _Transfer(transfer_id, _Stage.LIVE, now, expected_ranks=frozenset())
        elif transfer is None:
            transfer = self._transfers[transfer_id] = _Transfer(transfer_id, _Stage.LIVE, now)
        transfer.stage, transfer.since, transfer.request_id = _Stage.LIVE, now, request_id
        transfer.prompt_tokens, transfer.prompt_digest = prompt_tokens, prompt_digest
        transfer.tables = [[] for _ in self._groups]
        self._by_request[request_id] = transfer
        return self._advance(transfer, now)

    def progress(
        self, request_id: str, new_ids: Sequence[Sequence[int]], computed_tokens: int, now: float
    ) -> list[Action]:
        """A chunk is computed: KV of ``computed_tokens`` tokens is there. ``new_ids[g]`` extend group g's table."""
        transfer = self._by_request.get(request_id)
        if transfer is None:
            return []
        for table, ids in zip(transfer.tables, new_ids, strict=True):
            table.extend(ids)
        transfer.computed_tokens = computed_tokens
        return self._advance(transfer, now)

    def preempted(self, request_id: str, now: float) -> list[Action]:
        """The request's blocks were taken back; it will be computed again, into other blocks.

        Deliveries whose writes still read the old blocks (``writes_in_flight``) are given up: they may carry bytes of
        whoever owns the blocks next. What had been written before stays right.
        """
        transfer = self._by_request.get(request_id)
        if transfer is None:
            return []
        transfer.tables = [[] for _ in self._groups]
        transfer.computed_tokens = 0
        actions: list[Action] = []
        for delivery in transfer.deliveries.values():
            if delivery.in_flight:
                actions += self._end(transfer, delivery, "the prefill was preempted during a write", now)
        return actions

    def finished(self, request_id: str, held: bool, reason: str, now: float) -> list[Action]:
        """The request has ended. Its blocks stay allocated until ``Sent`` if ``held``; if not, ``reason`` says why."""
        transfer = self._by_request.get(request_id)
        if transfer is None:
            return [Sent(request_id)] if held else []
        transfer.since = now
        if held:
            transfer.stage = _Stage.HELD
            return self._advance(transfer, now)
        del self._by_request[request_id]
        transfer.request_id = None
        actions: list[Action] = []
        for delivery in list(transfer.deliveries.values()):
            actions += self._end(transfer, delivery, reason, now)
        self._forget(transfer, now)
        return actions

    def writes_in_flight(self, request_id: str) -> tuple[int, ...]:
        """Ids of the writes that read this request's blocks."""
        transfer = self._by_request.get(request_id)
        if transfer is None:
            return ()
        return tuple(write_id for delivery in transfer.deliveries.values() for write_id in delivery.in_flight)

    # ---- what peers say ----------------------------------------------------------------------------------------

    def welcome(self, peer: Peer, consumer: Consumer) -> None:
        """A consumer worker has said hello and fits."""
        self._consumers[peer] = consumer

    def knows(self, peer: Peer) -> bool:
        return peer in self._consumers

    def message(self, peer: Peer, message: Message, now: float) -> list[Action]:
        """A message of a consumer that has been welcomed."""
        match message:
            case Offer():
                return self._offered(peer, message, now)
            case Cancel():
                return self._cancelled(peer, message.transfer_id, now)
        return []

    def peer_lost(self, peer: Peer, now: float) -> list[Action]:
        """The consumer worker is gone. Its writes end by themselves (done or failed); nobody is answered."""
        self._consumers.pop(peer, None)
        actions: list[Action] = []
        for transfer in list(self._transfers.values()):
            delivery = transfer.deliveries.get(peer.rank)
            if delivery is not None and delivery.peer == peer:
                actions += self._end(transfer, delivery, "the consumer is gone", now)
        return actions

    # ---- what the transport and the clock say ------------------------------------------------------------------

    def write_done(self, write_id: int, now: float) -> list[Action]:
        transfer, delivery = self._writes.pop(write_id)
        delivery.written_bytes += delivery.in_flight.pop(write_id)
        delivery.moved_at = now
        return self._advance(transfer, now)

    def write_failed(self, write_id: int, reason: str, now: float) -> list[Action]:
        transfer, delivery = self._writes.pop(write_id)
        delivery.in_flight.pop(write_id)
        return self._end(transfer, delivery, f"a write failed: {reason}", now)

    def write_posted(self, write_id: int, total_bytes: int) -> None:
        """The transport has taken the write; ``total_bytes`` are counted into Fin when it is done."""
        _, delivery = self._writes[write_id]
        delivery.in_flight[write_id] = total_bytes

    def tick(self, now: float) -> list[Action]:
        """Deadlines. Call it at least every alive_s / 2."""
        actions: list[Action] = []
        for transfer in list(self._transfers.values()):
            for delivery in transfer.deliveries.values():
                waiting = delivery.offer is not None and not delivery.closed and transfer.request_id is not None
                # A write that hangs is no sign of life: the consumer's progress_s must end its wait.
                hangs = delivery.in_flight and now - delivery.moved_at >= self._limits.progress_s
                if waiting and not hangs and now - delivery.last_sent >= self._limits.alive_s:
                    delivery.last_sent = now
                    actions.append(Send(delivery.peer, Alive(transfer.transfer_id)))
            if transfer.stage is not _Stage.LIVE and now - transfer.since >= self._limits.lease_s:
                actions += self._expire(transfer, now)
        for transfer_id in [i for i, at in self._gone.items() if now - at >= self._limits.lease_s]:
            del self._gone[transfer_id]
        return actions

    def census(self) -> dict[str, int]:
        """How much is under way: transfers by stage, writes in flight, ids remembered."""
        counts = {stage.name.lower(): 0 for stage in _Stage}
        for transfer in self._transfers.values():
            counts[transfer.stage.name.lower()] += 1
        return counts | {"writes": len(self._writes), "remembered": len(self._gone)}

    # ---- inside ------------------------------------------------------------------------------------------------

    def _offered(self, peer: Peer, offer: Offer, now: float) -> list[Action]:
        if self._being_written(peer, offer.transfer_id):
            return []
        transfer = self._transfer_for(peer, offer.transfer_id, now)
        if transfer is None:
            return [Send(peer, Aborted(offer.transfer_id, "this transfer has ended or belongs to another consumer"))]
        delivery = transfer.deliveries.setdefault(peer.rank, _Delivery(peer))
        if delivery.closed:
            # Not with the Fin of the first offer: it would vouch for blocks that nobody has written.
            return [Send(peer, Aborted(offer.transfer_id, "this transfer has been offered for before"))]
        if delivery.offer is not None:
            return []
        delivery.offer, delivery.pending, delivery.last_sent = offer, list(offer.groups), now
        return self._advance(transfer, now)

    def _cancelled(self, peer: Peer, transfer_id: str, now: float) -> list[Action]:
        for delivery in self._being_written(peer, transfer_id):
            delivery.ending, delivery.pending = Cancelled(transfer_id), []
            return []
        transfer = self._transfer_for(peer, transfer_id, now)
        if transfer is None:
            return [Send(peer, Cancelled(transfer_id))]
        delivery = transfer.deliveries.setdefault(peer.rank, _Delivery(peer))
        if delivery.closed:
            return [Send(peer, Cancelled(transfer_id))]
        delivery.ending = Cancelled(transfer_id)
        delivery.pending = []
        return self._advance(transfer, now)

    def _being_written(self, peer: Peer, transfer_id: str) -> list[_Delivery]:
        """The delivery that writes are under way for, even if its transfer is gone: it is answered when they end."""
        return [
            delivery
            for transfer, delivery in self._writes.values()
            if delivery.peer == peer and transfer.transfer_id == transfer_id
        ][:1]

    def _transfer_for(self, peer: Peer, transfer_id: str, now: float) -> _Transfer | None:
        """The transfer that ``peer`` may speak of; made anew where its request has not come yet."""
        if transfer_id in self._gone:
            return None
        transfer = self._transfers.get(transfer_id)
        if transfer is None:
            transfer = self._transfers[transfer_id] = _Transfer(transfer_id, _Stage.ORPHAN, now)
        if transfer.consumer is None:
            transfer.consumer = peer.incarnation
            transfer.expected_ranks = self._consumers[peer].partner_ranks
        return transfer if transfer.consumer == peer.incarnation else None

    def _advance(self, transfer: _Transfer, now: float) -> list[Action]:
        """Post what can be written, close what is complete, release what is delivered."""
        actions: list[Action] = []
        for delivery in list(transfer.deliveries.values()):
            if not delivery.closed:
                actions += self._advance_delivery(transfer, delivery, now)
        if transfer.stage is _Stage.HELD and transfer.delivered():
            actions += self._release(transfer, now)
        return actions

    def _advance_delivery(self, transfer: _Transfer, delivery: _Delivery, now: float) -> list[Action]:
        actions: list[Action] = []
        offer = delivery.offer
        if delivery.ending is None and offer is not None and transfer.request_id is not None:
            problem = self._problem(transfer, delivery.peer, offer)
            moves = None if problem else self._ready_moves(transfer, delivery, offer)
            if moves is None:
                delivery.ending = Aborted(
                    transfer.transfer_id, problem or "the prefill engine no longer holds a block that is wanted"
                )
            elif moves:
                self._next_write_id += 1
                delivery.in_flight[self._next_write_id] = 0
                delivery.moved_at = now
                self._writes[self._next_write_id] = (transfer, delivery)
                actions.append(Write(self._next_write_id, transfer.transfer_id, delivery.peer, tuple(moves)))
            elif transfer.computed_tokens >= offer.end_token and not delivery.in_flight:
                delivery.ending = Fin(transfer.transfer_id, delivery.written_bytes)
        if delivery.ending is not None and not delivery.in_flight:
            delivery.closed = True
            delivery.pending = []
            if delivery.peer in self._consumers:
                actions.append(Send(delivery.peer, delivery.ending))
        return actions

    def _problem(self, transfer: _Transfer, peer: Peer, offer: Offer) -> str | None:
        """Why an offer cannot be served at all."""
        if offer.prompt_digest != transfer.prompt_digest:
            return "the two requests of this transfer have different prompts"
        if offer.end_token > transfer.prompt_tokens:
            return f"{offer.end_token} tokens are wanted of a prompt of {transfer.prompt_tokens}"
        if len(offer.groups) != len(self._groups):
            return f"blocks are offered for {len(offer.groups)} KV cache groups, the model has {len(self._groups)}"
        consumer = self._consumers.get(peer)
        if consumer is None:
            return "the consumer is gone"
        for group, blocks in zip(self._groups, offer.groups, strict=True):
            if not len(blocks):
                continue
            if int(blocks.ids.max()) >= consumer.num_blocks:
                return f"block {int(blocks.ids.max())} does not exist in the consumer's pool"
            if int(blocks.positions[-1]) * group.block_tokens >= offer.end_token:
                return f"a block of group {group.index} lies behind the last token that is wanted"
            kept = first_needed_token(group, max(0, transfer.prompt_tokens - 1)) // group.block_tokens
            if int(blocks.positions[0]) < kept:
                # The table still names it, but the allocator may have given it to another request.
                return f"a block of group {group.index} lies before the window that the prompt ends with"
        return None

    def _ready_moves(self, transfer: _Transfer, delivery: _Delivery, offer: Offer) -> list[BlockMoves] | None:
        """Take the pending blocks whose tokens are all computed. None where a source block is gone for good."""
        moves: list[BlockMoves] = []
        for group, table in zip(self._groups, transfer.tables, strict=True):
            pending = delivery.pending[group.index]
            if not len(pending):
                continue
            ready = complete_positions(
                pending.positions, group.block_tokens, transfer.computed_tokens, offer.end_token
            ) & (pending.positions < len(table))
            if not ready.any():
                continue
            positions = pending.positions[ready]
            src_ids = np.fromiter((table[p] for p in positions.tolist()), np.int64, len(positions))
            if (src_ids == NULL_BLOCK).any():
                return None
            moves.append(BlockMoves(group.index, src_ids, pending.ids[ready]))
            delivery.pending[group.index] = BlockSet(pending.positions[~ready], pending.ids[~ready])
        return moves

    def _end(self, transfer: _Transfer, delivery: _Delivery, reason: str, now: float) -> list[Action]:
        """Give a delivery up; its consumer hears of it once no write is under way."""
        if delivery.closed:
            return []
        if delivery.ending is None:
            delivery.ending = Aborted(transfer.transfer_id, reason)
        delivery.pending = []
        return self._advance(transfer, now)

    def _expire(self, transfer: _Transfer, now: float) -> list[Action]:
        """The lease is over: nobody came (HELD), or the request did not (ORPHAN). Writes in flight still end first."""
        reason = "the lease has expired" if transfer.stage is _Stage.HELD else "the prefill request never came"
        actions: list[Action] = []
        for delivery in transfer.deliveries.values():
            if not delivery.closed and not delivery.in_flight:
                actions += self._end(transfer, delivery, reason, now)
        if any(delivery.in_flight for delivery in transfer.deliveries.values()):
            return actions
        if transfer.transfer_id not in self._transfers:
            return actions
        if transfer.stage is _Stage.HELD:
            return actions + self._release(transfer, now)
        self._forget(transfer, now)
        return actions

    def _release(self, transfer: _Transfer, now: float) -> list[Action]:
        assert transfer.request_id is not None
        request_id = transfer.request_id
        self._by_request.pop(request_id, None)
        transfer.request_id = None
        self._forget(transfer, now)
        return [Sent(request_id)]

    def _forget(self, transfer: _Transfer, now: float) -> None:
        if self._transfers.get(transfer.transfer_id) is transfer:
            del self._transfers[transfer.transfer_id]
            self._gone[transfer.transfer_id] = now


def written(actions: Iterable[Action]) -> list[Write]:
    """The writes among some actions."""
    return [action for action in actions if isinstance(action, Write)]
