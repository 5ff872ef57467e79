"""Actions that the producer and consumer state machines return to their owner, the worker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from connectors.planning.blocks import Ints, UnitSet
from connectors.planning.descriptors import Moves
from connectors.protocol.params import EngineAddress
from connectors.protocol.wire import Message, Peer


class Digest(Protocol):
    """Digest of one transfer between two ranks, at one end.

    The owner of the state machine adds the bytes of writes; ``Verify`` adds received bytes.
    """

    def add(self, group: int, ids: Ints, parts: Ints, layers: tuple[int, int] | None = None) -> None:
        """Add the bytes of some units of a group. For each layer, units must ascend over all calls.

        ``ids``     block of each unit at this end
        ``parts``   index of each unit within its block
        ``layers``  ``(first, stop)`` range of the group's layers; None means all layers
        """

    def hexdigest(self) -> str:
        """Return 32 hexadecimal digits."""
        ...


@dataclass(frozen=True, slots=True)
class Send:
    """Send ``message`` to ``peer``.

    The message may be lost: every wait for an answer has a deadline.
    """

    peer: Peer
    message: Message


@dataclass(frozen=True, slots=True)
class Write:
    """Write ``moves`` to ``peer``, then report the end of write ``write_id``.

    ``digest``  digest to which the owner adds the source bytes after it has posted the write; None
                if the offer requests none

    The owner calls ``write_posted`` after the post and ``write_done`` or ``write_failed`` at the
    end, or only ``write_refused`` if nothing was posted.
    """

    write_id: int
    transfer_id: str
    peer: Peer
    moves: tuple[Moves, ...]
    digest: Digest | None = None


@dataclass(frozen=True, slots=True)
class Forget:
    """The state machine has removed this peer and has no message or write to it in progress.

    The owner releases the peer's plans and connection, unless the other state machine (``knows``)
    or a handshake in progress needs them. A peer that is still alive starts a new handshake.
    """

    peer: Peer


@dataclass(frozen=True, slots=True)
class Sent:
    """This rank sends no more KV from the request's blocks: the scheduler may free them."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Connect:
    """Start a handshake with this engine, then report ``connected`` or ``connect_failed``."""

    engine: EngineAddress


@dataclass(frozen=True, slots=True)
class Due:
    """A queued request's wait has ended.

    ``failure``    None if the producer is about to start the prompt: the request can allocate
                   blocks. Else the reason why no KV will arrive; this engine then computes the
                   prompt
    ``cancelled``  whether this rank cancels the transfer at its partners; the other ranks have not
                   queued the request, and must ``release`` it
    """

    request_id: str
    transfer_id: str
    failure: str | None
    cancelled: bool = False


@dataclass(frozen=True, slots=True)
class Verify:
    """Compute the digest of received units, compare it with ``expected``, then report ``verified``.

    ``units``     received units, one set per group
    ``digest``    empty digest of this transfer
    ``expected``  digest that ``peer`` sent in Fin

    The transfer keeps its blocks until ``verified``.
    """

    transfer_id: str
    peer: Peer
    units: tuple[UnitSet, ...]
    digest: Digest
    expected: str

    def problem(self) -> str | None:
        """Return None if the digests are equal, else a description of the difference."""
        for group, units in enumerate(self.units):
            self.digest.add(group, units.dst_ids, units.dst_parts)
        found = self.digest.hexdigest()
        if found == self.expected:
            return None
        return f"the received bytes differ from the bytes sent: digest {found}, expected {self.expected}"


@dataclass(frozen=True, slots=True)
class Received:
    """The request's wait for KV has ended.

    ``failure``     None if all KV has arrived and all requested digests match, else the reason
    ``quarantine``  transfer id if a producer rank may still write to the blocks, else None

    No request, this one included, may use blocks in quarantine until ``Freed`` of their transfer.
    """

    request_id: str
    failure: str | None
    quarantine: str | None = None


@dataclass(frozen=True, slots=True)
class Freed:
    """No producer rank can write to this transfer's blocks any more; their quarantine ends."""

    request_id: str
    transfer_id: str


ProducerAction = Send | Write | Sent | Forget
ConsumerAction = Connect | Send | Due | Verify | Received | Freed | Forget
