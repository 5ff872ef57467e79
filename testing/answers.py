"""Read an answer of the router without an HTTP server."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable
from typing import Any


class Reader:
    """Client that reads one write at a time; the writer is paused until `take`."""

    def __init__(self) -> None:
        self.on_resume: Callable[[], None] | None = None
        self.written: deque[bytes] = deque()

    @property
    def paused(self) -> bool:
        return bool(self.written)

    def write(self, data: bytes) -> None:
        self.written.append(data)

    def take(self) -> bytes:
        data = self.written.popleft()
        if not self.written and self.on_resume is not None:
            asyncio.get_running_loop().call_soon(self._resume)
        return data

    def _resume(self) -> None:
        if self.on_resume is not None and not self.paused:
            self.on_resume()


async def body_of(answer: Any) -> AsyncGenerator[bytes, None]:
    """Yield the writes of an answer; at its end, raise its error."""
    yield await answer.begin()
    if not answer.start.streams:
        return
    reader = Reader()
    relaying = asyncio.create_task(answer.relay(reader))
    try:
        while not relaying.done() or reader.written:
            if reader.written:
                yield reader.take()
            else:
                await asyncio.wait({relaying}, timeout=0.001)
        if last := await relaying:
            yield last
    finally:
        relaying.cancel()
        await asyncio.wait({relaying})


async def whole_body(answer: Any) -> bytes:
    return b"".join([piece async for piece in body_of(answer)])
