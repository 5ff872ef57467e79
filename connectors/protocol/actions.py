"""What the state machines ask their owner to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from connectors.planning.blocks import Ints, UnitSet
from connectors.planning.descriptors import Moves
from connectors.protocol.params import EngineAddress
from connectors.protocol.wire import Message, Peer


class Digest(Protocol):
    """Of the bytes of one transfer of one pair of ranks, on one end. Machines carry it; its owner feeds it memory."""

    def add(self, group: int, ids: Ints, parts: Ints, layers: tuple[int, int] | None = None) -> None:
        """The bytes of some units of a group, in ascending order of the units over all calls."""

    def hexdigest(self) -> str:
        """32 hexadecimal digits."""
        ...


@dataclass(frozen=True, slots=True)
class Send:
    """Send ``message`` to ``peer``. Losing it is allowed: deadlines cover that."""

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
    """The machine has forgotten this worker, and nothing of its own is under way to it.

    What the owner keeps for it (plans, a connection) can go, unless its other machine ``knows`` the worker. If it is
    alive after all, it is met like a stranger: by a new handshake.
    """

    peer: Peer


@dataclass(frozen=True, slots=True)
class Sent:
    """This rank needs the request's blocks no longer."""

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
    """Add ``units[g]`` of every group g to ``digest`` and report ``verified``: are these the bytes that were sent?

    The blocks stay this transfer's until then. ``expected`` is the digest that ``peer`` has sent.
    """

    transfer_id: str
    peer: Peer
    units: tuple[UnitSet, ...]
    digest: Digest
    expected: str

    def problem(self) -> str | None:
        """Carry it out."""
        for group, units in enumerate(self.units):
            self.digest.add(group, units.dst_ids, units.dst_parts)
        found = self.digest.hexdigest()
        if found == self.expected:
            return None
        return f"the bytes that have arrived are not those that were sent: digest {found} instead of {self.expected}"


@dataclass(frozen=True, slots=True)
class Received:
    """The request need not wait any longer. ``failure`` is None where all KV has arrived, unharmed.

    No partner writes to its blocks any more, unless they are in ``quarantine``: then they must be kept from everybody,
    this request included, until ``Freed`` names that transfer.
    """

    request_id: str
    failure: str | None
    quarantine: str | None = None


@dataclass(frozen=True, slots=True)
class Freed:
    """No partner writes any more to the blocks that were in quarantine for this request's transfer."""

    request_id: str
    transfer_id: str


ProducerAction = Send | Write | Sent | Forget
ConsumerAction = Connect | Send | Due | Verify | Received | Freed | Forget
