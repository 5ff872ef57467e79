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

import asyncio
import contextlib
import errno
import logging
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
        self._listener.setblocking(False)
        self.port = int(self._listener.getsockname()[1])
        self._open: dict[asyncio.Task[None], None] = {}
        self._loop = asyncio.new_event_loop()
        self._closing = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="tandem-side-channel", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Wait at most 5 s for the thread. Idempotent."""
        if self._thread.is_alive():
            # The loop may have been closed after the check.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._closing.set)
            self._thread.join(timeout=5)
        self._listener.close()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        accepting = asyncio.create_task(self._accept_forever())
        await self._closing.wait()
        tasks = [accepting, *self._open]
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)

    async def _accept_forever(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, address = await loop.sock_accept(self._listener)
            except Exception as error:
                # For example, no file descriptor is left. The server must outlive such an error.
                logger.warning("Tandem: side channel: cannot accept a connection, trying again: %s", error)
                await asyncio.sleep(_NO_DESCRIPTOR_S)
            else:
                if len(self._open) >= MAX_CONNECTIONS:
                    oldest = next(iter(self._open))
                    del self._open[oldest]
                    oldest.cancel()
                task = loop.create_task(self._talk(connection, str(address[0])))
                self._open[task] = None
                task.add_done_callback(lambda done: self._open.pop(done, None))
            # Let open connections run: `sock_accept` does not yield while the backlog has others.
            await asyncio.sleep(0)

    async def _talk(self, connection: socket.socket, who: str) -> None:
        streams = _Streams(connection)
        try:
            async with asyncio.timeout(TALK_S):
                await self._answer_one(connection, streams, who)
        except TimeoutError:
            logger.warning("Tandem: side channel: the connection of %s did not end within %g s", who, TALK_S)
        except ssl.SSLError as error:
            logger.warning("Tandem: side channel: %s", _meaning(error, who))
        except (OSError, EOFError, asyncio.LimitOverrunError) as error:
            logger.warning("Tandem: side channel: the connection of %s broke: %s", who, error)
        except Exception as error:
            logger.warning("Tandem: side channel: cannot answer %s, closing the connection: %r", who, error)
        finally:
            streams.abort()

    async def _answer_one(self, connection: socket.socket, streams: _Streams, who: str) -> None:
        loop = asyncio.get_running_loop()
        connection.setblocking(False)
        first = await _peek(loop, connection)
        if not first:
            return
        if (first == _TLS_RECORD) != (self._tls is not None):
            ours, theirs = ("has a secret", "none") if self._tls is not None else ("has no secret", "one")
            problem = PeerSecretError(f"side channel: peer {who}", f"this engine {ours}, the peer {theirs}")
            logger.warning("Tandem: %s", problem)
            # Read first: closing a connection with unread bytes resets it, and the response may be
            # lost.
            await loop.sock_recv(connection, _MAX_REQUEST_BYTES)
            await loop.sock_sendall(connection, _response(_ERROR, f"this engine {ours}, the peer {theirs}".encode()))
            return
        reader, writer = await streams.open(self._tls)
        request = await reader.readuntil(b"\n")
        process = _PROCESS.fullmatch(request)
        if request == _METADATA_REQUEST:
            writer.write(self._answer)
        elif process is not None:
            host, pid, started_at = process.groups()
            found = liveness(ProcessIdentity(host.decode(), int(pid), int(started_at)))
            writer.write(_response(_LIVENESS, found.value.encode()))
        else:
            logger.warning("Tandem: side channel: unknown request of %s: %r", who, request[:80])
            writer.write(_response(_ERROR, f"unknown request; send {_METADATA_REQUEST.decode().strip()!r}".encode()))
        await writer.drain()
        writer.close()
        await writer.wait_closed()


class _Streams:
    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._transport: asyncio.BaseTransport | None = None
        self._owned = False

    async def open(self, tls: ssl.SSLContext | None) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(_MAX_REQUEST_BYTES, loop)
        protocol = asyncio.StreamReaderProtocol(reader)
        self._owned = True  # by asyncio, which closes it if the handshake fails
        transport, _ = await loop.connect_accepted_socket(lambda: protocol, self._connection, ssl=tls)
        self._transport = transport
        return reader, asyncio.StreamWriter(transport, protocol, reader, loop)

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()  # type: ignore[attr-defined]
        elif not self._owned:
            self._connection.close()


def _listen(host: str, port: int) -> socket.socket:
    """Listen on this address only; ``::`` includes IPv4."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=MAX_CONNECTIONS, dualstack_ipv6=host == "::")


async def _peek(loop: asyncio.AbstractEventLoop, connection: socket.socket) -> bytes:
    ready = asyncio.Event()
    loop.add_reader(connection, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(connection)
    return connection.recv(1, socket.MSG_PEEK)


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
    if isinstance(error, ssl.SSLCertVerificationError):
        return PeerSecretError(where, "its secret differs from this engine's")
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
