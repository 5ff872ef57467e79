"""Forward a port of this machine's loopback to another network namespace, connection by
connection.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import socketserver
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

_CLONE_NEWNET = 0x40000000
_CHUNK_BYTES = 65536
_TIMEOUT_S = 10.0


@contextlib.contextmanager
def forwarded_port(pid: int, address: str, port: int) -> Iterator[int]:
    """Forward to ``address:port`` as the process ``pid`` sees it; return the local port."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with contextlib.suppress(OSError), inside.submit(_connect, address, port).result() as there:
                back = threading.Thread(target=_copy, args=(there, self.request), daemon=True)
                back.start()
                _copy(self.request, there)
                back.join()

    # A socket stays in the namespace of its creation: one thread lives there and creates all of
    # them.
    with (
        ThreadPoolExecutor(1, initializer=_enter, initargs=(pid,)) as inside,
        _Server(("127.0.0.1", 0), Handler) as server,
    ):
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def handle_error(self, request: object, client_address: object) -> None:
        """The client observes a broken connection."""


def _enter(pid: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/proc/{pid}/ns/net", encoding="utf-8") as network:
        if libc.setns(network.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _connect(address: str, port: int) -> socket.socket:
    made = socket.create_connection((address, port), timeout=_TIMEOUT_S)
    made.settimeout(None)
    return made


def _copy(source: socket.socket, target: socket.socket) -> None:
    """Copy until either end closes; then close the other."""
    with contextlib.suppress(OSError):
        while data := source.recv(_CHUNK_BYTES):
            target.sendall(data)
    for end in (source, target):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
