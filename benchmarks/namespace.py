"""A second host on this machine: a network namespace behind a veth pair with a rate limit.

Needs root and iproute2.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

_CLONE_NEWNET, _CLONE_NEWNS = 0x40000000, 0x00020000
_MNT_DETACH = 2
_PRIVATE = 0x4000 | 1 << 18
"""mount(2): MS_REC, MS_PRIVATE"""


@dataclass(frozen=True)
class Namespace:
    """A namespace.

    ``address``  its own address
    ``outside``  address of the other end of its only link
    """

    name: str
    address: str = "10.209.0.2"
    outside: str = "10.209.0.1"

    def address_of(self, role: str) -> str:
        """Return the address of the host of prefill engines, or of decode engines."""
        return self.address if role == "kv_producer" else self.outside

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Start processes of the block in the namespace; this thread is outside again afterwards.

        The processes also see the namespace's devices in /sys, where UCX looks for them. This
        thread's /sys stays that of the namespace, because the kernel does not let a thread that has
        started others return to another set of mounts.
        """
        with (
            open("/proc/thread-self/ns/net", encoding="utf-8") as network,
            open(f"/var/run/netns/{self.name}", encoding="utf-8") as there,
        ):
            _call("unshare", _CLONE_NEWNS)
            try:
                _call("mount", b"none", b"/", None, _PRIVATE, None)
                _call("setns", there.fileno(), _CLONE_NEWNET)
                # It may already be this namespace's; the kernel refuses to mount it over itself.
                _call("umount2", b"/sys", _MNT_DETACH)
                _call("mount", b"sysfs", b"/sys", b"sysfs", 0, None)
                yield
            finally:
                _call("setns", network.fileno(), _CLONE_NEWNET)


def bits_a_second(rate: str) -> float:
    """Parse ``800mbit``, in tc's notation. Raises SystemExit for other notations."""
    match = re.fullmatch(r"(\d+)(k|m|g)bit", rate)
    if match is None:
        raise SystemExit(f"rate {rate!r}: write a number and kbit, mbit or gbit, as for tc")
    return int(match[1]) * {"k": 1e3, "m": 1e6, "g": 1e9}[match[2]]


@contextlib.contextmanager
def namespace(rate: str) -> Iterator[Namespace]:
    """Create a namespace whose link has ``rate`` (``400mbit``, as for tc) each way; remove it at
    the end.
    """
    made = Namespace(f"tandem{os.getpid()}")
    link, inner = f"t{os.getpid()}", f"u{os.getpid()}"
    inside = ["ip", "netns", "exec", made.name]
    limit = ["root", "tbf", "rate", rate, "burst", "256kb", "latency", "100ms"]
    _run("ip", "netns", "add", made.name)
    try:
        _run("ip", "link", "add", link, "type", "veth", "peer", "name", inner, "netns", made.name)
        _run("ip", "address", "add", f"{made.outside}/24", "dev", link)
        _run("ip", "link", "set", link, "up")
        _run(*inside, "ip", "address", "add", f"{made.address}/24", "dev", inner)
        _run(*inside, "ip", "link", "set", inner, "up")
        _run(*inside, "ip", "link", "set", "lo", "up")
        _run("tc", "qdisc", "add", "dev", link, *limit)
        _run(*inside, "tc", "qdisc", "add", "dev", inner, *limit)
        yield made
    finally:
        # The kernel removes the links of a deleted namespace later, so a new one could not use the
        # name.
        subprocess.run(["ip", "link", "delete", link], check=False)
        subprocess.run(["ip", "netns", "delete", made.name], check=False)


def _run(*command: str) -> None:
    subprocess.run(command, check=True)


def _call(name: str, *arguments: object) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments):
        raise OSError(ctypes.get_errno(), name)
