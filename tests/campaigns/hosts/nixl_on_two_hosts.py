"""NIXL between two hosts whose link is cut: a part of the campaign `two-hosts`.

    python -m tests.campaigns.hosts.nixl_on_two_hosts NAME FOLDER

runs one agent, which echoes every message and executes the commands on its standard input.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from connectors.errors import TransportError
from connectors.planning.descriptors import Runs
from connectors.planning.layout import MemoryKind, Region
from connectors.transport.nixl import NixlTransport
from tests.campaigns.hosts.hosts import Host, Switch, hosts
from tests.campaigns.runner import Report

HOST = MemoryKind("DRAM", 0)
SIZE_BYTES = 16 * 2**20
RATE = "100mbit"
"""Rate at which SIZE_BYTES take more than a second."""

TIMEOUT_S = 60.0
"""Timeout far below the kernel's for a host that does not answer (134 s)."""


class Agent:
    """The test's end of an agent's process: commands in, one line per result out."""

    def __init__(self, host: Host, folder: Path) -> None:
        command = [sys.executable, "-m", "tests.campaigns.hosts.nixl_on_two_hosts", host.name, str(folder)]
        self.log = folder / f"{host.name}.log"
        self.process = subprocess.Popen(
            host.command(command), stdin=subprocess.PIPE, stdout=self.log.open("wb"), stderr=subprocess.STDOUT
        )

    def tell(self, command: str, answer: str = "") -> None:
        """Send a command; wait for its answer, if one is given."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{command}\n".encode())
        self.process.stdin.flush()
        if answer:
            self.wait_for(answer)

    def wait_for(self, line: str) -> None:
        until(lambda: line in self.log.read_text().splitlines(), f"{line!r} in {self.log}")


def until(condition: Callable[[], bool], what: str) -> None:
    give_up_at = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < give_up_at, f"not within {TIMEOUT_S:g} s: {what}"
        time.sleep(0.05)


@contextmanager
def agents(folder: Path) -> Iterator[tuple[Switch, Agent, Agent]]:
    """Run two connected agents, each on a host; yield the switch in between, too."""
    folder.mkdir()
    with hosts(["left", "right"], RATE) as switch:
        left, right = (Agent(switch.hosts[name], folder) for name in ("left", "right"))
        for agent in (left, right):
            agent.wait_for("ready")
        for agent, other in ((left, "right"), (right, "left")):
            agent.tell(f"meet {other}", "met")
        left.tell("say hello", "echo: hello")
        yield switch, left, right


def a_write_goes_on_when_the_link_is_back(switch: Switch, left: Agent, right: Agent) -> None:
    """All of its bytes arrive, including those that waited in the kernel meanwhile."""
    left.tell("write", "posted")
    switch.cut("right")
    time.sleep(5)
    assert "written" not in left.log.read_text()
    switch.mend("right")
    left.wait_for("written")
    right.tell("count", f"holds {SIZE_BYTES}")


def a_late_write_lands(switch: Switch, left: Agent, right: Agent) -> None:
    """Removing the writer stops no write, so blocks stay in quarantine until it is dead."""
    left.tell("write", "posted")
    switch.cut("right")
    right.tell("forget", "forgotten")
    right.tell("clear", "cleared")
    switch.mend("right")
    left.wait_for("written")
    right.tell("count")
    until(lambda: "holds" in right.log.read_text(), "a count")
    assert "holds 0" not in right.log.read_text()


def a_silent_host_holds_up_nobody(switch: Switch, left: Agent, right: Agent) -> None:
    """A reconnect returns at once, and messages sent meanwhile arrive when the link is restored."""
    # As behind a router: otherwise the kernel would detect a missing neighbour within seconds.
    fixed = f"ip neigh replace {switch.hosts['right'].address} lladdr 02:00:00:00:00:01 nud permanent dev eth0"
    subprocess.run(switch.hosts["left"].command(fixed.split()), check=True)
    switch.cut("right")
    left.tell("reconnect", "connected anew")
    left.tell("say anybody", "said anybody")
    flush = "ip neigh flush nud permanent dev eth0"
    subprocess.run(switch.hosts["left"].command(flush.split()), check=True)
    switch.mend("right")
    left.wait_for("echo: anybody")


CASES = (a_write_goes_on_when_the_link_is_back, a_late_write_lands, a_silent_host_holds_up_nobody)


def play(report: Report) -> None:
    for case in CASES:
        with report.case(case.__name__), agents(report.folder / case.__name__) as (switch, left, right):
            case(switch, left, right)
            report.row(nixl=case.__name__, passed=True)


def main(name: str, folder: Path) -> None:
    other = {"left": "right", "right": "left"}[name]
    memory = np.zeros(SIZE_BYTES, np.uint8)
    transport = NixlTransport(name)
    transport.register([Region(memory.ctypes.data, SIZE_BYTES, HOST)])
    (folder / name).write_bytes(memory.ctypes.data.to_bytes(8, "little") + transport.metadata())
    writing: int | None = None
    reader = _lines(0)
    say("ready")
    while True:
        for sender, message in transport.notifications():
            if message.startswith(b"echo: "):
                say(message.decode())
            else:
                transport.notify(sender, b"echo: " + message)
        if writing is not None and transport.poll(writing):
            say("written")
            writing = None
        match next(reader).split():
            case ["meet", peer]:
                described = (folder / peer).read_bytes()
                address = int.from_bytes(described[:8], "little")
                transport.add_peer(described[8:])
                say("met")
            case ["say", word]:
                transport.notify(other, word.encode())
                say(f"said {word}")
            case ["write"]:
                memory[:] = 1
                whole = (np.array([each], np.int64) for each in (memory.ctypes.data, address, SIZE_BYTES))
                writing = transport.write(other, Runs(*whole), HOST, HOST)
                say("posted")
            case ["reconnect"]:
                try:
                    transport.reconnect(other)
                    say("connected anew")
                except TransportError as error:
                    say(str(error))
            case ["forget"]:
                transport.remove_peer(other)
                say("forgotten")
            case ["clear"]:
                memory[:] = 0
                say("cleared")
            case ["count"]:
                say(f"holds {int(memory.sum())}")
        time.sleep(0.001)


def _lines(descriptor: int) -> Iterator[str]:
    """Yield the read lines, and empty ones without input. Ends the process with its input."""
    os.set_blocking(descriptor, False)
    pending = b""
    while True:
        try:
            read = os.read(descriptor, 4096)
            if not read:
                sys.exit()
            pending += read
        except BlockingIOError:
            pass
        line, newline, rest = pending.partition(b"\n")
        if newline:
            pending = rest
        yield line.decode() if newline else ""


def say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
