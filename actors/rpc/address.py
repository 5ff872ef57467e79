"""Address of an engine's RPC server, and TCP keepalive."""

import socket
from dataclasses import dataclass

LOST_S = 30
"""Time in seconds after which a connection ends if its peer acknowledges or reads no data."""

KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}
"""TCP options with which the kernel sends probes on an idle connection.

`enable_keepalive` also sets TCP_USER_TIMEOUT, which overrides TCP_KEEPCNT (`man 7 tcp`). While
calls run, heartbeats keep data in flight: the kernel sends no probes, and would retransmit for
about 15 minutes without TCP_USER_TIMEOUT. That option also limits how long a peer may have no room
for more data.
"""

MOST_LOST_S = 2_000_000
"""Largest TCP_USER_TIMEOUT in seconds; the kernel takes milliseconds below 2^31."""


@dataclass(frozen=True)
class RpcAddress:
    """Address of an RPC server: host name or IP address, port, and authentication key."""

    host: str
    port: int
    key: str


def enable_keepalive(connection: socket.socket, lost_s: float = LOST_S) -> None:
    """Let the kernel close a connection whose peer acknowledges or reads no data for `lost_s`.

    Accepted connections inherit these options from their listener. Skips options that the platform
    lacks.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = KEEPALIVE | {"TCP_USER_TIMEOUT": int(min(lost_s, MOST_LOST_S) * 1000)}
    for name, value in options.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
