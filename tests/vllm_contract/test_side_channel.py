"""The side channel with strangers: access to agent metadata, error answers, and the cost of a
flood.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import psutil
import pytest

from connectors.codec import encode_agent_metadata
from connectors.errors import HandshakeError, PeerSecretError, WireError
from connectors.protocol.agent_metadata import PROTOCOL_VERSION
from connectors.vllm_hma.handshake import side_channel
from connectors.vllm_hma.handshake.secret import derive_keys
from connectors.vllm_hma.handshake.side_channel import MetadataServer, fetch_metadata
from connectors.vllm_hma.orders import Chunk, Expect
from testing.connector_state import open_connections
from tests.vllm_contract.workers import DIGEST, LIMITS, Worker, receive, results

SECRET, ANOTHER = "the secret of these two engines", "the secret of two other engines"
QUESTION = b"tandem/%d metadata\n" % PROTOCOL_VERSION


@pytest.fixture
def serve(worker: Callable[..., Worker]) -> Iterator[Callable[..., MetadataServer]]:
    """Start servers of one agent metadata, with or without a secret; stop them at the end."""
    agent_metadata = encode_agent_metadata(worker("p").agent_metadata)
    started: list[MetadataServer] = []

    def start(secret: str = "", host: str = "127.0.0.1") -> MetadataServer:
        started.append(MetadataServer(host, 0, [agent_metadata], derive_keys(secret).identity))
        return started[-1]

    yield start
    for server in started:
        server.close()


def fetch(port: int, secret: str = "", timeout_s: float = 60.0) -> str:
    """Return the incarnation in the agent metadata that a peer with ``secret`` receives."""
    return fetch_metadata("127.0.0.1", port, "p", timeout_s, derive_keys(secret).identity).incarnation


def connect(port: int, host: str = "127.0.0.1") -> socket.socket:
    return socket.create_connection((host, port), timeout=60)


class Eavesdropper:
    """Relay of one connection to a port that records the bytes: ``heard`` from clients, ``said`` to
    them.
    """

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.heard, self.said = bytearray(), bytearray()
        threading.Thread(target=self._relay, daemon=True).start()

    def _relay(self) -> None:
        with self._listener, self._listener.accept()[0] as asker, connect(self._target) as server:
            answering = threading.Thread(target=self._pump, args=(server, asker, self.said), daemon=True)
            answering.start()
            self._pump(asker, server, self.heard)
            answering.join(timeout=60)

    @staticmethod
    def _pump(source: socket.socket, sink: socket.socket, kept: bytearray) -> None:
        with contextlib.suppress(OSError):
            while part := source.recv(4096):
                kept += part
                sink.sendall(part)
            sink.shutdown(socket.SHUT_WR)


# ---- secrets -----------------------------------------------------------------------------------


@pytest.mark.parametrize("secret", ["", SECRET])
def test_peers_with_one_secret_exchange_kv(worker: Callable[..., Worker], secret: str) -> None:
    """A transfer completes from the agent metadata to the last message, with and without a
    secret.
    """
    producer, consumer = worker("p", secret=secret), worker("c", secret=secret)
    producer.cache[:] = np.arange(1, 9, dtype=np.uint8)[:, None]
    consumer.step(receives=[receive(producer.address)])
    producer.step(expects=[Expect("q", "t", 7, DIGEST)], chunks=[Chunk("q", ((1, 2),), 7)])
    assert results(consumer) == (set(), {"r"}, set())
    assert consumer.cache[[3, 5], 0].tolist() == [2, 3]


@pytest.mark.parametrize(
    ("ours", "theirs", "asker_says", "server_says"),
    [
        (SECRET, ANOTHER, "its secret differs from this engine's", "its secret differs from this engine's"),
        (
            SECRET,
            "",
            "this engine has a secret, the prefill engine has none",
            "this engine has no secret, the peer one",
        ),
        ("", SECRET, "this engine has a secret, the peer none", "this engine has a secret, the peer none"),
    ],
    ids=["different", "only ours", "only theirs"],
)
def test_secrets_that_differ(
    worker: Callable[..., Worker], caplog: pytest.LogCaptureFixture, ours: str, theirs: str, asker_says, server_says
) -> None:
    """No wait until a deadline: decode computes the request at once, and both logs have the
    remedy.
    """
    producer, consumer = worker("p", secret=theirs), worker("c", secret=ours)
    with pytest.raises(PeerSecretError, match=asker_says) as raised:
        fetch(producer.server.port, ours)
    assert "set the same transfer.secret (kv_connector_extra_config: secret) on both engines" in str(raised.value)
    consumer.step(receives=[receive(producer.address)])
    assert results(consumer, within_s=LIMITS.progress_s / 2) == (set(), {"r"}, {"r"})
    logged = {record.name: record.getMessage() for record in caplog.records}
    assert asker_says in logged["connectors.vllm_hma.handshake.handshaker"]
    assert server_says in logged["connectors.vllm_hma.handshake.side_channel"]
    assert "set the same transfer.secret" in logged["connectors.vllm_hma.handshake.side_channel"]


def test_a_frame_of_another_secret_is_dropped(worker: Callable[..., Worker], caplog: pytest.LogCaptureFixture) -> None:
    """A peer that reaches the transport without the secret moves nothing."""
    producer, consumer = worker("p", secret=SECRET), worker("c", secret=ANOTHER)
    name = consumer.transport.add_peer(producer.transport.metadata())
    frame = b"TDM" + bytes([PROTOCOL_VERSION]) + (2).to_bytes(4, "little") + b"{}" + bytes(32)
    consumer.transport.notify(name, frame)
    give_up_at = time.monotonic() + 60
    while "the sender has another secret" not in caplog.text:
        assert time.monotonic() < give_up_at
        producer.runtime.results()
    assert not any(producer.runtime.counts().values())


def test_a_metadata_cannot_be_overheard(serve: Callable[..., MetadataServer]) -> None:
    """With a secret, neither request nor agent metadata are sent as plain text; without one,
    both are.
    """
    for secret, clear in (("", True), (SECRET, False)):
        ear = Eavesdropper(serve(secret).port)
        assert fetch(ear.port, secret) == "p"
        assert (QUESTION in ear.heard, b"transport_metadata" in ear.said) == (clear, clear)


# ---- hostile peers -----------------------------------------------------------------------------


@pytest.mark.parametrize("secret", ["", SECRET])
@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"\n",
        b"x" * 900,
        b"x" * 10**6,
        b"GET / HTTP/1.1\r\n\r\n",
        b"tandem/1 cards\n",
        QUESTION + QUESTION * 1000,
        b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03\x01NULL",
        b"\x16\x03\x01\xff\xff" + bytes(1000),
        b"\x16\x03\x03\x00\x02\x01\x00",
        bytes(4096),
    ],
    ids=lambda sent: sent[:16].decode(errors="replace") or "nothing",
)
def test_whatever_it_is_sent(serve: Callable[..., MetadataServer], secret: str, sent: bytes) -> None:
    """The server closes the connection, and answers the next valid request."""
    server = serve(secret)
    with connect(server.port) as stranger, contextlib.suppress(OSError):
        stranger.sendall(sent)
        stranger.shutdown(socket.SHUT_WR)
        while stranger.recv(2**16):
            pass
    assert fetch(server.port, secret) == "p"


def test_an_older_tandem_is_told(serve: Callable[..., MetadataServer]) -> None:
    """The answer to another version names the valid request."""
    with connect(serve().port) as older:
        older.sendall(b"tandem/2 cards\n")
        assert f"tandem/{PROTOCOL_VERSION} metadata".encode() in older.recv(1000)


@pytest.mark.parametrize(
    ("answer", "error", "says"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n", WireError, "this is not Tandem's side channel"),
        (b"TDA\x02\x00\x00\x00\x00", WireError, f"protocol version 2, this engine {PROTOCOL_VERSION}"),
        (b"TDA%c\xff\xff\xff\xff" % PROTOCOL_VERSION, WireError, "answers with 4294967295 bytes; the limit is"),
        (b"TDA%c\x02\x00\x00\x00\xdd\xff" % PROTOCOL_VERSION, WireError, "sent malformed metadata"),
        (
            b"TDA%c\x05\x20\x00\x00\xdc\x10\x01" % PROTOCOL_VERSION + b"\xc4\0" * 4097,
            WireError,
            "sent malformed metadata",
        ),
        (b"TDA%c\x05\x00\x00\x00\x91\xc4\x02{}" % PROTOCOL_VERSION, WireError, "malformed agent metadata"),
        (b"TDE%c\xff\xff\xff\xff" % PROTOCOL_VERSION + b"no" * 600, WireError, "answered with an error: nono"),
        (b"TDA", HandshakeError, "did not answer within 1 s"),
        (b"", HandshakeError, "did not answer within 1 s"),
    ],
)
def test_an_answer_that_is_no_metadata(answer: bytes, error: type[Exception], says: str) -> None:
    """Whatever listens there causes a typed error within the deadline."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def reply() -> None:
            with contextlib.suppress(OSError):
                while True:
                    with listener.accept()[0] as asker:
                        asker.recv(1000)
                        asker.sendall(answer)

        threading.Thread(target=reply, daemon=True).start()
        with pytest.raises(error, match=says):
            fetch(listener.getsockname()[1], timeout_s=1.0)


@pytest.mark.parametrize("secret", ["", SECRET])
def test_connections_that_say_nothing(
    serve: Callable[..., MetadataServer], monkeypatch: pytest.MonkeyPatch, secret: str
) -> None:
    """Above the connection limit a peer is served at once, and the oldest connections are
    closed.
    """
    monkeypatch.setattr(side_channel, "MAX_CONNECTIONS", 128)
    server = serve(secret)
    held = [connect(server.port) for _ in range(side_channel.MAX_CONNECTIONS + 50)]
    try:
        assert fetch(server.port, secret) == "p"
        assert open_connections(server) <= side_channel.MAX_CONNECTIONS
        held[0].settimeout(60)
        with contextlib.suppress(ConnectionError):
            assert held[0].recv(1) == b""
    finally:
        for one in held:
            one.close()


def test_a_question_that_drips(serve: Callable[..., MetadataServer], monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte from time to time does not keep a connection open."""
    monkeypatch.setattr(side_channel, "TALK_S", 0.5)
    with connect(serve().port) as slow:
        give_up_at = time.monotonic() + 60
        with contextlib.suppress(ConnectionError):
            while time.monotonic() < give_up_at:
                slow.sendall(b"t")
                time.sleep(0.05)
        assert time.monotonic() < give_up_at


@pytest.mark.parametrize("secret", ["", SECRET])
def test_a_flood_of_connections(serve: Callable[..., MetadataServer], secret: str) -> None:
    """While two threads connect as fast as they can, peers are served; afterwards no connection
    remains.
    """
    server = serve(secret)
    assert fetch(server.port, secret) == "p"
    before = len(os.listdir("/proc/self/fd"))
    over = threading.Event()
    connected = [0, 0]

    def flood(which: int) -> None:
        while not over.is_set():
            with contextlib.suppress(OSError), connect(server.port) as one:
                one.sendall(b"\x16\x03\x01\x02\x00" + os.urandom(100))
                connected[which] += 1

    threads = [threading.Thread(target=flood, args=(which,)) for which in range(2)]
    for thread in threads:
        thread.start()
    try:
        fetched, give_up_at = 0, time.monotonic() + 120
        while fetched < 5 or min(connected) <= 20:  # a busy core may schedule a thread rarely
            assert fetch(server.port, secret, timeout_s=30.0) == "p"
            fetched += 1
            assert time.monotonic() < give_up_at
    finally:
        over.set()
        for thread in threads:
            thread.join(timeout=60)
    assert fetch(server.port, secret, timeout_s=30.0) == "p"
    give_up_at = time.monotonic() + 60 + side_channel.TALK_S
    while len(os.listdir("/proc/self/fd")) > before + 2:
        assert time.monotonic() < give_up_at
        time.sleep(0.05)


def test_it_listens_where_it_is_told_to(serve: Callable[..., MetadataServer]) -> None:
    """The side channel listens on the configured address and no other."""
    server = serve(host="127.0.0.3")
    listening = [
        one.laddr for one in psutil.Process().net_connections("tcp") if one.laddr and one.laddr.port == server.port
    ]
    # A connection to 127.0.0.1 proves nothing: another process may listen there on the same port.
    assert {address.ip for address in listening} == {"127.0.0.3"}
    assert fetch_metadata("127.0.0.3", server.port, "p", 60.0).incarnation == "p"
