"""Address of an engine's RPC server, and TCP keepalive."""

import socket
from dataclasses import dataclass

KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}
"""TCP options that detect a lost host after 30 s on an idle connection."""


@dataclass(frozen=True)
class RpcAddress:
    """Address of an RPC server: host name or IP address, port, and authentication key."""

    host: str
    port: int
    key: str


def enable_keepalive(connection: socket.socket, unread_s: float | None = None) -> None:
    """Enable TCP keepalive; with `unread_s`, also set TCP_USER_TIMEOUT to it.

    With it the kernel closes a connection whose peer acknowledges no sent data for `unread_s`.
    Accepted connections inherit these options from their listener. Skips options that the platform
    lacks.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = KEEPALIVE | ({"TCP_USER_TIMEOUT": int(unread_s * 1e3)} if unread_s else {})
    for name, value in options.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
