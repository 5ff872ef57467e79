"""The probe of silent prefill workers: proofs of their death, and observations that prove
nothing.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

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
from connectors.vllm_hma.orders import Chunk, Expect
from testing.connector_state import snapshot
from tests.vllm_contract.test_ends import HeldWrites, let_go
from tests.vllm_contract.workers import DIGEST, Worker, receive, results, until

MALFORMED = ("a" * 70, "a..b", "nul\x00", "\udcff", ".", "[::1]")


@pytest.fixture
def refusing() -> Iterator[int]:
    """Reserve a port without a listener."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


@pytest.fixture
def child() -> Iterator[tuple[subprocess.Popen[bytes], ProcessIdentity]]:
    """Start a process; return it and its identity."""
    code = "import time; from connectors.vllm_hma.handshake.processes import own_process; "
    code += "me = own_process(); print(me.host, me.pid, me.started_at, flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        host, pid, started_at = process.stdout.readline().decode().split()
        yield process, ProcessIdentity(host, int(pid), int(started_at))
        process.kill()


GONE = replace(own_process(), started_at=1)
"""A process of this host that has ended."""


def suspect(process: ProcessIdentity, was_seen: bool = True, met_at: EngineAddress | None = None) -> Suspect:
    return Suspect(Peer("p", 1), process, was_seen, met_at)


def verdicts(
    monkeypatch: pytest.MonkeyPatch, suspects: list[Suspect], witnesses: list[EngineAddress], rounds: int = 5
) -> list[Peer]:
    """Return the workers that the probe reports as dead within this number of rounds."""
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


# ---- processes ---------------------------------------------------------------------------------


def test_a_process_lives_until_it_has_ended(child: tuple[subprocess.Popen[bytes], ProcessIdentity]) -> None:
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
    process = subprocess.Popen([sys.executable, "-c", ENDS_ITS_MAIN_THREAD], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        stat = Path(f"/proc/{process.pid}/stat")

        def fields() -> list[str]:
            return stat.read_text(encoding="utf-8").rpartition(")")[2].split()

        until(lambda: fields()[0] == "Z")
        identity = replace(own_process(), pid=process.pid, started_at=int(fields()[19]))
        assert liveness(identity) is Liveness.ALIVE

        def refuse(_: int, __: int) -> None:
            raise PermissionError

        with monkeypatch.context() as patch:
            patch.setattr(os, "kill", refuse)
            assert liveness(identity) is Liveness.ALIVE
    finally:
        process.kill()
    until(lambda: liveness(identity) is Liveness.GONE)
    process.wait()
    process.stdout.close()


def test_a_process_id_that_is_used_again_is_another_process() -> None:
    """The start time distinguishes two processes with one id."""
    me = own_process()
    assert liveness(me) is Liveness.ALIVE
    assert liveness(replace(me, started_at=me.started_at - 1)) is Liveness.GONE


@pytest.mark.parametrize(
    "change",
    [
        {"host": ""},
        {"host": "another boot/4026531836/4026531834"},
        {"host": own_process().host + "1"},
        {"pid": 0},
        {"pid": 2**62},
    ],
    ids=["unknown host", "another host", "another namespace", "a process group", "no process id"],
)
def test_a_process_of_another_host_is_never_gone(change: dict[str, object]) -> None:
    """The id means nothing on this host: other namespaces use the same ids for other processes."""
    assert liveness(replace(own_process(), **({"pid": 2**22 + 1} | change))) is Liveness.UNKNOWN  # type: ignore[arg-type]


def test_a_process_whose_files_are_hidden_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """With hidepid, /proc shows other users' processes in this way."""

    def denied(*_: object) -> None:
        raise PermissionError

    def hidden(_: int) -> list[str]:
        raise FileNotFoundError

    monkeypatch.setattr(os, "kill", denied)
    me = own_process()
    monkeypatch.setattr(processes, "_stat", hidden)
    assert liveness(me) is Liveness.UNKNOWN


# ---- the probe ---------------------------------------------------------------------------------


def test_a_dead_worker_that_was_seen_alive_is_reported(
    child: tuple[subprocess.Popen[bytes], ProcessIdentity], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker of this host is checked in this kernel."""
    process, identity = child
    assert verdicts(monkeypatch, [suspect(identity)], []) == []
    process.kill()
    process.wait()
    assert Peer("p", 1) in verdicts(monkeypatch, [suspect(identity)], [])


def test_one_observation_of_an_end_proves_nothing(
    child: tuple[subprocess.Popen[bytes], ProcessIdentity], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two in a row are needed: here, every second look finds the worker alive."""
    looks = 0

    def wavering(process: ProcessIdentity) -> Liveness:
        nonlocal looks
        if process != child[1]:
            return liveness(process)
        looks += 1
        return Liveness.GONE if looks % 2 else Liveness.ALIVE

    monkeypatch.setattr(probe, "liveness", wavering)
    assert verdicts(monkeypatch, [suspect(child[1])], []) == []
    assert looks > 2


def test_a_port_that_refuses_proves_nothing(
    refusing: int, child: tuple[subprocess.Popen[bytes], ProcessIdentity], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The core is dead or a firewall blocks it: the stopped worker may write when it continues."""
    process, identity = child
    process.send_signal(signal.SIGSTOP)
    met_at = EngineAddress("p", "127.0.0.1", refusing)
    assert verdicts(monkeypatch, [suspect(identity, True, met_at), suspect(identity, False, met_at)], [met_at]) == []
    process.kill()


def test_a_process_that_was_never_seen_needs_a_witness_at_its_address(
    refusing: int, child: tuple[subprocess.Popen[bytes], ProcessIdentity], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next engine start on that host reports it; an engine at another address proves
    nothing, even with this boot id.
    """
    process, identity = child
    process.kill()
    process.wait()
    server = MetadataServer("127.0.0.1", 0, [])
    try:
        unseen = suspect(identity, False, EngineAddress("p", "127.0.0.1", refusing))
        witness = EngineAddress("p2", "127.0.0.1", server.port)
        assert verdicts(monkeypatch, [unseen], []) == []
        assert verdicts(monkeypatch, [unseen], [replace(witness, host="localhost")]) == []
        assert Peer("p", 1) in verdicts(monkeypatch, [unseen], [witness])
        elsewhere = suspect(replace(identity, host="another/1/2"), False, unseen.met_at)
        assert verdicts(monkeypatch, [elsewhere, suspect(ProcessIdentity(), False, unseen.met_at)], [witness]) == []
    finally:
        server.close()


def test_engines_answer_for_processes_of_their_host() -> None:
    """Over the side channel; an invalid process is an error or unknown."""
    server = MetadataServer("127.0.0.1", 0, [])
    me = own_process()
    try:
        for asked, found in (
            (me, Liveness.ALIVE),
            (replace(me, started_at=1), Liveness.GONE),
            (replace(me, host="b007/1/2"), Liveness.UNKNOWN),
            (ProcessIdentity(), Liveness.UNKNOWN),
            (replace(me, host="x" * 300), Liveness.UNKNOWN),
            (replace(me, pid=2**62), Liveness.UNKNOWN),
        ):
            assert ask_liveness("127.0.0.1", server.port, asked, 60.0) is found
    finally:
        server.close()


def test_a_malformed_host_ends_no_thread(refusing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """An invalid address proves nothing, and does not prevent the detection of other deaths."""
    broken: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", broken.append)
    monkeypatch.setattr(probe, "CONFIRM_S", 0.01)
    lost: list[Peer] = []
    watcher = WorkerProbe(0.2, b"", lambda peer, _: lost.append(peer))
    try:
        for number, host in enumerate(MALFORMED):
            bad = Suspect(Peer(f"bad {number}", 0), GONE, False, EngineAddress("bad", host, refusing))
            gone = Suspect(Peer(f"gone {number}", 0), GONE, True, None)
            watcher.watch({bad, gone}, [])
            until(partial(lost.__contains__, gone.peer))
        assert not [peer for peer in lost if peer.incarnation.startswith("bad")]
        assert not broken
    finally:
        watcher.close()


@pytest.mark.parametrize("host", MALFORMED)
def test_a_malformed_host_is_a_failed_handshake(host: str, refusing: int) -> None:
    """A malformed host raises a typed error, as any address without an answer."""
    with pytest.raises(HandshakeError):
        fetch_metadata(host, refusing, "p", 0.2)


def test_who_cannot_be_told_is_told_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The report of a worker's end may raise; the probe's thread survives."""
    monkeypatch.setattr(probe, "CONFIRM_S", 0.01)
    told: list[Peer] = []

    def tell(peer: Peer, reason: str) -> None:
        told.append(peer)
        if len(told) == 1:
            raise RuntimeError("not now")

    watcher = WorkerProbe(0.2, b"", tell)
    try:
        watcher.watch({suspect(GONE)}, [])
        until(lambda: len(told) > 1)
    finally:
        watcher.close()


# ---- with workers ------------------------------------------------------------------------------


def stuck(worker: Callable[..., Worker]) -> tuple[Worker, Worker]:
    """A producer whose write does not end, and a consumer whose blocks are in quarantine for it."""
    producer, consumer = worker("p", transport_class=HeldWrites), worker("c")
    consumer.step(receives=[receive(producer.address)])
    producer.step(expects=[Expect("q", "t", 7, DIGEST)], chunks=[Chunk("q", ((1, 2),), 7)])
    until(lambda: consumer.runtime.counts()["quarantined"] == 1)
    return producer, consumer


def test_an_engine_core_that_is_dead_frees_nothing(
    impatient: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The core's port refuses, its worker lives: quarantine lasts until the worker acknowledges."""
    monkeypatch.setattr(probe, "CONFIRM_S", 0.01)
    producer, consumer = stuck(impatient)
    producer.server.close()
    looks: list[ProcessIdentity] = []

    def counted(process: ProcessIdentity) -> Liveness:
        looks.append(process)
        return liveness(process)

    monkeypatch.setattr(probe, "liveness", counted)
    until(lambda: len(looks) > 10)
    assert consumer.runtime.counts()["quarantined"] == 1
    assert snapshot(consumer.runtime).probed == {Peer("p", 0)}
    let_go(producer)
    until(lambda: "r" in results(consumer)[1])
    until(lambda: consumer.runtime.counts()["quarantined"] == 0)


def test_a_worker_that_is_dead_frees_the_blocks(
    impatient: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No report is needed, because the worker's process has ended."""
    monkeypatch.setattr(probe, "CONFIRM_S", 0.01)
    _, consumer = stuck(impatient)
    assert consumer.runtime.counts()["quarantined"] == 1
    monkeypatch.setattr(probe, "liveness", lambda _: Liveness.GONE)
    until(lambda: consumer.runtime.counts()["quarantined"] == 0)
    until(lambda: snapshot(consumer.runtime).probed == frozenset())


def test_a_probe_that_cannot_start_is_started_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine may have no thread left, or the device no memory."""
    lost: list[Peer] = []
    problems: list[Exception] = [RuntimeError("can't start new thread"), RuntimeError("no memory on the device")]
    start = threading.Thread.start

    def starts_later(thread: threading.Thread) -> None:
        if len(problems) == 2:
            raise problems.pop(0)
        start(thread)

    def no_device_at_first() -> None:
        if problems:
            raise problems.pop(0)

    monkeypatch.setattr(threading.Thread, "start", starts_later)
    prober = WorkerProbe(1.0, b"", lambda peer, reason: lost.append(peer), no_device_at_first)

    def watched_and_lost() -> bool:
        prober.watch([suspect(GONE)], [])
        return bool(lost)

    until(watched_and_lost)
    prober.close()
