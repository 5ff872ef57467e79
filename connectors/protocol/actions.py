"""Actions of the state machines, which ``vllm_hma/worker_side/runtime.py`` carries out in order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from connectors.planning.blocks import Ints, UnitSet
from connectors.planning.descriptors import Moves
from connectors.protocol.params import EngineAddress
from connectors.protocol.wire import Message, Peer


class Digest(Protocol):
    """Digest of one transfer between two ranks, at one end."""

    def add(self, group: int, ids: Ints, parts: Ints, layers: tuple[int, int] | None = None) -> None:
        """Add the bytes of unit ``parts[i]`` in block ``ids[i]``. Units of a layer must ascend.

        ``layers``  ``(first, stop)`` range of the producer rank's layers of the group; None: all
        """

    def ready(self) -> bool:
        """Start to hash all bytes added so far; return whether ``hexdigest`` waits for nothing."""
        ...

    def hexdigest(self) -> str:
        """Return the digest of all bytes so far, once the device has read them: 32 hex digits."""
        ...


@dataclass(frozen=True, slots=True)
class Send:
    """Send ``message``. If that fails, the owner calls ``Consumer.undelivered``.

    It may also be lost without an error: every wait for an answer has a deadline.
    """

    peer: Peer
    message: Message


@dataclass(frozen=True, slots=True)
class Write:
    """Write ``moves`` to ``peer``, then report the end of write ``write_id``.

    The owner adds the source bytes to ``digest`` after the post. It calls ``write_posted`` after
    the post, and ``write_done`` or ``write_failed`` at the end. If the write cannot be posted
    whole, or is no longer wanted (``Producer.wants``), it calls only ``write_failed`` if parts may
    still arrive, and only ``write_refused`` if none can.
    """

    write_id: int
    transfer_id: str
    peer: Peer
    moves: tuple[Moves, ...]
    digest: Digest | None = None


@dataclass(frozen=True, slots=True)
class Forget:
    """Release the plan and connection of a peer: its next transfer needs a handshake. The owner
    keeps them while the other state machine (``knows``) or a handshake needs them.
    """

    peer: Peer


@dataclass(frozen=True, slots=True)
class Sent:
    """This rank sends no more KV from these blocks, free once all ranks have returned this."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Connect:
    """Start a handshake, unless one is in progress; then ``connected`` or ``connect_failed``."""

    engine: EngineAddress


@dataclass(frozen=True, slots=True)
class Due:
    """A queued request's wait has ended.

    ``failure``    None if the producer is about to compute the prompt or has computed it: vLLM can
                   allocate the request's blocks. Else the reason why no KV will arrive
    ``cancelled``  whether this rank cancels the transfer at its partners. The other ranks have not
                   queued the request: their owners must call ``Consumer.release``
    """

    request_id: str
    transfer_id: str
    failure: str | None
    cancelled: bool = False


@dataclass(frozen=True, slots=True)
class Verify:
    """Add received units to a digest, compare it with ``expected``, then report ``verified``.

    ``units``     received units, one set per group; those of earlier actions are not repeated
    ``expected``  digest that ``peer`` sent in Fin; empty before Fin: there is nothing to compare

    The owner carries these out in order. The blocks stay allocated until ``verified``.
    """

    transfer_id: str
    peer: Peer
    units: tuple[UnitSet, ...]
    digest: Digest
    expected: str

    def problem(self) -> str | None:
        """Return how the digest differs from ``expected``. Call this once. Raises PlanError for a
        block that does not exist at this end, and torch's errors.
        """
        for group, units in enumerate(self.units):
            self.digest.add(group, units.dst_ids, units.dst_parts)
        found = self.digest.hexdigest()
        if self.expected in ("", found):
            return None
        return f"the received bytes differ from the bytes sent: digest {found}, expected {self.expected}"


@dataclass(frozen=True, slots=True)
class Received:
    """The request's wait for KV on this rank has ended.

    ``failure``     None if all KV has arrived and all requested digests match
    ``quarantine``  transfer id if a producer rank may still write to the blocks: then no request
                    may use them until every rank that has put them there has returned ``Freed``
    """

    request_id: str
    failure: str | None
    quarantine: str | None = None


@dataclass(frozen=True, slots=True)
class Freed:
    """No producer rank can write to this transfer's blocks on this rank any more."""

    request_id: str
    transfer_id: str


ProducerAction = Send | Write | Sent | Forget
ConsumerAction = Connect | Send | Due | Verify | Received | Freed | Forget
