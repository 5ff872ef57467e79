"""A link between a prefill and a decode server that can be cut, while the driver reaches both."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from tests.campaigns.hosts.hosts import Switch, hosts
from tests.campaigns.hosts.port_forward import forwarded_port

SIDES = ("prefill", "decode")


@dataclass(frozen=True)
class EngineLink:
    """The servers run in the networks of two hosts. The driver's ports are forwarded to them."""

    switch: Switch
    forwarded: contextlib.ExitStack

    def address(self, side: str) -> str:
        """Return the address at which the other engine reaches this one."""
        return self.switch.hosts[side].address

    def network(self, side: str, port: int) -> str:
        """Return the path of a server's network; ``port`` of this machine's loopback reaches it."""
        pid = self.switch.hosts[side].pid
        self.forwarded.enter_context(forwarded_port(pid, "127.0.0.1", port, port))
        return f"/proc/{pid}/ns/net"

    def cut(self) -> None:
        """Drop all traffic between the two silently. Repeated cuts have no further effect."""
        self.switch.cut(SIDES[0])

    def mend(self) -> None:
        self.switch.mend(SIDES[0])


@contextlib.contextmanager
def engine_link() -> Iterator[EngineLink]:
    """Make the hosts of one pair of servers. Needs root."""
    with hosts(SIDES) as switch, contextlib.ExitStack() as forwarded:
        yield EngineLink(switch, forwarded)
