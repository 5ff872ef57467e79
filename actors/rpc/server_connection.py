"""One connection of an engine's RPC server: socket, tasks and timers around `protocol.py`."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, cast

from actors.request import Accepted, Item, PrefillReport, ResponseStart
from actors.rpc.messages import Ask, CancelStream, Credit, Open, RpcFailure, RpcProtocolError, RpcRequest
from actors.rpc.protocol import PIECE_BYTES, EngineProtocol, item_bytes, pieces
from connectors.open_files import report_few_left

logger = logging.getLogger(__name__)

HELLO_S = 5.0
"""Timeout in seconds for the authentication of a new connection."""

LINGER_S = 0.002
"""Maximum delay in seconds of `Accepted`, `PrefillReport` and `ResponseStart`.

They are sent with the next item if it follows in this time, because each frame wakes the router's
process.
"""

RunCall = Callable[[RpcRequest, "ServedStream"], Coroutine[Any, Any, RpcFailure | None]]
"""Function that sends an answer on a stream; returns the failure of an incomplete answer, or None.

It is cancelled if the router cancels the call, the connection ends or the server closes.
"""

RunMethod = Callable[[str, tuple[Any, ...]], Coroutine[Any, Any, Any]]
"""Function that returns the result of a method, by name and arguments; cancelled as `Serve` is."""


class ServedStream:
    """The stream of a running call or method.

    ``expects_refusal``  whether the router believes the engine full (`RpcRequest.maybe_full`)
    """

    done = False
    """Whether the caller has cancelled the call with the KV in place, or discards it itself."""
    has_ended = False

    def __init__(self, connection: "ServerConnection", number: int, expects_refusal: bool) -> None:
        self.task: asyncio.Task[Any] | None = None
        self._connection = connection
        self.number = number
        self._expects_refusal = expects_refusal
        self._credit: asyncio.Future[None] | None = None

    async def send(self, item: Item) -> None:
        """Send the next item of the answer. Waits for credit and for room in the socket's buffer.

        Delays `Accepted`, `PrefillReport` and `ResponseStart` by up to LINGER_S, unless the caller
        believes this engine full.
        """
        lazy = isinstance(item, Accepted | PrefillReport | ResponseStart) and not self._expects_refusal
        for piece in pieces(item):
            while not self._connection.sent(self.number, piece, lazy):
                self._credit = asyncio.get_running_loop().create_future()
                await self._credit

    def end(self, failure: RpcFailure) -> None:
        """Send the end of the answer before the end of its task."""
        self.has_ended = True
        self._connection.end(self.number, failure)

    def credited(self) -> None:
        if self._credit is not None and not self._credit.done():
            self._credit.set_result(None)


class ServerConnection(asyncio.Protocol):
    """One accepted connection.

    Closes itself after a wrong key, an unsupported protocol version, an invalid message, or HELLO_S
    without an RpcHello.
    """

    def __init__(
        self, key: str, run_call: RunCall, run_method: RunMethod, connections: set["ServerConnection"]
    ) -> None:
        self._protocol = EngineProtocol(key)
        self._run_call = run_call
        self._run_method = run_method
        self._connections = connections
        self._streams: dict[int, ServedStream] = {}
        self._can_write = True
        self._unsent_bytes = 0
        self._flushing: asyncio.Handle | None = None
        self._lingering = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._connections.add(self)
        report_few_left(transport)
        self._authentication_timer = asyncio.get_running_loop().call_later(
            HELLO_S, self._reject, f"it did not authenticate within {HELLO_S:g} s"
        )

    def data_received(self, data: bytes) -> None:
        try:
            for message in self._protocol.receive(data):
                match message:
                    case Open(number, request):
                        stream = self._open_stream(number, request.maybe_full)
                        self._run(stream, self._run_call(request, stream))
                    case Ask(number, method, arguments):
                        stream = self._open_stream(number)
                        self._run(stream, self._run_method(method, arguments), reply=True)
                    case CancelStream(number, done):
                        # A caller of version 1 calls the method `discard` if decode has no KV.
                        self._streams[number].done = done or self._protocol.version == 1
                        self._cancel(number)
                    case Credit(number):
                        self._streams[number].credited()
        except RpcProtocolError as error:
            self._reject(str(error))
            return
        if self._protocol.version is not None:
            self._authentication_timer.cancel()
        if self._flushing is None:
            self._flush()  # the RpcWelcome

    def connection_lost(self, _: Exception | None) -> None:
        self._authentication_timer.cancel()
        self._connections.discard(self)
        if self._flushing is not None:
            self._flushing.cancel()
        for number in list(self._streams):
            self._cancel(number)

    def pause_writing(self) -> None:
        self._can_write = False

    def resume_writing(self) -> None:
        self._can_write = True
        for stream in list(self._streams.values()):
            stream.credited()

    def sent(self, number: int, item: Item, lazy: bool) -> bool:
        """Queue an item of stream `number`.

        Return False without queueing if the stream lacks credit or the socket's buffer is full.

        ``lazy``  whether the item may wait LINGER_S for the next one
        """
        size = item_bytes(item)
        if not self._can_write or not self._protocol.send(number, item, size):
            return False
        self._unsent_bytes += size
        if self._unsent_bytes >= PIECE_BYTES:
            self._flush()
        else:
            self._flush_soon(lazy)
        return True

    def end(self, number: int, failure: RpcFailure | None, lazy: bool = False) -> None:
        self._protocol.end(number, failure)
        self._flush_soon(lazy)

    async def close(self, within_s: float) -> None:
        """Cancel the running calls and methods, send their EndStreams, and close the connection.

        ``within_s``  timeout in seconds for the end of the calls, and again for the router to read
                      the EndStreams; a call that has not ended in time gets none
        """
        tasks = {stream.task for stream in self._streams.values() if stream.task is not None}
        for number in list(self._streams):
            self._cancel(number)
        if tasks:
            await asyncio.wait(tasks, timeout=within_s)
        await asyncio.sleep(0)  # callbacks of the tasks queue the EndStream messages
        self._flush()
        self._transport.close()
        asyncio.get_running_loop().call_later(within_s, self._transport.abort)  # if the router does not read

    def _open_stream(self, number: int, expects_refusal: bool = False) -> ServedStream:
        stream = self._streams[number] = ServedStream(self, number, expects_refusal)
        return stream

    def _run(self, stream: ServedStream, answer: Coroutine[Any, Any, Any], reply: bool = False) -> None:
        stream.task = asyncio.create_task(answer, name="answers-a-call")
        stream.task.add_done_callback(lambda task: self._ended(stream.number, task, reply))

    def _cancel(self, number: int) -> None:
        """Cancel a call or method once: another cancellation would interrupt the engine's abort."""
        stream = self._streams[number]
        if stream.task is not None:
            task, stream.task = stream.task, None
            task.cancel()

    def _ended(self, number: int, task: asyncio.Task[Any], reply: bool) -> None:
        """Send the end of an answer after its task has ended.

        A callback of the task, because a task cancelled before its start runs no code.
        """
        stream = self._streams.pop(number)
        failure = None
        # Only a closing server's reason is read: a router that has cancelled ignores it.
        if task.cancelled():
            failure = RpcFailure("engine_down", "the engine is stopping")
        elif (error := task.exception()) is not None:
            logger.error(
                "answering stream %d of a router failed; sending the error to the router", number, exc_info=error
            )
            failure = RpcFailure("error", repr(error))
        elif reply:
            self._protocol.reply(number, task.result())
            self._flush_soon(lazy=False)
            return
        else:
            failure = task.result()
        if not stream.has_ended:
            self.end(number, failure, lazy=task.cancelled())  # the client ignores the end of a cancelled stream

    def _flush_soon(self, lazy: bool) -> None:
        """Schedule `_flush`, so that one frame has the items of all streams of an engine step.

        ``lazy``  whether the frame may wait LINGER_S for another item
        """
        loop = asyncio.get_running_loop()
        if self._flushing is not None:
            if lazy or not self._lingering:
                return
            self._flushing.cancel()
        self._lingering = lazy
        self._flushing = loop.call_later(LINGER_S, self._flush) if lazy else loop.call_soon(self._flush)

    def _flush(self) -> None:
        if self._flushing is not None:
            self._flushing.cancel()
            self._flushing = None
        self._unsent_bytes = 0
        frame = self._protocol.take()
        if frame and not self._transport.is_closing():  # `connection_lost` will cancel the calls
            self._transport.write(frame)

    def _reject(self, why: str) -> None:
        logger.warning("closing a connection to the RPC server: %s", why)
        self._protocol.refuse(why)
        self._flush()
        self._transport.close()
