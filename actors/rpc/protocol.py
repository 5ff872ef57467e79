"""Protocol of the connection between a router and an engine, without I/O.

One connection carries many streams. The router opens a stream with an Open or an Ask. The engine
answers an Open with items and an EndStream. It answers an Ask with a Reply, or with an EndStream
after a failure. Credit limits the sent but not yet consumed bytes of each stream to
`WINDOW_BYTES`, so that a paused stream blocks no other stream.

The router offers its newest protocol version; the engine chooses the newest of its own versions up
to that one. A side that does not support the other's version closes the connection. Each release
supports `OLDEST_VERSION` to `NEWEST_VERSION`.
"""

import hmac
from collections.abc import Iterator, Mapping
from enum import StrEnum

import msgspec

from actors.request import Item, StreamChunk
from actors.rpc.messages import (
    Ask,
    CancelStream,
    Credit,
    EndStream,
    FrameReader,
    Message,
    Open,
    Reply,
    RpcFailure,
    RpcHello,
    RpcProtocolError,
    RpcRefused,
    RpcRequest,
    RpcWelcome,
    StreamItem,
    encode,
)

NEWEST_VERSION = 2
"""Version 2: a decode engine calls prefill (`RpcRequest.prefill`), and ends that call itself
(`CancelStream.done`).
"""
OLDEST_VERSION = 1

WINDOW_BYTES = 2**18
"""Credit of a new stream, in bytes, and the largest credit of a stream."""

PIECE_BYTES = 2**16
"""Size limit of the body of one item, in bytes; the engine splits larger ones."""

ITEM_BYTES = 64
"""Credit in bytes that an item consumes in addition to the size of its body."""

GRANT_BYTES = WINDOW_BYTES // 4
"""Number of consumed bytes at which the router sends a Credit; a short stream needs none."""

HELLO_BYTES = 1024
"""Size limit in bytes of a router's frames before authentication.

Later frames have no limit: routers limit the bodies of requests.
"""


class StreamState(StrEnum):
    """State of one stream; both sides use the same states."""

    NEW = "new"
    """The stream is not open yet."""
    OPEN = "open"
    """A call runs."""
    ASKED = "asked"
    """A method of the engine runs."""
    CANCELLED = "cancelled"
    ENDED = "ended"


Table = Mapping[tuple[StreamState, type[Message]], tuple[StreamState, bool]]
"""Map of (state, received message) to (next state, whether `receive` yields the message).

Any other pair is a protocol error.
"""

ENGINE_TABLE: Table = {
    (StreamState.NEW, Open): (StreamState.OPEN, True),
    (StreamState.NEW, Ask): (StreamState.ASKED, True),
    (StreamState.OPEN, Credit): (StreamState.OPEN, True),
    (StreamState.OPEN, CancelStream): (StreamState.CANCELLED, True),
    (StreamState.ASKED, CancelStream): (StreamState.CANCELLED, True),
    (StreamState.ENDED, Credit): (StreamState.ENDED, False),  # crossed the EndStream
    (StreamState.ENDED, CancelStream): (StreamState.ENDED, False),
}

CALLER_TABLE: Table = {
    (StreamState.OPEN, StreamItem): (StreamState.OPEN, True),
    (StreamState.OPEN, EndStream): (StreamState.ENDED, True),
    (StreamState.ASKED, Reply): (StreamState.ENDED, True),
    (StreamState.ASKED, EndStream): (StreamState.ENDED, True),
    (StreamState.CANCELLED, StreamItem): (StreamState.CANCELLED, False),  # crossed the CancelStream
    (StreamState.CANCELLED, Reply): (StreamState.ENDED, False),
    (StreamState.CANCELLED, EndStream): (StreamState.ENDED, False),
}


def common_version(offered: int, newest: int = NEWEST_VERSION, oldest: int = OLDEST_VERSION) -> int | None:
    """Return the newest version up to `offered` that this side supports; None if there is none.

    `offered` is the router's newest version. The router also checks the engine's choice with this
    function, because the engine may choose a version that the router no longer supports.

    >>> common_version(3, newest=2, oldest=1), common_version(1, newest=2, oldest=1)
    (2, 1)
    >>> common_version(0, newest=2, oldest=1) is None
    True
    """
    return min(offered, newest) if offered >= oldest else None


def item_bytes(item: Item) -> int:
    """Return the credit that `item` consumes, in bytes."""
    if isinstance(item, StreamChunk):
        return ITEM_BYTES + len(item.body)
    return ITEM_BYTES + len(item) if isinstance(item, bytes) else ITEM_BYTES


def pieces(item: Item) -> Iterator[Item]:
    """Yield `item` in pieces of at most PIECE_BYTES; the first piece has the tokens and timings.

    Tokens must not arrive after their bytes: an engine that resumes the stream would sample them
    again.
    """
    body = item.body if isinstance(item, StreamChunk) else item if isinstance(item, bytes) else b""
    if len(body) <= PIECE_BYTES:
        yield item
        return
    first = body[:PIECE_BYTES]
    yield msgspec.structs.replace(item, body=first) if isinstance(item, StreamChunk) else first
    for at in range(PIECE_BYTES, len(body), PIECE_BYTES):
        yield body[at : at + PIECE_BYTES]


class _Endpoint:
    """Common part of both sides: frames, stream states, and queued messages."""

    def __init__(self, table: Table, most_bytes: int | None) -> None:
        self.version: int | None = None
        """Protocol version of the connection; None before the RpcWelcome."""
        self._table = table
        self._frames = FrameReader(most_bytes)
        self._states: dict[int, StreamState] = {}
        self._last = 0
        self._outgoing: list[Message] = []

    @property
    def streams(self) -> int:
        """Number of streams that have not ended."""
        return len(self._states)

    @property
    def has_messages(self) -> bool:
        """True if messages are queued."""
        return bool(self._outgoing)

    def take(self) -> bytes:
        """Remove the queued messages and return them as one frame; empty if there are none."""
        if not self._outgoing:
            return b""
        messages, self._outgoing = self._outgoing, []
        return encode(messages)

    def _advance(self, message: Message, stream: int) -> bool:
        """Move a stream to its next state; return whether `receive` yields `message`.

        Raises RpcProtocolError for a message that the stream's state does not allow.
        """
        state = self._states.get(stream)
        if state is None:
            state = StreamState.ENDED if 0 < stream <= self._last else StreamState.NEW
        try:
            following, wanted = self._table[state, type(message)]
        except KeyError:
            raise RpcProtocolError(
                f"unexpected {type(message).__name__} for stream {stream}, which is {state.value}"
            ) from None
        if following is not state:
            if state is StreamState.NEW:
                self._last = stream
            self._move(stream, following)
        return wanted

    def _move(self, stream: int, state: StreamState) -> None:
        if state is StreamState.ENDED:
            self._states.pop(stream, None)
        else:
            self._states[stream] = state


class EngineProtocol(_Endpoint):
    """The engine's side of one connection."""

    def __init__(self, key: str) -> None:
        super().__init__(ENGINE_TABLE, HELLO_BYTES)
        self._key = key.encode()
        self._credit: dict[int, int] = {}

    def receive(self, data: bytes) -> Iterator[Open | Ask | CancelStream | Credit]:
        """Process `data`: authenticate the router, or update its streams. Yield stream messages.

        Omits messages that arrive after the end of their stream. Raises RpcProtocolError for a
        wrong key, an unsupported version or an invalid message; call `refuse` then, and close the
        connection.
        """
        for message in self._frames.feed(data):
            if isinstance(message, RpcHello) and self.version is None:
                self._greet(message)
            elif self.version is None:
                raise RpcProtocolError(f"{type(message).__name__} before authentication")
            elif isinstance(message, Open | Ask | CancelStream | Credit):
                if self._advance(message, message.stream):
                    if isinstance(message, Open):
                        self._credit[message.stream] = WINDOW_BYTES
                    elif isinstance(message, Credit):
                        self._grant(message)
                    yield message
            else:
                raise RpcProtocolError(f"unexpected {type(message).__name__}")

    def send(self, stream: int, item: Item, size: int) -> bool:
        """Queue an item; return False, without queueing it, if the stream has too little credit.

        ``item``  an item from `pieces`
        ``size``  credit that the item consumes, from `item_bytes`
        """
        credit = self._credit[stream] - size
        if credit < 0:
            return False
        self._credit[stream] = credit
        self._outgoing.append(StreamItem(stream, item))
        return True

    def reply(self, stream: int, value: object) -> None:
        """Queue the result of a method and end the stream."""
        self._outgoing.append(Reply(stream, value))
        self._move(stream, StreamState.ENDED)

    def end(self, stream: int, failure: RpcFailure | None = None) -> None:
        """End a stream and queue its EndStream."""
        self._outgoing.append(EndStream(stream, failure))
        self._credit.pop(stream, None)
        self._move(stream, StreamState.ENDED)

    def refuse(self, reason: str) -> None:
        """Queue an RpcRefused with the reason for closing the connection."""
        self._outgoing.append(RpcRefused(reason))

    def _greet(self, hello: RpcHello) -> None:
        if not hmac.compare_digest(hello.key.encode(), self._key):
            raise RpcProtocolError("the router sent a wrong key; it must send the one in the metadata of this engine")
        self.version = common_version(hello.version)
        if self.version is None:
            raise RpcProtocolError(
                f"the router's protocol version {hello.version} is not supported: this engine supports"
                f" {OLDEST_VERSION} to {NEWEST_VERSION}; update the router"
            )
        self._frames.most_bytes = None
        self._outgoing.append(RpcWelcome(self.version))

    def _grant(self, credit: Credit) -> None:
        if not 0 < credit.size <= WINDOW_BYTES:
            raise RpcProtocolError(f"a Credit grants {credit.size} bytes; it must grant 1 to {WINDOW_BYTES} bytes")
        self._credit[credit.stream] = min(self._credit.get(credit.stream, 0) + credit.size, WINDOW_BYTES)


class CallerProtocol(_Endpoint):
    """The router's side of one connection. Queues messages until the RpcWelcome."""

    def __init__(self, key: str) -> None:
        super().__init__(CALLER_TABLE, None)
        self._hello: RpcHello | None = RpcHello(NEWEST_VERSION, key)
        self._unread: dict[int, int] = {}
        """Bytes received on each open stream for which the router has not yet sent Credit."""

    def open(self, request: RpcRequest) -> int:
        """Queue a call; return its stream number."""
        stream = self._begin(StreamState.OPEN)
        self._unread[stream] = 0
        self._outgoing.append(Open(stream, request))
        return stream

    def ask(self, method: str, arguments: tuple[object, ...]) -> int:
        """Queue a call of one of the engine's methods; return its stream number."""
        stream = self._begin(StreamState.ASKED)
        self._outgoing.append(Ask(stream, method, arguments))
        return stream

    def cancel(self, stream: int, done: bool = False) -> None:
        """Cancel a stream; if its Open or Ask is still queued, remove it and send no CancelStream.

        Ignores streams that have ended or are cancelled.

        ``done``  whether decode has the KV that the call computed
        """
        if self._states.get(stream) not in (StreamState.OPEN, StreamState.ASKED):
            return
        self._forget(stream)
        unsent = [one for one in self._outgoing if isinstance(one, Open | Ask) and one.stream == stream]
        if unsent:
            self._outgoing.remove(unsent[0])
            self._move(stream, StreamState.ENDED)
        else:
            self._move(stream, StreamState.CANCELLED)
            self._outgoing.append(CancelStream(stream, done))

    def grant(self, stream: int, size: int) -> None:
        """Queue Credit for `size` consumed bytes; ignore cancelled and ended streams.

        The caller waits until GRANT_BYTES are consumed, to send few messages.
        """
        if stream in self._unread:
            self._unread[stream] -= size
            self._outgoing.append(Credit(stream, size))

    def receive(self, data: bytes) -> Iterator[StreamItem | Reply | EndStream]:
        """Process `data`: accept the RpcWelcome, or update the streams. Yield stream messages.

        Omits messages of cancelled streams. Raises RpcProtocolError for an unsupported version, an
        invalid message or an RpcRefused; close the connection then.
        """
        for message in self._frames.feed(data):
            if isinstance(message, StreamItem | Reply | EndStream) and self.version is not None:
                if self._advance(message, message.stream):
                    if isinstance(message, StreamItem):
                        self._charge(message)
                    else:
                        self._forget(message.stream)
                    yield message
            elif isinstance(message, RpcWelcome) and self.version is None:
                if common_version(message.version) != message.version:
                    raise RpcProtocolError(
                        f"the engine chose protocol version {message.version}: this router supports {OLDEST_VERSION} to"
                        f" {NEWEST_VERSION}; update the older of the two"
                    )
                self.version = message.version
            elif isinstance(message, RpcRefused):
                raise RpcProtocolError(f"the engine closed the connection: {message.reason}")
            else:
                raise RpcProtocolError(f"unexpected {type(message).__name__}")

    def take(self) -> bytes:
        """Return the RpcHello at the first call, then nothing until the RpcWelcome has arrived.

        After it, remove the queued messages and return them as one frame.
        """
        if self._hello is not None:
            hello, self._hello = self._hello, None
            return encode([hello])
        return super().take() if self.version is not None else b""

    def _begin(self, state: StreamState) -> int:
        self._last += 1
        self._move(self._last, state)
        return self._last

    def _charge(self, message: StreamItem) -> None:
        unread = self._unread[message.stream] = self._unread[message.stream] + item_bytes(message.item)
        if unread > WINDOW_BYTES:
            raise RpcProtocolError(f"stream {message.stream} exceeds its credit by {unread - WINDOW_BYTES} bytes")

    def _forget(self, stream: int) -> None:
        self._unread.pop(stream, None)
