"""Actions that the state machines return for their owner to carry out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from connectors.planning.blocks import Ints, UnitSet
from connectors.planning.descriptors import Moves
from connectors.protocol.params import EngineAddress
from connectors.protocol.wire import Message, Peer


class Digest(Protocol):
    """Digest of one transfer between a pair of ranks, at one end. The machines' owner adds the bytes."""

    def add(self, group: int, ids: Ints, parts: Ints, layers: tuple[int, int] | None = None) -> None:
        """Add the bytes of some units of a group. Units ascend over all calls."""

    def hexdigest(self) -> str:
        """Return 32 hexadecimal digits."""
        ...


@dataclass(frozen=True, slots=True)
class Send:
    """Send ``message`` to ``peer``. It may be lost: each wait for an answer has a deadline."""

    peer: Peer
    message: Message


@dataclass(frozen=True, slots=True)
class Write:
    """Write these blocks to ``peer`` and report ``write_done`` or ``write_failed`` with ``write_id``.

    Once posted, the source's bytes are added to ``digest``, if there is one.
    """

    write_id: int
    transfer_id: str
    peer: Peer
    moves: tuple[Moves, ...]
    digest: Digest | None = None


@dataclass(frozen=True, slots=True)
class Forget:
    """The machine has removed this worker and has no messages or writes in progress to it.

    The owner can release its plans and connection, unless the other machine ``knows`` the worker. A worker that is
    still alive reconnects with a new handshake.
    """

    peer: Peer


@dataclass(frozen=True, slots=True)
class Sent:
    """This rank no longer reads the request's blocks."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Connect:
    """Shake hands with this engine and report ``connected`` or ``connect_failed``."""

    engine: EngineAddress


@dataclass(frozen=True, slots=True)
class Due:
    """The prompt of a queued request is about to start: the request can allocate its blocks.

    With a ``failure`` its KV will not come, and the request is computed by this engine alone.
    """

    request_id: str
    transfer_id: str
    failure: str | None


@dataclass(frozen=True, slots=True)
class Verify:
    """Add ``units[g]`` of every group g to ``digest``, compare it with ``expected`` and report ``verified``.

    The blocks belong to this transfer until then. ``expected`` is the digest that ``peer`` has sent.
    """

    transfer_id: str
    peer: Peer
    units: tuple[UnitSet, ...]
    digest: Digest
    expected: str

    def problem(self) -> str | None:
        """Return None if the digests are equal, else the difference."""
        for group, units in enumerate(self.units):
            self.digest.add(group, units.dst_ids, units.dst_parts)
        found = self.digest.hexdigest()
        if found == self.expected:
            return None
        return f"the received bytes differ from the bytes sent: digest {found}, expected {self.expected}"


@dataclass(frozen=True, slots=True)
class Received:
    """The request no longer waits. ``failure`` is None if all KV has arrived and its digests match.

    No partner writes to its blocks any more, unless they are in ``quarantine``: then no request may use them, this one
    included, until ``Freed`` names that transfer.
    """

    request_id: str
    failure: str | None
    quarantine: str | None = None


@dataclass(frozen=True, slots=True)
class Freed:
    """No partner can write any more to the blocks in quarantine for this request's transfer."""

    request_id: str
    transfer_id: str


ProducerAction = Send | Write | Sent | Forget
ConsumerAction = Connect | Send | Due | Verify | Received | Freed | Forget
