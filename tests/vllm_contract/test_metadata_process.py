"""The side channel in its own process: it serves, names its refusals, and ends with its parent."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest

from connectors.codec import encode_agent_metadata
from connectors.errors import ConfigurationError
from connectors.vllm_hma.handshake.metadata_process import MetadataProcess
from connectors.vllm_hma.handshake.secret import derive_keys
from connectors.vllm_hma.handshake.side_channel import fetch_metadata
from testing.connector_state import side_channel_process
from tests.vllm_contract.workers import Worker, until

SECRET = "the secret of these two engines"
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


def test_a_process_that_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process ends before it has read the metadata, which exceed the pipe's buffer."""
    monkeypatch.setattr(sys, "executable", "/bin/true")
    with pytest.raises(ConfigurationError, match="the side channel process ended or did not start in time"):
        MetadataProcess("127.0.0.1", 0, [bytes(4 << 20)])


def test_a_process_that_is_killed_is_started_again(worker: Callable[..., Worker]) -> None:
    """Without the process, no further decode engine could connect to a working prefill engine."""
    server = MetadataProcess("127.0.0.1", 0, [encode_agent_metadata(worker("p").agent_metadata)])
    try:
        for _ in range(2):
            os.kill(side_channel_process(server).pid, signal.SIGKILL)
            until(lambda: not listens(server.port))
            until(lambda: listens(server.port))
            assert fetch_metadata("127.0.0.1", server.port, "p", 30.0).incarnation == "p"
    finally:
        server.close()
    assert not listens(server.port)


def test_many_decode_workers_at_once(worker: Callable[..., Worker]) -> None:
    """All clients get the agent metadata, over TLS; after the end, no process listens."""
    identity = derive_keys(SECRET).identity
    server = MetadataProcess("127.0.0.1", 0, [encode_agent_metadata(worker("p").agent_metadata)], identity)
    found: list[str] = []

    def ask() -> None:
        found.append(fetch_metadata("127.0.0.1", server.port, "p", 30.0, identity).incarnation)

    threads = [threading.Thread(target=ask, daemon=True) for _ in range(DECODE_WORKERS)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    finally:
        server.close()
    assert found == ["p"] * DECODE_WORKERS
    assert side_channel_process(server).poll() is not None
    assert not listens(server.port)
    server.close()


def test_a_port_that_is_taken_is_refused_by_name() -> None:
    """The error is raised in the engine's process, where its operator looks."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigurationError, match=f"side_channel_port {port}: cannot listen: .* port 0 takes"):
            MetadataProcess("127.0.0.1", port, [b"agent metadata"])


def test_it_ends_with_its_engine() -> None:
    """The process also ends if its parent is killed."""
    with subprocess.Popen(
        [sys.executable, "-c", OWNER],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    ) as owner:
        assert owner.stdout is not None
        try:
            port = int(owner.stdout.readline())
            assert listens(port)
        finally:
            owner.kill()
    until(lambda: not listens(port))
