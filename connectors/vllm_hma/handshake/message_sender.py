"""Messages to other workers, over connections that may have broken since.

A connection that was reset stays broken on this side, whatever becomes of the network, until it is made anew. So a
message that cannot be sent is sent once more over a fresh connection.
"""

from __future__ import annotations

import logging
import threading
import time

from connectors.errors import TransportError
from connectors.protocol.wire import Envelope, Message, Peer, encode
from connectors.transport.base import Transport

logger = logging.getLogger(__name__)

# A dead peer is not worth a fresh connection for every message to it.
_RECONNECT_EVERY_S = 1.0

# A write to a broken connection costs its consumer the blocks, a message costs microseconds.
_CHECK_EVERY_S = 1.0


def agent_name(peer: Peer) -> str:
    """The transport's name for a worker."""
    return f"{peer.incarnation}/{peer.rank}"


class MessageSender:
    """Sends for one worker. Thread-safe."""

    def __init__(self, me: Peer, transport: Transport, key: bytes) -> None:
        self._me = me
        self._key = key
        self._transport = transport
        self._lock = threading.Lock()
        self._reconnected_at: dict[str, float] = {}
        self._sent_at: dict[str, float] = {}

    def send(self, peer: Peer, message: Message) -> None:
        """Raises TransportError where the message cannot be sent, even over a fresh connection."""
        name, frame = agent_name(peer), encode(Envelope(self._me, peer, message), self._key)
        try:
            self._transport.notify(name, frame)
        except TransportError as error:
            self.reconnect(name, error)
            self._transport.notify(name, frame)
        self._sent_at[name] = time.monotonic()

    def check(self, peer: Peer, message: Message) -> None:
        """Send ``message`` unless another was sent a moment ago: a connection known to be broken is then made anew.

        Raises TransportError where it cannot be sent.
        """
        if time.monotonic() - self._sent_at.get(agent_name(peer), float("-inf")) >= _CHECK_EVERY_S:
            self.send(peer, message)

    def forget(self, peer: Peer) -> None:
        """Nothing more will be sent to ``peer``."""
        with self._lock:
            self._reconnected_at.pop(agent_name(peer), None)
            self._sent_at.pop(agent_name(peer), None)

    def reconnect(self, name: str, error: TransportError) -> None:
        """Make the connection to ``name`` anew after ``error``; raises it again where that was done a moment ago."""
        with self._lock:
            now = time.monotonic()
            if now - self._reconnected_at.get(name, float("-inf")) < _RECONNECT_EVERY_S:
                raise error
            self._reconnected_at[name] = now
            logger.warning("Tandem: connecting to %r anew: %s", name, error)
            self._transport.reconnect(name)
