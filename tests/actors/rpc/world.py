"""A real server with both its sides: an engine's generator, a router's calls, and a manual
connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack
from typing import Any

from actors.engine_pool.engine_call import EngineCall
from actors.engine_pool.engines import EnginePool
from actors.errors import CannotResumeError, EngineDownError, UnavailableError
from actors.request import Accepted, Call, Heartbeat, ResponseStart, TokenChunk
from actors.rpc.address import RpcAddress
from actors.rpc.messages import Credit, EndStream, FrameReader, RpcRequest, StreamItem, encode
from actors.rpc.protocol import item_bytes
from actors.rpc.server import RpcServer
from actors.rpc.server_connection import ServedStream

CALL = Call("POST", "/v1/completions", body=b"{}")
ITEMS: list[Any] = [
    Accepted("e", 1),
    Heartbeat(),
    ResponseStart(200, ()),
    TokenChunk(b"one", ((1,),)),
    b"two" * 100_000,
]

WAIT_S = 60
"""Limit of a wait for an event that is certain: far above a pause of the machine."""


class Served:
    """An engine's generator; the path of a call selects its behaviour. Counts running calls."""

    def __init__(self) -> None:
        self.running = 0
        self.requests: list[RpcRequest] = []
        self.go_on = asyncio.Event()
        self.instead: Callable[[RpcRequest, ServedStream], AsyncGenerator[Any, None]] | None = None

    def __call__(self, request: RpcRequest, _: ServedStream) -> AsyncGenerator[Any, None]:
        return self._serve(request) if self.instead is None else self.instead(request, _)

    async def _serve(self, request: RpcRequest) -> AsyncGenerator[Any, None]:
        self.requests.append(request)
        self.running += 1
        try:
            for item in ITEMS[:1] if request.call.path == "is silent" else ITEMS:
                yield item
            match request.call.path:
                case "hangs" | "is silent":
                    await asyncio.sleep(60)
                case "waits":
                    await self.go_on.wait()
                case "dies":
                    raise EngineDownError("killed")
                case "cannot":
                    raise CannotResumeError("no record")
                case "breaks":
                    raise KeyError("a bug")
                case "ends late":
                    try:
                        await asyncio.sleep(60)
                    finally:
                        await self.go_on.wait()
        finally:
            self.running -= 1


class WholeCall(EngineCall):
    """A call that also yields the items which routers handle at their arrival.

    Raises the cause of a lost call, which names the engine.
    """

    def received(self, item: Any) -> Any:
        wake = super().received(item)
        if isinstance(item, Accepted | Heartbeat):
            self._items.append(item)
            self.flush()
        return wake

    async def __anext__(self) -> Any:
        try:
            item = await self.next()
        except UnavailableError as error:
            raise (error.__cause__ or error) from None
        if item is None:
            raise StopAsyncIteration
        return item


class World:
    """A server with two slots, and a router's side of it."""

    def __init__(self, served: Served, server: RpcServer, address: RpcAddress, engines: EnginePool) -> None:
        self.served, self.server, self.address, self.engines = served, server, address, engines

    async def call(self, path: str, stack: AsyncExitStack, maybe_full: bool = False, **more: Any) -> Any:
        slot = await self.engines.take()
        slot.maybe_full = maybe_full
        stack.callback(self.engines.give_back, slot)
        return self.engines.dispatch(slot, Call("POST", path, body=b"{}"), **more)

    async def at_rest(self) -> None:
        await self.has(0)
        assert not self.served.running

    async def has(self, ongoing: int) -> None:
        async with asyncio.timeout(WAIT_S):
            while True:
                if self.server.ongoing == ongoing:
                    return
                await asyncio.sleep(0.005)


async def read(call: Any, found: list[Any]) -> None:
    while True:
        try:
            found.append(await call.__anext__())
        except StopAsyncIteration:
            return


async def items(call: Any) -> list[Any]:
    found: list[Any] = []
    await read(call, found)
    return found


def joined(found: list[Any]) -> list[Any]:
    """Return the items, with consecutive pieces of the body joined."""
    return [item for item in found if not isinstance(item, bytes)] + [
        b"".join(i for i in found if isinstance(i, bytes))
    ]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110 - neither side has an event for it
            await asyncio.sleep(0.005)


async def settled(count: Callable[[], int]) -> int:
    """Return a count that has been equal ten times in a row: more than one pause of the machine."""
    async with asyncio.timeout(WAIT_S):
        found, equal = count(), 0
        while equal < 10:
            await asyncio.sleep(0.03)
            found, equal = count(), equal + 1 if count() == found else 0
    return found


class Stranger:
    """A manual connection to the server."""

    def __init__(self, world: World) -> None:
        self._world = world

    async def __aenter__(self) -> Stranger:
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self._world.address.port)
        self._frames = FrameReader()
        self._come: list[Any] = []
        return self

    async def __aexit__(self, *_: object) -> None:
        self.writer.transport.abort()

    def say(self, *said: Any) -> None:
        self.writer.write(encode(said))

    async def heard(self) -> Any:
        """Return the server's next message; None if it has closed the connection."""
        async with asyncio.timeout(WAIT_S):
            while not self._come:
                try:
                    data = await self.reader.read(2**16)
                except ConnectionResetError:
                    return None
                if not data:
                    return None
                self._come += self._frames.feed(data)
        return self._come.pop(0)

    async def answer(self, stream: int) -> list[Any]:
        """Return the items of a stream up to its end, without those of other streams."""
        found: list[Any] = []
        while not (isinstance(message := await self.heard(), EndStream) and message.stream == stream):
            assert message is not None
            if isinstance(message, StreamItem):
                self.say(Credit(message.stream, item_bytes(message.item)))
                found += [message.item] if message.stream == stream else []
        return found


def channels(engines: EnginePool) -> tuple[int, int]:
    """Return the numbers of a router's connections: all, and those without a call or method."""
    found = engines._channels._channels.values()  # noqa: SLF001
    return len(found), sum(not channel.streams for channel in found)
