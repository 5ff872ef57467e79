"""The side channel: keys from a secret, strangers, floods, and the process of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from connectors.codec import encode_agent_metadata
from connectors.errors import ConfigurationError, HandshakeError, PeerSecretError, WireError
from connectors.protocol.agent_metadata import PROTOCOL_VERSION
from connectors.vllm_hma.handshake import side_channel
from connectors.vllm_hma.handshake.metadata_process import MetadataProcess
from connectors.vllm_hma.handshake.secret import Keys, derive_keys
from connectors.vllm_hma.handshake.side_channel import MetadataServer, fetch_metadata
from testing.connector_state import open_connections, side_channel_process
from tests.vllm_contract.workers import FAILED, LIMITS, Worker, receive, results, taken, until

SECRET, ANOTHER = "the secret of these two engines", "the secret of two other engines"
QUESTION = b"tandem/%d metadata\n" % PROTOCOL_VERSION
Serve = Callable[..., MetadataServer]


@pytest.fixture
def metadata(worker: Callable[..., Worker]) -> bytes:
    return encode_agent_metadata(worker("p").agent_metadata)


@pytest.fixture
def serve(metadata: bytes) -> Iterator[Serve]:
    started: list[MetadataServer] = []

    def start(secret: str = "", host: str = "127.0.0.1") -> MetadataServer:
        started.append(MetadataServer(host, 0, [metadata], derive_keys(secret).identity))
        return started[-1]

    yield start
    for server in started:
        server.close()


def fetch(port: int, secret: str = "", timeout_s: float = 60.0, host: str = "127.0.0.1") -> str:
    """Return the incarnation in the agent metadata that a peer with ``secret`` receives."""
    return fetch_metadata(host, port, "p", timeout_s, derive_keys(secret).identity).incarnation


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=60)


# ---- secrets -----------------------------------------------------------------------------------


def test_keys_of_a_secret() -> None:
    """Both sides of an upgrade derive the same keys: a change needs another protocol version."""
    keys, other = derive_keys("a secret of enough characters"), derive_keys("a secret of enough characters!")
    assert {len(keys.messages), len(keys.identity)} == {32}
    assert len({keys.messages, keys.identity, other.messages, other.identity}) == 4
    assert keys.messages.hex()[:16] == "94d28a3dc286f5f7"
    assert derive_keys("") == Keys(b"", b"")
    assert repr(keys) == "Keys()", "no log line shows them"
    with pytest.raises(ConfigurationError, match="at least 16") as raised:
        derive_keys("hunter2")
    assert "hunter2" not in str(raised.value)


@pytest.mark.parametrize(
    ("ours", "theirs", "asker_says", "server_says"),
    [
        (SECRET, ANOTHER, "its secret differs", "its secret differs"),
        (SECRET, "", "this engine has a secret, the prefill engine has none", "this engine has no secret"),
        ("", SECRET, "this engine has a secret, the peer none", "this engine has a secret, the peer none"),
    ],
    ids=["different", "only ours", "only theirs"],
)
def test_secrets_that_differ(
    worker: Callable[..., Worker],
    caplog: pytest.LogCaptureFixture,
    ours: str,
    theirs: str,
    asker_says: str,
    server_says: str,
) -> None:
    """Decode computes the request at once, and both logs have the remedy."""
    producer, consumer = worker("p", secret=theirs), worker("c", secret=ours)
    with pytest.raises(PeerSecretError, match=asker_says):
        fetch(producer.server.port, ours)
    consumer.step(receives=[receive(producer.address)])
    assert results(consumer, within_s=LIMITS.progress_s / 2) == FAILED
    logged = {record.name.rpartition(".")[2]: record.getMessage() for record in caplog.records}
    for name, says in (("handshaker", asker_says), ("side_channel", server_says)):
        assert says in logged[name]
        assert "set the same transfer.secret" in logged[name]


def test_a_frame_of_another_secret_is_dropped(worker: Callable[..., Worker], caplog: pytest.LogCaptureFixture) -> None:
    """A peer that reaches the transport without the secret moves nothing."""
    producer, consumer = worker("p", secret=SECRET), worker("c", secret=ANOTHER)
    name = consumer.transport.add_peer(producer.transport.metadata())
    frame = b"TDM" + bytes([PROTOCOL_VERSION]) + (2).to_bytes(4, "little") + b"{}" + bytes(32)
    consumer.transport.notify(name, frame)
    until(lambda: not any(taken(producer)) and "the sender has another secret" in caplog.text)
    assert not any(producer.runtime.counts().values())


def test_a_client_that_checks_nothing_learns_nothing(serve: Serve) -> None:
    """With a secret, the server demands the certificate that only the secret gives."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with connect(serve(SECRET).port) as raw, context.wrap_socket(raw) as stranger:
        stranger.sendall(QUESTION)
        with contextlib.suppress(OSError):
            assert stranger.recv(1) == b""


# ---- strangers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("secret", ["", SECRET])
@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"\n",
        b"x" * 900,
        b"x" * 10**6,
        b"x" * 1000 + b"\n",
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
def test_whatever_it_is_sent(serve: Serve, caplog: pytest.LogCaptureFixture, secret: str, sent: bytes) -> None:
    """The server closes the connection, and answers the next valid request. An older Tandem is told
    the version.
    """
    server, said = serve(secret), b""
    with connect(server.port) as stranger, contextlib.suppress(OSError):
        stranger.sendall(sent)
        stranger.shutdown(socket.SHUT_WR)
        while part := stranger.recv(2**16):
            said += part
    assert fetch(server.port, secret) == "p"
    assert secret or not sent.startswith(b"tandem/1 ") or QUESTION.strip() in said
    assert "cannot answer" not in caplog.text  # nothing unexpected


HEAD = b"%c" % PROTOCOL_VERSION


@pytest.mark.parametrize(
    ("answer", "error", "says"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n", WireError, "not Tandem's side channel"),
        (b"TDA\x02\x00\x00\x00\x00", WireError, f"protocol version 2, this engine {PROTOCOL_VERSION}"),
        (b"TDA" + HEAD + b"\xff\xff\xff\xff", WireError, "4294967295 bytes"),
        (b"TDA" + HEAD + b"\x02\x00\x00\x00\xdd\xff", WireError, "malformed metadata"),
        (b"TDA" + HEAD + b"\x05\x20\x00\x00\xdc\x10\x01" + b"\xc4\0" * 4097, WireError, "malformed metadata"),
        (b"TDA" + HEAD + b"\x05\x00\x00\x00\x91\xc4\x02{}", WireError, "malformed agent metadata"),
        (b"TDE" + HEAD + b"\xff\xff\xff\xff" + b"no" * 600, WireError, "an error: nono"),
        (b"TDA", HandshakeError, "did not answer"),
        (b"", HandshakeError, "did not answer"),
    ],
)
def test_an_answer_that_is_no_metadata(answer: bytes, error: type[Exception], says: str) -> None:
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
def test_connections_that_say_nothing(serve: Serve, monkeypatch: pytest.MonkeyPatch, secret: str) -> None:
    """Above the limit a peer is served at once, and the oldest connections are closed."""
    monkeypatch.setattr(side_channel, "MAX_CONNECTIONS", 128)
    monkeypatch.setattr(side_channel, "TALK_S", 600.0)
    server = serve(secret)
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(connect(server.port)) for _ in range(side_channel.MAX_CONNECTIONS + 50)]
        assert fetch(server.port, secret) == "p"
        assert open_connections(server) <= side_channel.MAX_CONNECTIONS
        with contextlib.suppress(ConnectionError):
            assert held[0].recv(1) == b""
    until(lambda: open_connections(server) == 0)


def test_a_connection_that_breaks_is_repeated(serve: Serve) -> None:
    """An engine with too many connections closes some of those that wait for an answer."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def relay() -> None:
            listener.accept()[0].close()
            with listener.accept()[0] as asker, connect(serve().port) as server:
                server.sendall(asker.recv(1000))
                while part := server.recv(2**16):
                    asker.sendall(part)

        threading.Thread(target=relay, daemon=True).start()
        assert fetch(listener.getsockname()[1]) == "p"


def test_a_question_that_drips(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte from time to time does not keep a connection open."""
    monkeypatch.setattr(side_channel, "TALK_S", 0.5)
    with connect(serve().port) as slow:
        give_up_at = time.monotonic() + 60
        with contextlib.suppress(ConnectionError):
            while time.monotonic() < give_up_at:
                slow.sendall(b"t")
                time.sleep(0.25)  # fewer bytes in all than a question may have
        assert time.monotonic() < give_up_at


def test_it_listens_where_it_is_told_to(serve: Serve) -> None:
    server = serve(host="127.0.0.3")
    every = [one.laddr for one in psutil.Process().net_connections("tcp") if one.laddr]
    # A connection to 127.0.0.1 proves nothing: another process may listen there on the same port.
    assert {address.ip for address in every if address.port == server.port} == {"127.0.0.3"}
    assert fetch(server.port, host="127.0.0.3") == "p"


# ---- in a process of its own -------------------------------------------------------------------

DECODE_WORKERS = 96
OWNER = """
import sys, time
from connectors.vllm_hma.handshake.metadata_process import MetadataProcess
print(MetadataProcess("127.0.0.1", 0, [b"agent metadata"]).port, flush=True)
time.sleep(600)
"""


def listens(port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0


def test_a_process_that_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its port is taken, or it ends before it has read the metadata, which exceed a pipe's buffer.

    The error is raised in the engine's process, where its operator looks.
    """
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigurationError, match=f"side_channel_port {port}: cannot listen"):
            MetadataProcess("127.0.0.1", port, [b"agent metadata"])
    monkeypatch.setattr(sys, "executable", "/bin/true")
    with pytest.raises(ConfigurationError, match="the side channel process"):
        MetadataProcess("127.0.0.1", 0, [bytes(4 << 20)])


def test_a_process_that_is_killed_is_started_again(metadata: bytes) -> None:
    """Without the process, no further decode engine could connect to a working prefill engine."""
    server = MetadataProcess("127.0.0.1", 0, [metadata])
    try:
        for _ in range(2):
            os.kill(side_channel_process(server).pid, signal.SIGKILL)
            until(lambda: not listens(server.port))
            until(lambda: listens(server.port))
            assert fetch(server.port) == "p"
    finally:
        server.close()
    assert not listens(server.port)


def test_many_decode_workers_at_once(metadata: bytes) -> None:
    server = MetadataProcess("127.0.0.1", 0, [metadata], derive_keys(SECRET).identity)
    try:
        with ThreadPoolExecutor(DECODE_WORKERS) as pool:
            assert {*pool.map(lambda _: fetch(server.port, SECRET, 30.0), range(DECODE_WORKERS))} == {"p"}
    finally:
        server.close()
    assert side_channel_process(server).poll() is not None
    assert not listens(server.port)
    server.close()


def test_it_ends_with_its_engine() -> None:
    """Also if the engine is killed."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, env=environment) as owner:
        assert owner.stdout is not None
        try:
            port = int(owner.stdout.readline())
            assert listens(port)
        finally:
            owner.kill()
    until(lambda: not listens(port))
