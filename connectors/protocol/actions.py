"""What the state machines ask their owner to do."""

from __future__ import annotations

from dataclasses import dataclass

from connectors.planning.descriptors import Moves
from connectors.protocol.params import EngineAddress
from connectors.protocol.wire import Message, Peer


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
    moves: tuple[Moves, ...]


@dataclass(frozen=True, slots=True)
class Sent:
    """This rank needs the request's blocks no longer."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Connect:
    """Shake hands with this engine and report ``connected`` or ``connect_failed``."""

    engine: EngineAddress


@dataclass(frozen=True, slots=True)
class Received:
    """No partner writes to the request's blocks any more. ``failure`` is None where all KV has arrived."""

    request_id: str
    failure: str | None


ProducerAction = Send | Write | Sent
ConsumerAction = Connect | Send | Received
