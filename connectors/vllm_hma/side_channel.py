"""The side channel: an engine hands its card to whoever asks, over ZeroMQ, so that workers can find each other.

One request, one answer: ``cards`` gets the workers' cards. It is used once for a pair of engines; transfers
themselves go over the transport. Whatever else arrives is answered with an error and never ends the thread.
"""

from __future__ import annotations

import logging
import threading

import zmq

from connectors.errors import ConfigurationError, HandshakeError, StaleReferenceError, WireError
from connectors.protocol.cards import EngineCard, decode_worker_card, engine_card

logger = logging.getLogger(__name__)

_ASK = b"tandem/1 cards"
_OK, _ERROR = b"ok", b"error"
_MAX_QUESTION_BYTES = 1024
_MAX_ANSWER_BYTES = 64 * 2**20


class CardServer:
    """Serves one engine's cards until ``close``. ``port`` is the port taken."""

    def __init__(self, host: str, port: int, cards: list[bytes]) -> None:
        self._cards = cards
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, _MAX_QUESTION_BYTES)
        self._socket.setsockopt(zmq.IPV6, int(":" in host))
        address = f"[{host}]" if ":" in host else host
        try:
            self._socket.bind(f"tcp://{address}:{port or '*'}")
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigurationError(
                f"side_channel_host {host!r}, side_channel_port {port}: cannot listen there: {error}"
            ) from error
        self.port = int(self._socket.getsockopt(zmq.LAST_ENDPOINT).decode().rpartition(":")[2])
        self._stop = self._context.socket(zmq.PAIR)
        self._stop.bind("inproc://stop")
        self._thread = threading.Thread(target=self._serve, name="tandem-side-channel", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening. Idempotent."""
        if self._context.closed:
            return
        waker = self._context.socket(zmq.PAIR)
        waker.connect("inproc://stop")
        waker.send(b"")
        self._thread.join(timeout=5)
        self._context.destroy(linger=0)

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._stop, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._stop in ready:
                return
            try:
                sender, *question = self._socket.recv_multipart(zmq.NOBLOCK)
                answer = [_OK, *self._cards] if question == [b"", _ASK] else [_ERROR, b"ask 'tandem/1 cards'"]
                self._socket.send_multipart([sender, b"", *answer], zmq.NOBLOCK)
            except zmq.ZMQError as error:
                logger.warning("side channel: a peer could not be answered: %s", error)
            except ValueError as error:
                logger.warning("side channel: a malformed question: %s", error)


def fetch_card(host: str, port: int, incarnation: str, timeout_s: float) -> EngineCard:
    """Ask an engine for its card.

    Raises HandshakeError where nobody answers in time, StaleReferenceError where another start of the engine does, and
    WireError where the answer is no card.
    """
    context = zmq.Context()
    try:
        socket = context.socket(zmq.REQ)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, _MAX_ANSWER_BYTES)
        socket.setsockopt(zmq.IPV6, int(":" in host))
        socket.connect(f"tcp://{f'[{host}]' if ':' in host else host}:{port}")
        socket.send(_ASK)
        if not socket.poll(timeout_s * 1000):
            raise HandshakeError(f"the prefill engine at {host}:{port} did not answer within {timeout_s:g} s")
        status, *parts = socket.recv_multipart()
    except zmq.ZMQError as error:
        raise HandshakeError(f"the prefill engine at {host}:{port} cannot be asked for its card: {error}") from error
    finally:
        context.destroy(linger=0)
    if status != _OK:
        raise WireError(f"the peer at {host}:{port} answered with an error: {b' '.join(parts)[:200]!r}")
    cards = [decode_worker_card(part) for part in parts]
    card = engine_card({worker.rank: worker for worker in cards})
    if card.incarnation != incarnation:
        raise StaleReferenceError(
            f"at {host}:{port} now runs engine {card.incarnation}, not {incarnation}: the request refers to an engine "
            "that has been restarted since"
        )
    return card
