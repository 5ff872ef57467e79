"""Forward a port of this machine's loopback to another network namespace."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator

from testing.hosts import enter_network

_CHUNK_BYTES = 65536


@contextlib.contextmanager
def forwarded_port(pid: int, address: str, port: int) -> Iterator[int]:
    """Forward to ``address:port`` as the process ``pid`` sees it; yield the local port."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            there = await asyncio.open_connection(address, port)
            await asyncio.gather(_copy(reader, there[1]), _copy(there[0], writer))
        writer.close()

    def run() -> None:
        # A socket stays in the namespace of its creation: this thread creates the others there.
        enter_network(pid)
        loop.run_until_complete(asyncio.start_server(serve, sock=listener))
        loop.run_forever()

    listener, loop = socket.create_server(("127.0.0.1", 0), backlog=128), asyncio.new_event_loop()
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        listener.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy until either end closes; then close the other."""
    with contextlib.suppress(OSError):
        while data := await reader.read(_CHUNK_BYTES):
            writer.write(data)
            await writer.drain()
    writer.close()
