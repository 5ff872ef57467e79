"""A link between a prefill and a decode server that can be cut, while the driver still reaches
both.

Needs root, iproute2, and a separate network namespace for the driver
(``testing.network_namespace.enter_new_network``), so that no interface is left in the machine's
network. The namespaces end with the driver.

    prefill  eth0 10.209.0.1 --- p0 |            decode  eth0 10.209.0.2 --- d0 |
                              bridge 0                                   bridge 0
    prefill  eth1 10.210.0.2 --- 10.210.0.1 driver 10.211.0.1 --- 10.211.0.2 eth1  decode
"""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

from tests.campaigns.hosts.hosts import SUBNET, holder

SIDES = ("prefill", "decode")
_DRIVER_SUBNETS = {"prefill": "10.210", "decode": "10.211"}


@dataclass(frozen=True)
class EngineLink:
    """Link number ``number`` of this driver.

    ``networks`` are the paths of the servers' namespaces by side.
    """

    number: int
    networks: dict[str, str]

    def address(self, side: str) -> str:
        """Return the address at which the other engine reaches this one: over the link that can
        be cut.
        """
        return f"{SUBNET}.{SIDES.index(side) + 1}"

    def driver_address(self, side: str) -> str:
        """Return the address at which the driver reaches a server."""
        return f"{_DRIVER_SUBNETS[side]}.{self.number}.2"

    def cut(self) -> None:
        """Drop all traffic between the two silently. Repeated cuts have no further effect."""
        _ip("link", "set", "dev", f"p{self.number}", "down")

    def mend(self) -> None:
        _ip("link", "set", "dev", f"p{self.number}", "up")


@contextlib.contextmanager
def engine_link(number: int) -> Iterator[EngineLink]:
    """Make the namespaces and links of one pair of servers."""
    bridge = f"bridge{number}"
    with contextlib.ExitStack() as stack:
        pids = {side: stack.enter_context(holder("--net")) for side in SIDES}
        link = EngineLink(number, {side: f"/proc/{pid}/ns/net" for side, pid in pids.items()})
        _ip("link", "add", bridge, "type", "bridge")
        stack.callback(_ip, "link", "delete", bridge)
        _ip("link", "set", bridge, "up")
        for side, pid in pids.items():
            port, hatch = f"{side[0]}{number}", f"driver-{side[0]}{number}"
            _ip("link", "add", "name", port, "type", "veth", "peer", "name", "eth0", "netns", str(pid))
            _ip("link", "set", "dev", port, "master", bridge, "up")
            _ip("link", "add", "name", hatch, "type", "veth", "peer", "name", "eth1", "netns", str(pid))
            _ip("address", "add", f"{_DRIVER_SUBNETS[side]}.{number}.1/24", "dev", hatch)
            _ip("link", "set", hatch, "up")
            inside = ["nsenter", f"--target={pid}", "--net", "ip"]
            for interface, address in (("eth0", link.address(side)), ("eth1", link.driver_address(side))):
                _run(*inside, "address", "add", f"{address}/24", "dev", interface)
                _run(*inside, "link", "set", interface, "up")
            _run(*inside, "link", "set", "lo", "up")
            # Software that looks up the default route learns its own address; no host has the
            # route's.
            _run(*inside, "route", "add", "default", "via", f"{SUBNET}.254")
        yield link


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> None:
    subprocess.run(command, check=True)
