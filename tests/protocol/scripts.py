"""Play scripts of events on one machine, and compare the actions of each event.

A line of a script is a time in seconds, an event with its arguments and, behind ``|``, the actions
or the answer. An event is a method of a ``Player`` or, with the time as its last argument, of the
machine. Engine ``a`` of two ranks has the prompt, engine ``c`` of two ranks requests it. A rank of
the peer is its number, a rank of another engine ``b0``. Request ``r2`` has transfer ``t2``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from connectors.planning.blocks import BlockSet, Ints, UnitShape
from connectors.planning.layout import Group, GroupKind
from connectors.protocol.actions import Connect, Due, Forget, Freed, Received, Send, Sent, Verify, Write
from connectors.protocol.agent_metadata import ProcessIdentity
from connectors.protocol.consumer import Consumer
from connectors.protocol.delivery import ConsumerPeer
from connectors.protocol.engines import Partner
from connectors.protocol.limits import TransferLimits
from connectors.protocol.params import EngineAddress
from connectors.protocol.producer import Producer
from connectors.protocol.reception import Order
from connectors.protocol.wire import Aborted, Alive, AwaitStart, Cancel, Cancelled, Failed, Fin, Offer, Peer, Starting

LIMITS = TransferLimits(handshake_s=12, progress_s=10, cancel_s=2, lease_s=20, alive_s=1, step_s=50, fence_s=1)
SHAPES = (UnitShape(4, 1, 1), UnitShape(4, 1, 1))
PROCESS = ProcessIdentity("host", 1, 1)
LAYERS = 2


def scripts(text: str) -> dict[str, tuple[str, str]]:
    """Return (state, script) by title; each script begins with a line ``== state: title``."""
    found = {}
    for part in text.split("== ")[1:]:
        head, _, script = part.partition("\n")
        state, _, title = head.partition(": ")
        found[title] = state, script
    return found


def blocks(positions: Sequence[int], ids: Sequence[int]) -> BlockSet:
    return BlockSet(np.array(positions, np.int64), np.array(ids, np.int64))


def address(engine: str) -> EngineAddress:
    return EngineAddress(engine, "host", ord(engine))


class Tally:
    """A digest of block ids, by group."""

    def __init__(self) -> None:
        self.seen: dict[int, list[int]] = {}

    def add(self, group: int, ids: Ints, parts: Ints, layers: tuple[int, int] | None = None) -> None:
        if layers is None or layers[0] == 0:
            self.seen.setdefault(group, []).extend(ids.tolist())

    def ready(self) -> bool:
        return True

    def hexdigest(self) -> str:
        return hashlib.md5(repr(sorted(each for each in self.seen.items() if each[1])).encode()).hexdigest()


def tally(*groups: str) -> str:
    """Return the digest of blocks with ids of one digit."""
    found = Tally()
    for group, ids in enumerate(groups):
        found.add(group, np.array([*map(int, ids)]), np.zeros(len(ids), np.int64))
    return found.hexdigest()


class Player:
    """A machine, and events that need more than strings as arguments.

    ``other``  the engine on the other side
    """

    other: str
    machine: Any
    now = 0.0

    def play(self, script: str) -> None:
        for line in filter(None, map(str.strip, script.splitlines())):
            event, _, expected = line.partition("|")
            assert list(self.answer(event)) == [each.strip() for each in expected.split(",") if each.strip()], line

    def answer(self, event: str) -> Iterator[str]:
        at, name, *words = event.split()
        self.now = float(at)
        options = dict(word.split("=") for word in words if "=" in word)
        arguments = [word for word in words if "=" not in word]
        own = getattr(self, name, None)
        found = own(*arguments, **options) if own else getattr(self.machine, name)(*arguments, self.now)
        for each in found if isinstance(found, list | set | tuple) else [] if found is None else [found]:
            match each:
                case Send(peer, message):
                    yield " ".join([message.kind, self.name(peer), *self.details(message)])
                case Forget(peer):
                    yield f"forget {self.name(peer)}"
                case bool() | str() | int():
                    yield str(each)
                case _:
                    yield self.show(each)

    def show(self, action: Any) -> str:
        raise NotImplementedError

    def details(self, message: Any) -> list[str]:
        """Return what distinguishes messages of one kind, without their reasons."""
        transfer = [] if message.transfer_id == "t" else [message.transfer_id]
        match message:
            case Fin():
                return [*transfer, str(message.total_bytes), *(["digest"] if message.digest else [])]
            case Alive():
                return [*transfer, *map(str, message.left)]
            case Offer() | AwaitStart() | Cancel():
                return [*transfer, f"#{message.number}"]
        return transfer

    def peer(self, name: str) -> Peer:
        return Peer(self.other, int(name)) if name.isdigit() else Peer(name[0], int(name[1:]))

    def name(self, peer: Peer) -> str:
        return str(peer.rank) if peer.incarnation == self.other else f"{peer.incarnation}{peer.rank}"

    def receive(self, peer: str, message: Any) -> Any:
        return self.machine.message(self.peer(peer), message, self.now)

    def counts(self) -> list[str]:
        """Return the counts that are not zero."""
        return [f"{count} {name}" for name, count in self.machine.counts().items() if count]

    def end(self) -> None:
        """End what only others can: writes, requests, and the engines of the other side."""
        raise NotImplementedError

    def leaves_nothing(self) -> None:
        """End all that a script has left open: then the machine has no state but its clocks."""
        self.end()
        for _ in range(3):
            self.now += 1e5
            self.machine.tick(self.now)
        own = vars(self.machine)
        parts = [vars(part) for part in own.values() if hasattr(part, "__dict__")]
        left = {name: each for part in (own, *parts) for name, each in part.items()}
        assert not {name: each for name, each in left.items() if isinstance(each, dict | set) and each}

    def knows(self, peer: str) -> Any:
        return self.machine.knows(self.peer(peer))

    def busy(self) -> Any:
        return self.machine.busy

    def suspects(self) -> list[str]:
        return sorted(self.name(each.peer) for each in self.machine.suspects())

    def engines(self) -> list[str]:
        return sorted(self.machine.engines())


class ConsumerPlayer(Player):
    """A worker of engine ``c`` that receives 9 tokens into blocks 4, 5, 6 and 7 of two groups.

    Rank 0 of ``a`` sends 31 bytes, rank 1 60 bytes.
    """

    other = "a"

    def __init__(self, digests: bool = False) -> None:
        groups = [Group(index, GroupKind.FULL, 4, None, ()) for index in (0, 1)]
        self.machine: Consumer = Consumer(groups, LIMITS)
        self.new_digest = Tally if digests else None

    def queue(self, request: str, transfer: str = "t", engine: str = "a") -> Any:
        return self.machine.queue(request, transfer, address(engine), self.now)

    def start(self, request: str, transfer: str = "", engine: str = "a") -> Any:
        groups = (blocks([0, 1, 2], [4, 5, 6]), blocks([0], [7]))
        transfer = transfer or request.replace("r", "t")
        return self.machine.start(Order(request, transfer, address(engine), 9, "digest", groups), self.now)

    def release(self, transfer: str = "t", engine: str = "a") -> Any:
        return self.machine.release(transfer, address(engine), self.now)

    def connected(self, engine: str = "a") -> Any:
        met_at = EngineAddress(engine, "met", 1)
        partners = [
            Partner(Peer(engine, rank), SHAPES, sizes, self.new_digest, met_at, PROCESS, True)
            for rank, sizes in enumerate(((10, 1), (20, 0)))
        ]
        return self.machine.connected(engine, partners, self.now)

    def forget(self) -> Any:
        return self.machine.forget("a")

    def worker_lost(self, peer: str) -> Any:
        return self.machine.worker_lost(self.peer(peer), "dead", self.now)

    def fin(self, peer: str, total: str = "", of: str = "t", digest: str = "4567") -> Any:
        text = tally(digest[:3], digest[3:]) if self.new_digest and digest != "none" else ""
        return self.receive(peer, Fin(of, int(total or ("31" if peer.endswith("0") else "60")), text))

    def alive(self, peer: str, left: str = "") -> Any:
        return self.receive(peer, Alive("t", tuple(map(int, left))))

    def starting(self, peer: str) -> Any:
        return self.receive(peer, Starting("t"))

    def aborted(self, peer: str) -> Any:
        return self.receive(peer, Aborted("t", "aborted"))

    def cancelled(self, peer: str, of: str = "t") -> Any:
        return self.receive(peer, Cancelled(of))

    def failed(self, peer: str) -> Any:
        return self.receive(peer, Failed("t", "failed"))

    def unsent(self, peer: str, kind: str, transfer: str = "t") -> Any:
        """Report that a message could not be sent."""
        messages: dict[str, Any] = {"offer": Offer(transfer, 9, "", ()), "await_start": AwaitStart(transfer)}
        messages |= {"cancel": Cancel(transfer), "fin": Fin(transfer, 1)}
        return self.machine.undelivered(self.peer(peer), messages[kind], self.now)

    def verified(self, peer: str, problem: str = "") -> Any:
        return self.machine.verified("t", self.peer(peer), problem or None, self.now)

    def awaits(self, peer: str) -> Any:
        return self.machine.awaits(self.peer(peer))

    def end(self) -> None:
        for engine in "abc":
            self.machine.engine_lost(engine, "lost", self.now)

    def show(self, action: Any) -> str:
        match action:
            case Connect(engine):
                return f"connect {engine.incarnation}{' where met' if engine.host == 'met' else ''}"
            case Due(request, _, failure, cancelled):
                return f"due {request}{' failed' if failure else ''}{' cancelled' if cancelled else ''}"
            case Verify(_, peer, units, _, expected):
                ids = " ".join(str(block) for each in units for block in each.dst_ids.tolist())
                wrong = " wrong" if action.problem() else ""
                return f"verify {self.name(peer)} {ids}{' all' if expected else ''}{wrong}"
            case Received(request, failure, quarantine):
                return f"{'quarantined' if quarantine else 'failed' if failure else 'received'} {request}"
            case Freed(request, _):
                return f"freed {request}"
        raise AssertionError(action)


class ProducerPlayer(Player):
    """A worker of engine ``a``, for prompts of 12 tokens: full attention and a window of 4 tokens.

    It has blocks 1, 2, 3 and 4, 5, 6, after a preemption 11, 12, 13 and 14, 15, 16; a rank of ``c``
    offers blocks 50, 51, 52 and 60 for 11 tokens, or 50 and 51 for 8. A unit of the first group has
    10 bytes, of the second 1.
    """

    other = "c"

    def __init__(self, ranks: Sequence[int] = (0,), late_orders: bool = False) -> None:
        groups = (Group(0, GroupKind.FULL, 4, None, ()), Group(1, GroupKind.SLIDING, 4, 4, ()))
        self.machine: Producer = Producer(groups, LIMITS, late_orders)
        self.ranks, self.given, self.first = frozenset(ranks), 0, 1
        self.writes: list[Write] = []
        for peer in ("0", "1", "d0"):
            self.welcome(peer)

    def welcome(self, peer: str) -> None:
        seen = peer == "0"
        self.machine.welcome(self.peer(peer), ConsumerPeer(self.ranks, 100, SHAPES, Tally, PROCESS, seen), self.now)

    def expect(self, request: str = "r", transfer: str = "t") -> Any:
        self.given = 0
        return self.machine.expect(request, transfer, 12, "digest", self.now)

    def new_ids(self, tokens: str, blocks: str = "") -> list[list[int]]:
        first, self.given = self.given, int(blocks or -(-int(tokens) // 4))
        return [list(range(self.first + 3 * group + first, self.first + 3 * group + self.given)) for group in (0, 1)]

    def progress(self, tokens: str, request: str = "r", blocks: str = "") -> Any:
        return self.machine.progress(request, self.new_ids(tokens, blocks), int(tokens), self.now)

    def begin(self, tokens: str) -> Any:
        return self.machine.begin("r", self.new_ids(tokens), int(tokens))

    def layers(self, group: str, stop: str) -> Any:
        return self.machine.layers_computed(["r", "unknown"], int(group), int(stop), self.now)

    def preempted(self, request: str = "r") -> Any:
        self.first, self.given = 11, 0
        return self.machine.preempted(request, self.now)

    def held(self, request: str = "r") -> Any:
        return self.machine.finished(request, True, "", self.now)

    def left(self, request: str = "r") -> Any:
        return self.machine.finished(request, False, "left", self.now)

    def offer(self, peer: str, transfer: str = "t", end: str = "11", number: str = "0", digest: str = "") -> Any:
        groups = (blocks([0, 1, 2], [50, 51, 52]), blocks([2], [60]))
        if end == "8":
            groups = (blocks([0, 1], [50, 51]), blocks([], []))
        return self.receive(peer, Offer(transfer, int(end), "digest", groups, bool(digest), int(number)))

    def wide(self, peer: str, count: str, transfer: str) -> Any:
        """Offer this number of blocks of the first group."""
        groups = (blocks(range(int(count)), range(1, int(count) + 1)), blocks([], []))
        return self.receive(peer, Offer(transfer, 11, "digest", groups))

    def await_start(self, peer: str, transfer: str = "t", number: str = "0") -> Any:
        return self.receive(peer, AwaitStart(transfer, int(number)))

    def cancel(self, peer: str, transfer: str = "t", number: str = "0") -> Any:
        return self.receive(peer, Cancel(transfer, int(number)))

    def write(self, number: str) -> Write:
        return self.writes[int(number) - 1]

    def done(self, number: str) -> Any:
        write, total = self.write(number), 0
        for move in write.moves:
            first, stop = move.layers or (0, LAYERS)
            total += len(move) * (10, 1)[move.group] * (min(stop, LAYERS) - first) // LAYERS
        self.machine.write_posted(write.write_id, total)
        return self.machine.write_done(write.write_id, self.now)

    def unposted(self, number: str) -> Any:
        return self.machine.write_refused(self.write(number).write_id, "unposted", self.now)

    def broken(self, number: str) -> Any:
        return self.machine.write_failed(self.write(number).write_id, "broken", self.now)

    def wants(self, number: str) -> Any:
        return self.machine.wants(self.write(number).write_id)

    def in_flight(self, request: str = "r") -> Any:
        return self.machine.writes_in_flight(request)

    def peer_lost(self, peer: str) -> Any:
        return self.machine.peer_lost(self.peer(peer), self.now)

    def worker_lost(self, peer: str) -> Any:
        return self.machine.worker_lost(self.peer(peer), self.now)

    def serves(self, peer: str) -> Any:
        return self.machine.serves(self.peer(peer))

    def end(self) -> None:
        own = vars(self.machine)
        for write_id in list(own["_writes"]):
            self.machine.write_failed(write_id, "ended", self.now)
        for transfer in list(own["_transfers"].values()):
            if transfer.request_id is not None:
                self.machine.finished(transfer.request_id, False, "ended", self.now)
        self.machine.orders_applied(self.now)
        for engine in "cd":
            self.machine.engine_lost(engine, self.now)

    def show(self, action: Any) -> str:
        match action:
            case Write():
                self.writes.append(action)
                return " ".join(["write", self.name(action.peer), *self._moved(action)])
            case Sent(request):
                return f"sent {request}"
        raise AssertionError(action)

    @staticmethod
    def _moved(write: Write) -> Iterator[str]:
        for move in write.moves:
            first, stop = move.layers or (0, LAYERS)
            layers = "" if move.layers is None else f"/{first}-{min(stop, LAYERS)}"
            yield from (f"{src}>{dst}{layers}" for src, dst in zip(move.src_ids, move.dst_ids, strict=True))
            if write.digest is not None:
                write.digest.add(move.group, move.src_ids, move.src_parts, move.layers)
