"""Address of an engine's RPC server, and TCP keepalive."""

import socket
from dataclasses import dataclass

KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}
"""TCP options that detect a lost host on an idle connection after 30 s.

With TCP_USER_TIMEOUT, after this timeout instead.
"""


@dataclass(frozen=True)
class RpcAddress:
    """Address of an RPC server: host name or IP address, port, and authentication key."""

    host: str
    port: int
    key: str


def enable_keepalive(connection: socket.socket, unread_s: float | None = None) -> None:
    """Enable TCP keepalive; with `unread_s`, also set TCP_USER_TIMEOUT to these seconds.

    The kernel then closes a connection whose peer, for `unread_s`, acknowledges no data and no
    keepalive probe, or has no room for more data (`man 7 tcp`). Accepted connections inherit these
    options from their listener. Skips options that the platform lacks.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = KEEPALIVE | ({"TCP_USER_TIMEOUT": int(unread_s * 1e3)} if unread_s else {})
    for name, value in options.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
