r"""The side channel: a TCP server for agent metadata and for the liveness of processes.

A decode rank fetches an engine's metadata in each handshake, and requests the state of a prefill
worker's process if this worker may still write to blocks in quarantine (``probe.py``). With a
secret, the connection is TLS (``secret.py``): a client with the agent metadata can write to this
engine's memory.

Each connection carries one request and one response, in at most TALK_S seconds. Above
MAX_CONNECTIONS, the server closes the oldest.

    request    b"tandem/VERSION metadata\n"
    response   b"TDA" | version | length | MessagePack of the ranks' agent metadata
    request    b"tandem/VERSION process HOST PID STARTED_AT\n" (ProcessIdentity in agent metadata)
    response   b"TDP" | version | length | "alive", "gone" or "unknown"
    error      b"TDE" | version | length | text

VERSION is PROTOCOL_VERSION in decimal. In responses, the version is one byte; other numbers are
uint32, little endian.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import math
import re
import socket
import ssl
import struct
import threading
import time
from typing import Annotated

import msgspec

from connectors.codec import decode_agent_metadata
from connectors.errors import ConfigurationError, HandshakeError, PeerSecretError, StaleReferenceError, WireError
from connectors.protocol.agent_metadata import PROTOCOL_VERSION, EngineMetadata, ProcessIdentity, engine_metadata
from connectors.vllm_hma.handshake.processes import Liveness, liveness
from connectors.vllm_hma.handshake.secret import tls_context

logger = logging.getLogger(__name__)

TALK_S = 5.0
MAX_CONNECTIONS = 512
_TICK_S = 0.25
_NO_DESCRIPTOR_S = 0.05

_METADATA_REQUEST = b"tandem/%d metadata\n" % PROTOCOL_VERSION
_PREFIX = struct.Struct("<3sBI")
_PROCESS = re.compile(rb"tandem/%d process ([0-9a-f/-]{1,200}) ([0-9]{1,18}) ([0-9]{1,18})\n" % PROTOCOL_VERSION)
_METADATA, _LIVENESS, _ERROR = b"TDA", b"TDP", b"TDE"
_TLS_RECORD = b"\x16"
_MAX_REQUEST_BYTES = 1024
_MAX_ANSWER_BYTES = 64 * 2**20
# Built at import, as in ``codec.py``.
_RANK_METADATA = msgspec.msgpack.Decoder(Annotated[list[bytes], msgspec.Meta(max_length=4096)])
_FIRST_ATTEMPT_S = 2.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 0.5


class MetadataServer:
    """Server of one engine, until ``close``. Raises ConfigurationError if it cannot listen.

    ``port``           0: a free one. The attribute has the chosen port
    ``rank_metadata``  encoded agent metadata of each worker, by rank
    ``identity``       ``Keys.identity``; empty: plain TCP for every client
    """

    def __init__(self, host: str, port: int, rank_metadata: list[bytes], identity: bytes = b"") -> None:
        self._answer = _response(_METADATA, msgspec.msgpack.encode(rank_metadata))
        self._tls = tls_context(identity, server=True) if identity else None
        try:
            self._listener = _listen(host, port)
        except OSError as error:
            raise ConfigurationError(
                f"side_channel_host {host!r}, side_channel_port {port}: cannot listen: {error}; set an address of this "
                "node and a port that no other engine on it has: port 0 takes a free one"
            ) from error
        self._listener.settimeout(_TICK_S)
        self.port = int(self._listener.getsockname()[1])
        self._closing = threading.Event()
        self._changed = threading.Condition()
        # Time of arrival and socket of each connection, oldest first.
        self._open: dict[int, tuple[float, socket.socket]] = {}
        self._thread = threading.Thread(target=self._run, name="tandem-side-channel", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Close all connections. Idempotent."""
        self._closing.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()

    def _run(self) -> None:
        for number in itertools.takewhile(lambda _: not self._closing.is_set(), itertools.count()):
            with self._changed:
                self._shut(time.monotonic() - TALK_S, MAX_CONNECTIONS)
            try:
                connection, address = self._listener.accept()
            except OSError as error:
                if not isinstance(error, TimeoutError) and not self._closing.is_set():
                    # For example, no file descriptor is left.
                    logger.warning("Tandem: side channel: cannot accept a connection, trying again: %s", error)
                    time.sleep(_NO_DESCRIPTOR_S)
                continue
            connection.settimeout(TALK_S)
            with self._changed:
                # Threads of shut connections must end before others start, or a flood adds threads.
                self._shut(time.monotonic() - TALK_S, MAX_CONNECTIONS - 1)
                self._changed.wait_for(lambda: len(self._open) < MAX_CONNECTIONS, TALK_S)
                self._open[number] = time.monotonic(), connection
            talk = threading.Thread(target=self._talk, args=(number, connection, str(address[0])), daemon=True)
            try:
                talk.start()
            except RuntimeError as error:
                logger.warning("Tandem: side channel: cannot serve a connection: %s", error)
                self._end(number)
        with self._changed:
            self._shut(math.inf, 0)

    def _shut(self, since: float, most: int) -> None:
        """Shut connections down that arrived before ``since``, and the oldest above ``most``."""
        for rank, (arrived_at, connection) in enumerate(self._open.values()):
            if arrived_at < since or rank < len(self._open) - most:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def _end(self, number: int) -> None:
        with self._changed:
            self._open.pop(number)[1].close()
            self._changed.notify_all()

    def _talk(self, number: int, connection: socket.socket, who: str) -> None:
        try:
            self._answer_one(number, connection, who)
        except ssl.SSLError as error:
            logger.warning("Tandem: side channel: %s", _meaning(error, who))
        except OSError as error:
            logger.warning("Tandem: side channel: the connection of %s broke or took over %g s: %s", who, TALK_S, error)
        except Exception as error:
            logger.warning("Tandem: side channel: cannot answer %s, closing the connection: %r", who, error)
        finally:
            self._end(number)

    def _answer_one(self, number: int, connection: socket.socket, who: str) -> None:
        first = connection.recv(1, socket.MSG_PEEK)
        if not first:
            return
        if (first == _TLS_RECORD) != (self._tls is not None):
            ours, theirs = ("has a secret", "none") if self._tls is not None else ("has no secret", "one")
            problem = PeerSecretError(f"side channel: peer {who}", f"this engine {ours}, the peer {theirs}")
            logger.warning("Tandem: %s", problem)
            # Read first: closing a connection with unread bytes resets it, and the response may be
            # lost.
            connection.recv(_MAX_REQUEST_BYTES)
            connection.sendall(_response(_ERROR, f"this engine {ours}, the peer {theirs}".encode()))
            return
        if self._tls is not None:
            with self._changed:
                arrived_at, _ = self._open[number]
                connection = self._tls.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
                self._open[number] = arrived_at, connection
            connection.do_handshake()
        request = b""
        while b"\n" not in request:
            part = connection.recv(_MAX_REQUEST_BYTES)
            request += part
            if not part or len(request) > _MAX_REQUEST_BYTES:
                raise ConnectionError("it sent no request")
        request = request[: request.index(b"\n") + 1]
        process = _PROCESS.fullmatch(request)
        if request == _METADATA_REQUEST:
            connection.sendall(self._answer)
        elif process is not None:
            host, pid, started_at = process.groups()
            found = liveness(ProcessIdentity(host.decode(), int(pid), int(started_at)))
            connection.sendall(_response(_LIVENESS, found.value.encode()))
        else:
            logger.warning("Tandem: side channel: unknown request of %s: %r", who, request[:80])
            text = f"unknown request; send {_METADATA_REQUEST.decode().strip()!r}"
            connection.sendall(_response(_ERROR, text.encode()))


def _listen(host: str, port: int) -> socket.socket:
    """Listen on this address only; ``::`` includes IPv4."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=MAX_CONNECTIONS, dualstack_ipv6=host == "::")


def _response(kind: bytes, body: bytes) -> bytes:
    return _PREFIX.pack(kind, PROTOCOL_VERSION, len(body)) + body


def _meaning(error: ssl.SSLError, who: str) -> str:
    if isinstance(error, ssl.SSLCertVerificationError) or "ALERT" in (error.reason or ""):
        return str(PeerSecretError(f"peer {who}", "its secret differs from this engine's"))
    return f"peer {who}: TLS failed: {error}"


def fetch_metadata(host: str, port: int, incarnation: str, timeout_s: float, identity: bytes = b"") -> EngineMetadata:
    """Fetch an engine's agent metadata.

    Blocks for at most ``timeout_s`` seconds, or longer if a host name is slow to resolve or has
    several addresses. Raises PeerSecretError, StaleReferenceError if another engine or incarnation
    responds, HandshakeError without a response, and WireError for an invalid one.
    """
    body = _ask(_METADATA_REQUEST, host, port, timeout_s, identity)
    try:
        parts = _RANK_METADATA.decode(body)
    except msgspec.MsgspecError as error:
        raise WireError(f"the engine at {host}:{port} sent malformed metadata: {error}") from error
    rank_metadata = [decode_agent_metadata(part) for part in parts]
    agent_metadata = engine_metadata({worker.rank: worker for worker in rank_metadata})
    if agent_metadata.incarnation != incarnation:
        raise StaleReferenceError(
            f"{host}:{port} is now engine {agent_metadata.incarnation}, not {incarnation}: the prefill engine of this "
            "request has restarted, or another engine uses its port"
        )
    return agent_metadata


def ask_liveness(host: str, port: int, process: ProcessIdentity, timeout_s: float, identity: bytes = b"") -> Liveness:
    """Blocks and raises as ``fetch_metadata``. UNKNOWN if ``process`` is malformed or none."""
    request = b"tandem/%d process %s %d %d\n" % (
        PROTOCOL_VERSION,
        process.host.encode(),
        process.pid,
        process.started_at,
    )
    if not _PROCESS.fullmatch(request):
        return Liveness.UNKNOWN
    answer = _ask(request, host, port, timeout_s, identity)
    try:
        return Liveness(answer.decode(errors="replace"))
    except ValueError:
        raise WireError(f"the engine at {host}:{port} sent {answer[:80]!r} as the state of a process") from None


def _ask(request: bytes, host: str, port: int, timeout_s: float, identity: bytes) -> bytes:
    """Retry broken connections, which an overloaded engine closes; a refused one has no engine."""
    where = f"the prefill engine at {host}:{port}"
    tls = tls_context(identity, server=False) if identity else None
    give_up_at = time.monotonic() + timeout_s
    attempt_s, pause_s = _FIRST_ATTEMPT_S, _FIRST_PAUSE_S
    while True:
        try:
            return _Attempt(where, request, min(give_up_at, time.monotonic() + attempt_s)).ask(host, port, tls)
        except ssl.SSLCertVerificationError as error:
            raise PeerSecretError(where, "its secret differs from this engine's") from error
        except (OSError, EOFError) as error:
            if isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError):
                raise _tls_failure(error, where) from error
            if isinstance(error, OSError) and error.errno == errno.ECONNREFUSED:
                raise HandshakeError(f"{where} refuses connections: no side channel listens there") from error
            if time.monotonic() + pause_s >= give_up_at:
                raise HandshakeError(f"{where} did not answer within {timeout_s:g} s: {error}") from error
        except ValueError as error:  # Python's error for an invalid host name
            raise HandshakeError(f"{where} has no valid address: {error}") from error
        time.sleep(pause_s)
        attempt_s, pause_s = 2 * attempt_s, min(2 * pause_s, _LONGEST_PAUSE_S)


def _tls_failure(error: ssl.SSLError, where: str) -> HandshakeError:
    if "ALERT" in (error.reason or ""):
        return PeerSecretError(where, "it rejects this engine's secret")
    if error.reason == "WRONG_VERSION_NUMBER":
        return PeerSecretError(where, "this engine has a secret, the prefill engine has none")
    return HandshakeError(f"{where}: TLS failed: {error}")


class _Attempt:
    """Not asyncio, which closes a connection without the TLS alert that tells the server why."""

    def __init__(self, where: str, request: bytes, give_up_at: float) -> None:
        self._where = where
        self._request = request
        self._give_up_at = give_up_at

    def ask(self, host: str, port: int, tls: ssl.SSLContext | None) -> bytes:
        try:
            raw = socket.create_connection((host, port), timeout=self._left_s())
        except TimeoutError:
            raise TimeoutError("the connection was not established in time") from None
        with raw, tls.wrap_socket(raw) if tls is not None else contextlib.nullcontext(raw) as connection:
            connection.settimeout(self._left_s())
            connection.sendall(self._request)
            return self._answer(connection)

    def _answer(self, connection: socket.socket) -> bytes:
        head = self._receive(connection, _PREFIX.size)
        kind, version, length = _PREFIX.unpack(head)
        if kind not in (_METADATA if self._request == _METADATA_REQUEST else _LIVENESS, _ERROR):
            raise WireError(f"{self._where} answered {head!r}: this is not Tandem's side channel")
        if kind == _ERROR:
            text = self._receive(connection, min(length, _MAX_REQUEST_BYTES)).decode(errors="replace")
            if "secret" in text:
                raise PeerSecretError(self._where, f"its error is: {text}")
            raise WireError(f"{self._where} answered with an error: {text}")
        if version != PROTOCOL_VERSION:
            raise WireError(
                f"{self._where} has protocol version {version}, this engine {PROTOCOL_VERSION}; run the same "
                "release of Tandem on both"
            )
        most = _MAX_ANSWER_BYTES if kind == _METADATA else _MAX_REQUEST_BYTES
        if length > most:
            raise WireError(f"{self._where} answers with {length} bytes; the limit is {most}")
        return self._receive(connection, length)

    def _receive(self, connection: socket.socket, size: int) -> bytes:
        """Receive exactly ``size`` bytes. Allocates memory only for received bytes."""
        received = bytearray()
        while len(received) < size:
            connection.settimeout(self._left_s())
            try:
                part = connection.recv(min(size - len(received), 2**16))
            except TimeoutError:
                raise TimeoutError(f"connected, but received only {len(received)} of {size} bytes") from None
            if not part:
                raise EOFError("the connection was closed before the end of the answer")
            received += part
        return bytes(received)

    def _left_s(self) -> float:
        left_s = self._give_up_at - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the time limit of an attempt has passed")
        return left_s
