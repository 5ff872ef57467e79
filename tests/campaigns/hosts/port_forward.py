"""Forward a port of this machine's loopback to another network namespace."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from testing.hosts import enter_network

_CHUNK_BYTES = 65536
_TIMEOUT_S = 10.0


@contextlib.contextmanager
def forwarded_port(pid: int, address: str, port: int) -> Iterator[int]:
    """Forward to ``address:port`` as the process ``pid`` sees it; yield the local port."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            made = await loop.run_in_executor(inside, socket.create_connection, (address, port), _TIMEOUT_S)
            made.setblocking(False)
            there = await asyncio.open_connection(sock=made)
            await asyncio.gather(_copy(reader, there[1]), _copy(there[0], writer))
        writer.close()

    async def listen() -> asyncio.Server:
        return await asyncio.start_server(serve, "127.0.0.1", 0, backlog=128)

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    # A socket stays in the namespace of its creation: one thread lives there and creates them all.
    with ThreadPoolExecutor(1, initializer=enter_network, initargs=(pid,)) as inside:
        server = asyncio.run_coroutine_threadsafe(listen(), loop).result()
        try:
            yield server.sockets[0].getsockname()[1]
        finally:
            loop.call_soon_threadsafe(loop.stop)
            thread.join()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy until either end closes; then close the other."""
    with contextlib.suppress(OSError):
        while data := await reader.read(_CHUNK_BYTES):
            writer.write(data)
            await writer.drain()
    writer.close()
