"""Where an engine's server is, and how connections notice that the other side is gone."""

import socket
from dataclasses import dataclass

KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}
"""A host that has vanished is noticed after 30 s, where there is nothing to send to it."""


@dataclass(frozen=True)
class RpcAddress:
    """Where a server is, and the key to it; its host as it is reached from other nodes."""

    host: str
    port: int
    key: str


def enable_keepalive(connection: socket.socket, unread_s: float | None = None) -> None:
    """Have the kernel notice when the other side is gone, and, with `unread_s`, end a connection whose other side takes
    nothing for so long. Connections inherit it from what they come in by."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = KEEPALIVE | ({"TCP_USER_TIMEOUT": int(unread_s * 1e3)} if unread_s else {})
    for name, value in options.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
