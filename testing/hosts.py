"""Hosts on this machine: namespaces of network, processes and IPC, on a switch whose ports can be
cut. ``Host.entered`` starts processes of this one in a host's network only.

Needs root and iproute2. Nothing has a name outside: the kernel removes all of it with the processes
in it, and these end with the process that started them.

    host .1  ---  switch  ---  host .2        10.209.0.0/24

No interface is left in this machine's own network, where other engines could use it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from testing.programs import Program

SUBNET = "10.209.0"

LIMIT = "burst 256kb latency 100ms"
_CLONE_NEWNET, _CLONE_NEWNS = 0x40000000, 0x00020000
_MNT_DETACH = 2
_PRIVATE = 0x4000 | 1 << 18
"""mount(2): MS_REC, MS_PRIVATE"""


@dataclass(frozen=True)
class Switch:
    """A bridge in its own network; each host is connected to a port with its name."""

    pid: int
    hosts: dict[str, Host]

    def run(self, *command: str) -> None:
        """Run a command in the switch's network."""
        _run("nsenter", f"--target={self.pid}", "--net", *command)

    def output(self, *command: str) -> str:
        """Run a command in the switch's network; return its output."""
        line = ["nsenter", f"--target={self.pid}", "--net", *command]
        return subprocess.run(line, check=True, capture_output=True, text=True).stdout

    def cut(self, host: str) -> None:
        """Disconnect a host silently: nothing reaches it and nothing leaves it."""
        self.run("ip", "link", "set", "dev", host, "down")

    def mend(self, host: str) -> None:
        self.run("ip", "link", "set", "dev", host, "up")


@dataclass(frozen=True)
class Host:
    """``pid`` is its first process; when that ends, so do all others."""

    name: str
    address: str
    pid: int

    def command(self, command: Sequence[str]) -> list[str]:
        """Return the command line that runs ``command`` on this host."""
        spaces = ("--net", "--pid", "--ipc", "--mount")
        return ["nsenter", f"--target={self.pid}", *spaces, f"--wdns={os.getcwd()}", *command]

    def start(self, command: Sequence[str], log: Path, **environment: str) -> Program:
        return Program(self.command(command), log, os.environ | environment)

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Start processes of the block in the host's network; this thread is outside afterwards.

        The processes also see the host's devices in /sys, where UCX looks for them.
        """
        with open("/proc/thread-self/ns/net", encoding="utf-8") as outside:
            _call("unshare", _CLONE_NEWNS)
            _call("mount", b"none", b"/", None, _PRIVATE, None)
            enter_network(self.pid)
            try:
                _call("mount", b"sysfs", b"/sys", b"sysfs", 0, None)
                yield
            finally:
                # The kernel does not let a thread that has started others return to other mounts.
                _call("umount2", b"/sys", _MNT_DETACH)
                _call("setns", outside.fileno(), _CLONE_NEWNET)

    def running(self) -> list[str]:
        """Return the command lines of all but its first process."""
        space = os.stat(f"/proc/{self.pid}/ns/pid").st_ino
        return [line for p in psutil.process_iter() if p.pid != self.pid and (line := _in_space(p, space))]


@contextlib.contextmanager
def hosts(names: Sequence[str], rate: str = "") -> Iterator[Switch]:
    """Create hosts of these names.

    ``rate`` limits what each one sends (``800mbit``, as for tc).
    """
    with contextlib.ExitStack() as stack:
        pid = stack.enter_context(holder("--net", "--pid"))
        made: dict[str, Host] = {}
        switch = Switch(pid, made)
        switch.run("ip", "link", "set", "lo", "up")
        switch.run("ip", "link", "add", "bridge", "type", "bridge")
        switch.run("ip", "link", "set", "bridge", "up")
        for number, name in enumerate(names, start=1):
            host = stack.enter_context(_host(switch, name, f"{SUBNET}.{number}"))
            made[name] = host
            if rate:
                _run(*host.command(f"tc qdisc add dev eth0 root tbf rate {rate} {LIMIT}".split()))
        yield switch


@contextlib.contextmanager
def _host(switch: Switch, name: str, address: str) -> Iterator[Host]:
    with holder("--net", "--ipc", "--pid", "--mount", "--mount-proc") as pid:
        host = Host(name, address, pid)
        switch.run("ip", "link", "add", "name", name, "type", "veth", "peer", "name", "eth0", "netns", str(pid))
        switch.run("ip", "link", "set", "dev", name, "master", "bridge", "up")
        for command in (
            # UCX looks for devices in /sys, which shows those of the network that it was mounted
            # in.
            "mount -t sysfs sysfs /sys",
            "mount -t tmpfs tmpfs /dev/shm",
            "ip link set lo up",
            f"ip address add {address}/24 dev eth0",
            "ip link set eth0 up",
            # Software that looks up the default route learns its own address; no host has this one.
            f"ip route add default via {SUBNET}.254",
        ):
            _run(*host.command(command.split()))
        yield host


@contextlib.contextmanager
def holder(*spaces: str) -> Iterator[int]:
    """First process in new namespaces: a shell that reaps children until its input ends, which
    it does with this process.
    """
    shell = ["bash", "-c", "echo; read"]
    with subprocess.Popen(
        ["unshare", "--fork", "--kill-child", *spaces, *shell],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        first = psutil.Process(process.pid).children()[0]
        try:
            yield first.pid
        finally:
            family = [first, *first.children(recursive=True)]
            process.kill()
            psutil.wait_procs(family, timeout=10)


def enter_network(pid: int) -> None:
    """Move this thread into the network of a process."""
    with open(f"/proc/{pid}/ns/net", encoding="utf-8") as network:
        _call("setns", network.fileno(), _CLONE_NEWNET)


def _in_space(process: psutil.Process, space: int) -> str:
    """Return the command line of a process of that namespace; empty for others, and for an ended
    one.
    """
    with contextlib.suppress(psutil.Error, OSError):
        if os.stat(f"/proc/{process.pid}/ns/pid").st_ino == space:
            return " ".join(process.cmdline())
    return ""


def _run(*command: str) -> None:
    subprocess.run(command, check=True)


def _call(name: str, *arguments: object) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments):
        raise OSError(ctypes.get_errno(), name)
