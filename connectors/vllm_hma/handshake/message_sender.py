"""Connect to other workers, send messages to them, and reconnect if the connection is broken.

A connection that was reset stays broken on this side until it is reopened, so a failed message is
repeated once, over a new connection.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass

from connectors.codec import encode
from connectors.errors import TransportError
from connectors.protocol.agent_metadata import ProcessIdentity
from connectors.protocol.wire import Envelope, Message, Peer
from connectors.transport.base import Transport
from connectors.vllm_hma.handshake.processes import Liveness, liveness

logger = logging.getLogger(__name__)

_RECONNECT_EVERY_S = 1.0

# A write over a broken connection fails, and the consumer's blocks go into quarantine. A message
# before the write detects this and costs microseconds.
_CHECK_EVERY_S = 1.0


def agent_name(peer: Peer) -> str:
    return f"{peer.incarnation}/{peer.rank}"


@dataclass(eq=False, repr=False)
class MessageSender:
    """Sender of one worker's messages, with ``Keys.messages`` as ``key``. Thread-safe."""

    me: Peer
    transport: Transport
    key: bytes

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._reconnected_at: dict[str, float] = {}
        self._sent_at: dict[str, float] = {}
        # Processes of the peers that were seen alive on this host.
        self._processes: dict[str, ProcessIdentity] = {}

    def connect(self, peer: Peer, transport_metadata: bytes, process: ProcessIdentity) -> None:
        name = agent_name(peer)
        self.transport.add_peer(transport_metadata, name)
        if liveness(process) is Liveness.ALIVE:
            self._processes[name] = process

    def send(self, peer: Peer, message: Message) -> None:
        """May lose the message silently. Raises TransportError if the second attempt fails."""
        name, frame = agent_name(peer), encode(Envelope(self.me, peer, message), self.key)
        try:
            self.transport.notify(name, frame)
        except TransportError as error:
            self.reconnect(name, error)
            self.transport.notify(name, frame)
        self._sent_at[name] = time.monotonic()

    def check(self, peer: Peer, message: Message) -> None:
        """Send ``message``, if the last one is old, to detect and reopen a broken connection."""
        if time.monotonic() - self._sent_at.get(agent_name(peer), float("-inf")) >= _CHECK_EVERY_S:
            self.send(peer, message)

    def forget(self, peer: Peer) -> None:
        with self._lock:
            self._processes.pop(agent_name(peer), None)
            self._reconnected_at.pop(agent_name(peer), None)
            self._sent_at.pop(agent_name(peer), None)

    def reconnect(self, name: str, error: TransportError) -> None:
        """Reopen the connection to the agent ``name``, after ``error``.

        Raises ``error`` if the last attempt was made less than _RECONNECT_EVERY_S seconds ago, or
        if the peer's process on this host has ended. Raises TransportError as the transport.
        """
        with self._lock:
            now = time.monotonic()
            process = self._processes.get(name)
            if process is not None and liveness(process) is Liveness.GONE:
                # UCX opens a TCP socket, fails to open shared memory, and leaks the socket.
                raise error
            if now - self._reconnected_at.get(name, float("-inf")) < _RECONNECT_EVERY_S:
                raise error
            self._reconnected_at[name] = now
            logger.warning("Tandem: the connection to %r failed; reconnecting: %s", name, error)
            self.transport.reconnect(name)
