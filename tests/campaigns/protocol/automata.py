"""The two machines as automata: numbered states, and each event's result in a state computed once.

The key of a machine's state determines its future behaviour. So it omits irrelevant parts (texts,
the content of a closed delivery) and keeps of a point in time only how many *jumps* ago it was. One
jump of a machine's clock passes one unit of time; deadlines are one or two units long. Every rank's
clock jumps separately, so every deadline fires at every moment at which it can fire for any speed
of any clock.
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from connectors.codec import encode
from connectors.planning.blocks import Ints
from connectors.protocol.actions import Connect, Due, Freed, Received, Send, Sent, Verify, Write
from connectors.protocol.consumer import Consumer
from connectors.protocol.delivery import Delivery, Stage, Transfer
from connectors.protocol.params import EngineAddress
from connectors.protocol.producer import Producer
from connectors.protocol.reception import GIVEN_UP
from connectors.protocol.wire import Aborted, Alive, Envelope, Failed, Fin, Message, Peer

Tag = tuple[object, ...]
Cell = tuple[int, int]
"""(block id, layer)"""

STRANGER: Tag = ("somebody else's",)
LAYERS = 2
UNIT_BYTES = (16, 8)
CAP = 2
"""No deadline is longer than two jumps."""
FOREVER = float("inf")
FRESH = 10_000
WIDS = 100
"""Ids of writes to consumer rank c start at ``c * WIDS``, so a swap of ranks maps them directly."""


class Ambient:
    """The memory that digests read while a machine is called."""

    cells: dict[Cell, Tag] = {}  # noqa: RUF012


class CellDigest:
    """Digest of the tags of some cells, in the order in which they were added, layer by layer."""

    def __init__(self) -> None:
        self.seen: dict[tuple[int, int], tuple[Tag, ...]] = {}

    def add(self, group: int, ids: Ints, parts: Ints, layers: tuple[int, int] | None = None) -> None:
        first, stop = layers or (0, LAYERS)
        for layer in range(first, min(stop, LAYERS)):
            tags = tuple(Ambient.cells.get((block, layer), STRANGER) for block in ids.tolist())
            self.seen[group, layer] = self.seen.get((group, layer), ()) + tags

    def ready(self) -> bool:
        return True

    def hexdigest(self) -> str:
        return repr(sorted((key, tags) for key, tags in self.seen.items() if tags))


class Broken(AssertionError):
    """A promise was broken, or a machine raised."""


@dataclass(frozen=True, slots=True)
class Posted:
    """A write: the cells that it fills, their sources, and the sources' content at its post."""

    wid: int
    consumer: int
    cells: tuple[tuple[Cell, Cell, Tag], ...]


Event = tuple[Any, ...]
"""(method, arguments, number of the memory); a message is (rank of the sender, number of the
letter).
"""

Outcome = tuple[int, tuple[Any, ...]]
ENGINE = EngineAddress("prefill", "host", 1)
DECODE = "decode"


class Letters:
    """Messages, numbered: they contain arrays, which have no hash."""

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {}
        self.messages: list[Message] = []

    def number(self, message: Message) -> int:
        """Reasons are texts without effect, so they are omitted."""
        if isinstance(message, Aborted | Failed):
            message = replace(message, reason="")
        frame = encode(Envelope(Peer("", 0), Peer("", 0), message))
        if frame not in self._numbers:
            self._numbers[frame] = len(self.messages)
            self.messages.append(message)
        return self._numbers[frame]


class Automaton:
    """``call`` applies an event to a machine and returns the actions for the world; ``key``
    identifies its state.
    """

    def __init__(self, call: Callable[[Any, Event], list[Any]], key: Callable[[Any], object]) -> None:
        self._call, self._key = call, key
        self._numbers: dict[object, int] = {}
        self._pickles: list[bytes] = []
        self._outcomes: dict[tuple[int, Event], Outcome] = {}
        self._derived: dict[tuple[int, Callable[[Any], Any]], Any] = {}

    def number(self, machine: Any) -> int:
        key = self._key(machine)
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self._pickles)
            self._pickles.append(pickle.dumps(machine, pickle.HIGHEST_PROTOCOL))
        return number

    def machine(self, number: int) -> Any:
        return pickle.loads(self._pickles[number])

    def on(self, number: int, event: Event) -> Outcome:
        found = self._outcomes.get((number, event))
        if found is None:
            machine = self.machine(number)
            try:
                actions = tuple(self._call(machine, event))
            except Exception as error:
                raise Broken(f"a machine raised {error!r} on {event}") from error
            found = self._outcomes[number, event] = (self.number(machine), actions)
        return found

    def derive(self, number: int, what: Callable[[Any], Any]) -> Any:
        """Return a property of a state or, if ``what`` changes the machine and returns None, the
        resulting state.
        """
        found = self._derived.get((number, what))
        if found is None:
            machine = self.machine(number)
            found = what(machine)
            if found is None:
                found = self.number(machine)
            self._derived[number, what] = found
        return found


# ---- the producer ------------------------------------------------------------------------------


class ExplorableProducer(Producer):
    """A producer whose state can be identified, aged and permuted, and whose write ids are small.

    The exploration enumerates states, so it must read and change all of a machine: it extends the
    machine. Other code reads ``snapshot()``.
    """

    def _new_write_id(self, peer: Peer) -> int:
        return next(number for number in range(peer.rank * WIDS, FRESH) if number not in self._writes)

    def transfers(self) -> Iterator[Transfer]:
        """Yield all transfers, also those that only a write or a request refers to."""
        found: dict[int, Transfer] = {}
        for transfer in (
            *self._transfers.values(),
            *self._by_request.values(),
            *(transfer for transfer, _ in self._writes.values()),
        ):
            found[id(transfer)] = transfer
        yield from found.values()

    def age(self) -> None:
        for transfer in self.transfers():
            transfer.since, transfer.check_at = _older(transfer.since), -FOREVER
            for delivery in transfer.deliveries.values():
                delivery.last_sent, delivery.moved_at = _older(delivery.last_sent), _older(delivery.moved_at)
        for gone in self._gone.values():
            gone.at = _older(gone.at)

    def key(self) -> object:
        listed = {id(transfer) for transfer in self._transfers.values()}
        return (
            tuple(sorted((name, _transfer_key(t)) for name, t in self._transfers.items())),
            tuple(sorted((r, t.transfer_id, id(t) in listed or _transfer_key(t)) for r, t in self._by_request.items())),
            tuple(sorted((wid, id(t) in listed or _transfer_key(t)) for wid, (t, _) in self._writes.items())),
            tuple(sorted((name, gone.at, _numbers(gone.numbers)) for name, gone in self._gone.items())),
            _numbers(self._overtaken),
            tuple(sorted((peer.rank, *sorted(transfers)) for peer, transfers in self._failed.items())),
            tuple(sorted(peer.rank for peer in self._consumers)),
        )

    def known_peers(self) -> frozenset[int]:
        """Consumer ranks whose messages reach the machine: the runtime drops others' messages."""
        return frozenset(peer.rank for peer in self._consumers)

    def settled(self) -> tuple[frozenset[int], frozenset[int], bool]:
        """(consumer ranks whose deliveries are closed, ids of writes whose delivery is abandoned,
        nothing is open)
        """
        given_up = frozenset(
            wid
            for wid, (_, delivery) in self._writes.items()
            if delivery.ending is not None and not isinstance(delivery.ending, Fin)
        )
        ranks = frozenset(peer.rank for peer in self._consumers)
        if "t" in self._gone:
            closed = ranks - {delivery.peer.rank for _, delivery in self._writes.values()}
        else:
            deliveries = self._transfers["t"].deliveries if "t" in self._transfers else {}
            closed = frozenset(rank for rank, delivery in deliveries.items() if delivery.closed)
        return closed, given_up, not self._writes and closed == ranks

    def swap_consumers(self) -> None:
        """Return the same state with consumer ranks 0 and 1 exchanged."""
        for transfer in self.transfers():
            for delivery in transfer.deliveries.values():
                delivery.peer = swapped(delivery.peer)
                delivery.in_flight = {swap_wid(wid): size for wid, size in delivery.in_flight.items()}
            transfer.numbers = _swapped_keys(transfer.numbers)
            transfer.deliveries = {1 - rank: delivery for rank, delivery in transfer.deliveries.items()}
        for gone in self._gone.values():
            gone.numbers = _swapped_keys(gone.numbers)
        self._overtaken = _swapped_keys(self._overtaken)
        self._failed = {swapped(peer): transfers for peer, transfers in self._failed.items()}
        self._allowance.blocks = Counter(_swapped_keys(self._allowance.blocks))
        self._lost = {swapped(peer): None for peer in self._lost}
        self._heard_at = {swapped(peer): at for peer, at in self._heard_at.items()}
        self._writes = {swap_wid(wid): both for wid, both in self._writes.items()}
        self._consumers = {swapped(peer): consumer for peer, consumer in self._consumers.items()}


def call_producer(machine: ExplorableProducer, event: Event, letters: Letters, memory: dict[Cell, Tag]) -> list[Any]:
    """Return the machine's actions for the world. Writes are posted at once."""
    method, arguments, _ = event
    Ambient.cells = memory
    if method == "message":
        arguments = (Peer(DECODE, arguments[0]), letters.messages[arguments[1]])
    if method == "tick":
        machine.age()
    if method == "begin":
        machine.begin(*arguments)
        return []
    actions = getattr(machine, method)(*arguments, 0.0)
    outcome: list[Any] = []
    for action in actions:
        match action:
            case Send(peer, message):
                if not isinstance(message, Alive):
                    # A consumer whose clock stands still can do everything that a received Alive
                    # makes possible.
                    outcome.append(("send", peer.rank, letters.number(message)))
            case Write():
                outcome.append(("write", _post(machine, action)))
            case Sent():
                outcome.append(("sent",))
    return outcome


def _post(machine: ExplorableProducer, write: Write) -> Posted:
    total, cells = 0, []
    for move in write.moves:
        first, stop = move.layers or (0, LAYERS)
        layers = range(first, min(stop, LAYERS))
        total += len(move.dst_ids) * UNIT_BYTES[move.group] * len(layers) // LAYERS
        for src, dst in zip(move.src_ids.tolist(), move.dst_ids.tolist(), strict=True):
            cells += [((dst, at), (src, at), Ambient.cells.get((src, at), STRANGER)) for at in layers]
        if write.digest is not None:
            write.digest.add(move.group, move.src_ids, move.src_parts, move.layers)
    machine.write_posted(write.write_id, total)
    return Posted(write.write_id, write.peer.rank, tuple(cells))


def _older(at: float) -> float:
    return max(at - 1.0, -float(CAP))


def _numbers(numbers: dict[Peer, int]) -> tuple[tuple[int, int], ...]:
    return tuple(sorted((peer.rank, number) for peer, number in numbers.items()))


def _transfer_key(transfer: Transfer) -> tuple[object, ...]:
    return (
        transfer.stage.name,
        transfer.since if transfer.stage is not Stage.LIVE else 0.0,
        transfer.request_id or "",
        transfer.starting,
        transfer.computed_tokens,
        transfer.coming_tokens,
        tuple(map(tuple, transfer.tables)),
        transfer.consumer is not None,
        transfer.consumer == "",
        tuple(sorted(transfer.expected_ranks)) if transfer.expected_ranks is not None else (),
        tuple(sorted((rank, _delivery_key(d)) for rank, d in transfer.deliveries.items())),
        _numbers(transfer.numbers),
    )


def _delivery_key(delivery: Delivery) -> tuple[object, ...]:
    if delivery.closed:
        return ("closed",)
    return (
        "open" if delivery.offer is not None else "awaited",
        # The time of a repeated Starting matters; the time of Alive does not.
        (True, delivery.last_sent) if delivery.awaits_start else (False, 0.0),
        tuple(tuple(units.dst_ids.tolist()) for units in delivery.pending) if delivery.pending is not None else (),
        delivery.pending is None,
        tuple(sorted((g, tuple(moves.dst_ids.tolist()), done) for g, (moves, done) in delivery.early.items())),
        delivery.digest.hexdigest() if delivery.digest is not None else "",
        tuple(sorted(delivery.in_flight.items())),
        delivery.written_bytes,
        delivery.ending.kind if delivery.ending is not None else "",
        delivery.moved_at if delivery.in_flight else 0.0,
        delivery.hangs,
    )


def swapped(peer: Peer) -> Peer:
    return Peer(peer.incarnation, 1 - peer.rank)


def _swapped_keys(numbers: dict[Peer, int]) -> dict[Peer, int]:
    return {swapped(peer): number for peer, number in numbers.items()}


def swap_wid(wid: int) -> int:
    return wid - WIDS if wid >= WIDS else wid + WIDS


# ---- the consumer ------------------------------------------------------------------------------


class ExplorableConsumer(Consumer):
    """A consumer whose state can be identified, aged and permuted."""

    def age(self) -> None:
        for queued in self._queue.requests.values():
            queued.heard_at = _older(queued.heard_at)
        for reception in self._all():
            reception.since, reception.cancelled_at = _older(reception.since), _older(reception.cancelled_at)
            reception.ending_since = _older(reception.ending_since)
            reception.check_at = -FOREVER
            reception.heard_at = {peer: _older(at) for peer, at in reception.heard_at.items()}
        self._used = {transfer_id: _older(at) for transfer_id, at in self._used.items()}
        for waiting in self._engines.releases.values():
            waiting[:] = [(transfer_id, _older(at)) for transfer_id, at in waiting]

    def key(self) -> object:
        return (
            tuple(
                (
                    reception.stage.name,
                    reception.since if reception.stage.name == "CONNECTING" else 0.0,
                    tuple(
                        sorted(
                            (peer.rank, 0.0 if reception.stage in GIVEN_UP else reception.heard_at[peer])
                            for peer in reception.writing
                        )
                    ),
                    tuple(sorted(peer.rank for peer in reception.verifying)),
                    reception.failure is None,
                    reception.cancelled_at if reception.stage in GIVEN_UP else 0.0,
                    reception.ending_since if reception.stage.name == "ENDING" else 0.0,
                )
                for reception in self._all()
            ),
            tuple((each.heard_at, each.asked.rank if each.asked else None) for each in self._queue.requests.values()),
            bool(self._engines.partners),
            bool(self._engines.stale),
            tuple(item for waiting in self._engines.releases.values() for item in waiting),
            tuple(self._used.values()),
        )

    def swap_producers(self) -> None:
        """Return the same state with producer ranks 0 and 1 exchanged."""
        for queued in self._queue.requests.values():
            queued.asked = None if queued.asked is None else swapped(queued.asked)
        for reception in self._all():
            reception.writing = {
                swapped(peer): replace(partner, peer=swapped(peer)) for peer, partner in reception.writing.items()
            }
            reception.verifying = [swapped(peer) for peer in reception.verifying]
            reception.heard_at = {swapped(peer): at for peer, at in reception.heard_at.items()}

    def ending(self) -> bool:
        return any(reception.stage in GIVEN_UP for reception in self._all())


def call_consumer(machine: ExplorableConsumer, event: Event, letters: Letters) -> list[Any]:
    """Return the machine's actions for the world."""
    method, arguments, _ = event
    if method in ("message", "undelivered"):
        arguments = (Peer(ENGINE.incarnation, arguments[0]), letters.messages[arguments[1]])
    if method == "tick":
        machine.age()
    outcome: list[Any] = []
    for action in getattr(machine, method)(*arguments, 0.0):
        match action:
            case Send(peer, message):
                outcome.append(("send", peer.rank, letters.number(message)))
            case Connect():
                outcome.append(("connect",))
            case Verify(_, peer, units, _, expected):
                wanted = tuple((g, block) for g, each in enumerate(units) for block in each.dst_ids.tolist())
                outcome.append(("verify", peer.rank, wanted, expected))
            case Due(_, _, failure):
                outcome.append(("due", failure is None))
            case Received(_, failure, quarantine):
                outcome.append(("received", failure is None, quarantine is not None))
            case Freed():
                outcome.append(("freed",))
    return outcome


def counts(machine: Producer | Consumer) -> tuple[tuple[str, int], ...]:
    return tuple((what, count) for what, count in machine.counts().items() if count)
