"""NIXL between two processes over TCP: lost links, and peers that end.

``tests/gpu/test_checks.py`` has writes and messages between two live processes.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import resource
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np
import psutil
import pytest

MEGABYTES = 64
TIMEOUT_S = 60.0

POLL_S = 0.0005
"""Interval of polls for messages: NIXL delivers messages only during a call."""


def until(done: Callable[[], Any]) -> Any:
    """Return the first true result; wait for it at most TIMEOUT_S."""
    give_up_at = time.monotonic() + TIMEOUT_S
    while not (found := done()):
        assert time.monotonic() < give_up_at
        time.sleep(POLL_S)
    return found


def receiver(pipe: Connection) -> None:
    """Own the destination of a write, and report the first message's arrival."""
    os.environ["UCX_TLS"] = "tcp,self"
    from connectors.planning.layout import MemoryKind, Region
    from connectors.transport.nixl import NixlTransport

    memory = np.zeros(MEGABYTES << 20, np.uint8)
    transport = NixlTransport("receiver/0", devices=("lo",))
    transport.register([Region(memory.ctypes.data, memory.nbytes, MemoryKind("DRAM", 0))])
    pipe.send((transport.metadata(), memory.ctypes.data))
    pipe.send(until(transport.notifications))
    pipe.recv()


class Child:
    """Process that runs ``work`` with one end of a pipe; ``pipe`` is the other end."""

    def __init__(self, work: Callable[[Connection], None]) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=work, args=(theirs,), name=work.__name__)
        self.process.start()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.join(TIMEOUT_S)

    def report(self, within_s: float = 200.0) -> Any:
        """Return the next object that the process sends.

        Raises RuntimeError if the process ends first, or sends nothing in time.
        """
        ready = wait([self.pipe, self.process.sentinel], within_s)
        if not ready:
            raise RuntimeError(f"{self.process.name} sent nothing within {within_s:g} s")
        with contextlib.suppress(EOFError, ConnectionResetError):
            if self.pipe in ready:
                return self.pipe.recv()
        self.process.join(within_s)
        raise RuntimeError(f"{self.process.name} ended with status {self.process.exitcode}; see stderr")

    def status(self) -> int | None:
        """Wait for the end of the process. Return its status; None if it does not end."""
        self.process.join(TIMEOUT_S)
        return self.process.exitcode


def reached(pipe: Connection) -> None:
    """Stay alive, and report the first message of each connection."""
    os.environ["UCX_TLS"] = "tcp,self"
    from connectors.transport.nixl import NixlTransport

    transport = NixlTransport("theirs/0", devices=("lo",))
    pipe.send(transport.metadata())
    pipe.send(until(transport.notifications))
    pipe.send(until(transport.notifications))


def cut_off(pipe: Connection) -> None:
    """Reconnect to a peer while no connection can be opened, then when it can.

    The peer is another process: a limit on files would also make UCX close its listening sockets.
    """
    os.environ["UCX_TLS"] = "tcp,self"
    from connectors.errors import TransportError
    from connectors.transport.nixl import NixlTransport

    transport = NixlTransport("ours/0", devices=("lo",))
    transport.add_peer(pipe.recv())
    transport.notify("theirs/0", b"first contact")
    # UCX connects in the background and needs files for that: set the limit after the peer's first
    # message.
    while not pipe.poll(0.001):
        transport.notifications()
    pipe.recv()
    most, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))  # no socket can be made
    with pytest.raises(TransportError, match=r"theirs/0.*cannot reconnect"):
        transport.reconnect("theirs/0")
    with pytest.raises(TransportError, match="theirs/0"):
        transport.notify("theirs/0", b"nobody hears this")
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    transport.reconnect("theirs/0")
    transport.notify("theirs/0", b"here again")
    # NIXL sends messages only during a call.
    while not pipe.poll(0.001):
        transport.notifications()


def test_a_peer_out_of_reach_is_not_forgotten() -> None:
    """A failed reconnect can succeed later: a restored link finds all peers unchanged."""
    with Child(reached) as reaching, Child(cut_off) as cutting:
        cutting.pipe.send(reaching.report())
        assert reaching.report() == [("ours/0", b"first contact")]
        cutting.pipe.send(None)
        assert reaching.report() == [("ours/0", b"here again")]
        cutting.pipe.send(None)
        assert [reaching.status(), cutting.status()] == [0, 0]


def test_a_write_to_a_process_that_ends_is_a_failed_write() -> None:
    """The write is neither done nor refused: parts of it may have arrived."""
    from connectors.errors import FailedWriteError
    from connectors.planning.descriptors import Runs
    from connectors.planning.layout import MemoryKind, Region
    from connectors.transport.nixl import NixlTransport

    memory_kind = MemoryKind("DRAM", 0)
    memory = np.ones(MEGABYTES << 20, np.uint8)
    with Child(receiver) as child:
        transport = NixlTransport("sender/0", devices=("lo",))
        try:
            transport.register([Region(memory.ctypes.data, memory.nbytes, memory_kind)])
            metadata, address = child.report()
            peer = transport.add_peer(metadata)
            transport.notify(peer, b"first contact")
            until(lambda: (transport.notifications(), child.pipe.poll())[1])
            assert child.process.pid is not None
            os.kill(child.process.pid, signal.SIGSTOP)
            runs = Runs(*(np.array([value], np.int64) for value in (memory.ctypes.data, address, memory.nbytes)))
            handle = transport.write(peer, runs, memory_kind, memory_kind)
            assert not transport.poll(handle)
            child.process.kill()
            with pytest.raises(FailedWriteError, match="receiver/0"):
                until(lambda: transport.poll(handle))
            with pytest.raises(FailedWriteError, match="receiver/0"):  # the connection is known to be broken
                transport.write(peer, runs, memory_kind, memory_kind)
        finally:
            transport.close()


def doomed(pipe: Connection) -> None:
    from connectors.transport.nixl import NixlTransport
    from connectors.vllm_hma.handshake.processes import own_process

    transport = NixlTransport("theirs/0", devices=("lo",))
    pipe.send((transport.metadata(), own_process()))
    while True:
        transport.notifications()
        time.sleep(POLL_S)


def survivor(pipe: Connection) -> None:
    """Send to peers before and after their end; report the number of descriptors after each."""
    from connectors.errors import TransportError
    from connectors.protocol.wire import Alive, Peer
    from connectors.transport.nixl import NixlTransport
    from connectors.vllm_hma.handshake.message_sender import MessageSender

    transport, theirs = NixlTransport("mine/0", devices=("lo",)), Peer("theirs", 0)
    sender = MessageSender(Peer("mine", 0), transport, b"")
    while True:
        sender.connect(theirs, *pipe.recv())
        sender.send(theirs, Alive("t"))
        pipe.send("connected")
        pipe.recv()
        give_up_at = time.monotonic() + TIMEOUT_S
        while time.monotonic() < give_up_at:
            transport.notifications()
            try:
                sender.send(theirs, Alive("t"))
            except TransportError:
                break
        sender.forget(theirs)
        transport.remove_peer("theirs/0")
        for _ in range(100):
            transport.notifications()
            time.sleep(POLL_S)
        pipe.send(psutil.Process().num_fds())


def test_peers_that_end_leave_no_socket() -> None:
    """A replaced engine of this host costs no file descriptor: its peers do not reconnect to it."""
    descriptors = []
    with Child(survivor) as surviving:
        for _ in range(3):
            with Child(doomed) as dying:
                surviving.pipe.send(dying.report())
                assert surviving.report() == "connected"
            surviving.pipe.send("killed")
            descriptors.append(surviving.report())
    assert descriptors[1] == descriptors[2]
