"""Proofs that a worker's process has ended, observations that prove nothing, and engine cores that
end with their parent: real processes.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from connectors.errors import HandshakeError
from connectors.protocol.agent_metadata import ProcessIdentity
from connectors.protocol.engines import Suspect
from connectors.protocol.params import EngineAddress
from connectors.protocol.wire import Peer
from connectors.vllm_hma.handshake import probe, processes
from connectors.vllm_hma.handshake.probe import WorkerProbe
from connectors.vllm_hma.handshake.processes import Liveness, liveness, own_process
from connectors.vllm_hma.handshake.side_channel import MetadataServer, ask_liveness, fetch_metadata
from tests.vllm_contract.workers import until

MALFORMED = ("a" * 70, "a..b", "nul\x00", "\udcff", ".", "[::1]")
Child = tuple[subprocess.Popen[bytes], ProcessIdentity]


@pytest.fixture
def refusing() -> Iterator[int]:
    """Reserve a port without a listener."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


@pytest.fixture
def server() -> Iterator[MetadataServer]:
    made = MetadataServer("127.0.0.1", 0, [])
    yield made
    made.close()


@pytest.fixture
def child() -> Iterator[Child]:
    code = "import time; from connectors.vllm_hma.handshake.processes import own_process; "
    code += "me = own_process(); print(me.host, me.pid, me.started_at, flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        host, pid, started_at = process.stdout.readline().decode().split()
        yield process, ProcessIdentity(host, int(pid), int(started_at))
        process.kill()


ME = own_process()
GONE = replace(ME, started_at=1)
"""A process of this host that has ended: its id belongs to another one."""


# ---- processes ---------------------------------------------------------------------------------


def test_a_process_lives_until_it_has_ended(child: Child) -> None:
    """A stopped process counts as alive, a killed process as ended, also before it is reaped."""
    process, identity = child
    assert liveness(identity) is Liveness.ALIVE
    process.send_signal(signal.SIGSTOP)
    assert liveness(identity) is Liveness.ALIVE
    process.kill()
    until(lambda: liveness(identity) is Liveness.GONE)
    process.wait()
    assert liveness(identity) is Liveness.GONE


ENDS_ITS_MAIN_THREAD = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(300,)).start()
print(flush=True)
ctypes.CDLL(None).pthread_exit(None)
"""


def test_a_process_that_has_lost_its_main_thread_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process's other threads may write. Its state is known without signals."""
    with subprocess.Popen([sys.executable, "-c", ENDS_ITS_MAIN_THREAD], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            stat = Path(f"/proc/{process.pid}/stat")

            def fields() -> list[str]:
                return stat.read_text(encoding="utf-8").rpartition(")")[2].split()

            until(lambda: fields()[0] == "Z")
            identity = replace(ME, pid=process.pid, started_at=int(fields()[19]))
            assert liveness(identity) is Liveness.ALIVE

            def refuse(_: int, __: int) -> None:
                raise PermissionError

            with monkeypatch.context() as patch:
                patch.setattr(os, "kill", refuse)
                assert liveness(identity) is Liveness.ALIVE
        finally:
            process.kill()
        until(lambda: liveness(identity) is Liveness.GONE)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({}, Liveness.ALIVE),
        ({"started_at": ME.started_at - 1}, Liveness.GONE),  # the id is used again
        # Other hosts and namespaces use the same ids for other processes.
        ({"pid": 2**22 + 1, "host": ""}, Liveness.UNKNOWN),
        ({"pid": 2**22 + 1, "host": "another boot/4026531836/4026531834"}, Liveness.UNKNOWN),
        ({"pid": 2**22 + 1, "host": ME.host + "1"}, Liveness.UNKNOWN),
        ({"host": "x" * 300}, Liveness.UNKNOWN),
        ({"pid": 0}, Liveness.UNKNOWN),
        ({"pid": 2**62}, Liveness.UNKNOWN),
    ],
)
def test_what_is_known_of_a_process(server: MetadataServer, change: dict[str, object], found: Liveness) -> None:
    """On this host, and of an engine of this host over the side channel."""
    asked = replace(ME, **change)  # type: ignore[arg-type]
    assert liveness(asked) is ask_liveness("127.0.0.1", server.port, asked, 60.0) is found


def test_a_process_whose_files_are_hidden_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """With hidepid, /proc shows other users' processes in this way."""

    def denied(*_: object) -> None:
        raise PermissionError

    def hidden(_: int) -> list[str]:
        raise FileNotFoundError

    monkeypatch.setattr(os, "kill", denied)
    monkeypatch.setattr(processes, "_stat", hidden)
    assert liveness(ME) is Liveness.UNKNOWN


# ---- the probe ---------------------------------------------------------------------------------


def suspect(process: ProcessIdentity, was_seen: bool = True, met_at: EngineAddress | None = None) -> Suspect:
    return Suspect(Peer("p", 1), process, was_seen, met_at)


def verdicts(
    monkeypatch: pytest.MonkeyPatch, suspects: list[Suspect], witnesses: list[EngineAddress], rounds: int = 5
) -> list[Peer]:
    monkeypatch.setattr(probe, "CONFIRM_S", 0.01)
    lost: list[Peer] = []
    marker = Suspect(Peer("marker", 0), GONE, True, None)
    watcher = WorkerProbe(1.0, b"", lambda peer, _: lost.append(peer))
    try:
        # A worker that is certainly dead counts the rounds.
        watcher.watch([*suspects, marker], witnesses)
        until(lambda: lost.count(marker.peer) >= rounds)
    finally:
        watcher.close()
    return [peer for peer in lost if peer != marker.peer]


def test_a_dead_worker_that_was_seen_alive_is_reported(child: Child, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two observations in a row are needed: here, every second look finds the worker alive."""
    process, identity = child
    elsewhere = replace(identity, host="another/1/2")
    assert verdicts(monkeypatch, [suspect(identity), suspect(elsewhere)], []) == []
    process.kill()
    process.wait()
    assert Peer("p", 1) in verdicts(monkeypatch, [suspect(identity)], [])
    looks = [0]

    def wavering(each: ProcessIdentity) -> Liveness:
        looks[0] += each == identity
        return Liveness.ALIVE if each == identity and looks[0] % 2 else Liveness.GONE

    monkeypatch.setattr(probe, "liveness", wavering)
    assert verdicts(monkeypatch, [suspect(identity)], []) == []
    assert looks[0] > 2


def test_a_port_that_refuses_proves_nothing(refusing: int, child: Child, monkeypatch: pytest.MonkeyPatch) -> None:
    """The core is dead or a firewall blocks it: the stopped worker may write when it continues."""
    process, identity = child
    process.send_signal(signal.SIGSTOP)
    met_at = EngineAddress("p", "127.0.0.1", refusing)
    assert verdicts(monkeypatch, [suspect(identity, seen, met_at) for seen in (True, False)], [met_at]) == []


def test_a_process_that_was_never_seen_needs_a_witness_at_its_address(
    refusing: int, server: MetadataServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next engine start on that host reports it; an engine at another address proves
    nothing, even with this boot id.
    """
    unseen = suspect(GONE, False, EngineAddress("p", "127.0.0.1", refusing))
    witness = EngineAddress("p2", "127.0.0.1", server.port)
    assert verdicts(monkeypatch, [unseen], []) == []
    assert verdicts(monkeypatch, [unseen], [replace(witness, host="localhost")]) == []
    assert verdicts(monkeypatch, [replace(unseen, process=ME)], [witness]) == [], "it lives"
    assert Peer("p", 1) in verdicts(monkeypatch, [unseen], [witness])
    elsewhere = suspect(replace(GONE, host="another/1/2"), False, unseen.met_at)
    assert verdicts(monkeypatch, [elsewhere, suspect(ProcessIdentity(), False, unseen.met_at)], [witness]) == []


@pytest.mark.parametrize("host", MALFORMED)
def test_a_malformed_host_is_no_engine(refusing: int, host: str) -> None:
    with pytest.raises(HandshakeError):
        fetch_metadata(host, refusing, "p", 0.2)


def test_a_probe_that_cannot_start_or_report_tries_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine may have no thread left, the device no memory, and a report may raise."""
    monkeypatch.setattr(probe, "CONFIRM_S", 0.01)
    problems = [RuntimeError("not now"), RuntimeError("no memory on the device"), RuntimeError("no thread")]
    told: list[Peer] = []
    start = threading.Thread.start

    def raise_problem(number: int) -> None:
        if len(problems) == number:
            raise problems.pop()

    def tell(peer: Peer, reason: str) -> None:
        told.append(peer)
        raise_problem(1)

    def starts_later(thread: threading.Thread) -> None:
        raise_problem(3)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", starts_later)
    prober = WorkerProbe(0.2, b"", tell, lambda: raise_problem(2))

    def told_again() -> bool:
        prober.watch([suspect(GONE)], [])
        return len(told) > 1

    until(told_again)
    prober.close()


# ---- an engine core and its parent -------------------------------------------------------------

PARENT = """
import multiprocessing, sys, time

def core():
    from connectors.vllm_hma.upstream.parent_watchdog import end_with_parent

    end_with_parent()
    print("waiting", flush=True)
    time.sleep(600)

if __name__ == "__main__":
    process = multiprocessing.get_context(sys.argv[1]).Process(target=core, daemon=True)
    process.start()
    time.sleep(600)
"""


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_a_child_ends_with_a_parent_that_is_killed(tmp_path: Path, method: str) -> None:
    """For both of vLLM's start methods."""
    script, root = tmp_path / "parent.py", Path(__file__).resolve().parents[2]
    script.write_text(PARENT, encoding="utf-8")
    command, environment = [sys.executable, str(script), method], {"PYTHONPATH": str(root)}
    with subprocess.Popen(command, cwd=root, env=environment, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        try:
            assert parent.stdout.readline() == "waiting\n"
            family = psutil.Process(parent.pid).children(recursive=True)
        finally:
            parent.kill()
        _, left = psutil.wait_procs(family, timeout=30)
        for process in left:
            process.kill()
    assert left == []


def test_a_process_of_its_own_is_left_alone() -> None:
    """An engine in its caller's process does not end with the caller's shell."""
    code = "from connectors.vllm_hma.upstream.parent_watchdog import end_with_parent; import threading;"
    code += "end_with_parent(); print(len(threading.enumerate()))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout == "1\n"
