"""Uvicorn's server inside an actor: on a listener that several processes share, without signals."""

import asyncio
import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import uvicorn

logger = logging.getLogger(__name__)

FIRST_BYTES_S = 1.0
"""How long connections that were taken last may take for their requests to begin."""

LOOKS = 50
"""At whether they have."""


class Server(uvicorn.Server):
    """Uvicorn in a process that has a main program of its own, on one listener that it shares with other processes."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are Ray's."""
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's, but for the connections that wait for this process to take them: the kernel, which has given
        them to it and not to another, would reset them with the listener; and but for those whose request is on its
        way."""
        taken = [connection for listener in sockets or () for connection in _waiting(listener)]
        for server in self.servers:
            server.close()
        loop = asyncio.get_running_loop()
        for connection in taken:
            try:
                await loop.connect_accepted_socket(self._protocol, connection)
            except OSError as error:
                logger.info("a client was gone before its connection was taken: %s", error)
                connection.close()
        for _ in range(LOOKS):
            if not any(_is_new(connection) for connection in self.server_state.connections):
                break
            await asyncio.sleep(FIRST_BYTES_S / LOOKS)
        await super().shutdown(sockets)

    def _protocol(self) -> asyncio.Protocol:
        kind: Any = self.config.http_protocol_class
        return kind(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)


def _is_new(connection: Any) -> bool:
    """Whether no request has come yet: uvicorn would close it at once."""
    return getattr(connection, "cycle", None) is None


def _waiting(listener: socket.socket) -> Iterator[socket.socket]:
    """The connections that have been made to `listener` and not been taken yet."""
    with suppress(BlockingIOError):
        while True:
            connection, _ = listener.accept()
            connection.setblocking(False)
            yield connection
