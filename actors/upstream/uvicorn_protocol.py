"""Limit request headers, answer HTTP/1.0 clients without chunks, ignore offers of other protocols,
and report lost connections.

Uvicorn limits neither size nor arrival time: a client without a key could fill the router's memory
with one header, or hold a connection open indefinitely with an incomplete header. Uvicorn sends a
response without Content-Length in chunked encoding also to HTTP/1.0 clients, which cannot decode
it. It drops the body of a request with `Upgrade`, which Java's default client sends (h2c), and
reads the body's bytes as the next request. While it queues a pipelined request, it does not notice
that the client of the running request disconnects. Source:
https://github.com/encode/uvicorn/blob/0.54.0/uvicorn/protocols/http/httptools_impl.py
"""

import asyncio
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, cast

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from connectors.open_files import report_few_left

MAX_HEAD_BYTES = 64 * 1024
"""Size limit in bytes of a request line and its headers, or of trailers after a body."""

CLIENT_CERTIFICATE = "tandem.client_certificate"
"""Key in an ASGI scope: whether the client presented a verified certificate."""

CONNECTION = "tandem.connection"
"""Key of the request's BoundedHttpProtocol, whose `write` and `disconnected` need no task."""

HEAD_S = 30.0
"""Timeout in seconds for complete headers, from their first byte."""


class JoinedWrites:
    """A connection's transport: one system call sends what uvicorn writes in a turn of the loop.

    Each write wakes the client's process, and uvicorn writes headers and body separately.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._unsent: list[bytes] = []

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the transport."""
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if not self._unsent:
            self._loop.call_soon(self.flush)
        self._unsent.append(data)

    def write_now(self, data: bytes) -> None:
        self._unsent.append(data)
        self.flush()

    def flush(self) -> None:
        unsent, self._unsent = self._unsent, []
        if unsent and not self._transport.is_closing():
            self._transport.write(b"".join(unsent))

    def close(self) -> None:
        self.flush()
        self._transport.close()


class HeadTooLargeError(Exception):
    """Stops the parser; the protocol then refuses the request."""


class UnframedCycle(RequestResponseCycle):
    """Response to an HTTP/1.0 client, without chunked encoding.

    If the response has no Content-Length, the close of the connection ends the body.
    """

    _has_length = True

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self._has_length = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
            if not self._has_length:
                self.chunked_encoding = False
        elif not self._has_length:
            self.expected_content_length = len(message.get("body", b""))
        await super().send(message)


class BoundedHttpProtocol(HttpToolsProtocol):
    """A connection with limits on request headers, for one request at a time.

    A request that arrives during an answer is discarded, and the connection closes after the
    answer; by RFC 9112, section 9.3.2, clients should repeat such requests. The connection holds at
    most `MAX_HEAD_BYTES` and one further read of incomplete headers in memory.
    """

    _in_head = False
    _too_large = False
    _discards = False
    """True after a pipelined request: all further bytes are discarded."""
    _head_timer: asyncio.TimerHandle | None = None

    _plain_head = b""
    """Headers of a request with `Upgrade`, without this header, until the parser has them again."""

    _unread_bytes = 0

    on_resume: Callable[[], None] | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport: Any
        super().connection_made(cast(asyncio.Transport, JoinedWrites(transport, self.loop)))
        self.disconnected: asyncio.Future[None] = self.loop.create_future()
        report_few_left(transport)
        # Clients and proxies open connections in advance, and these are as idle as later.
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        self._unset_keepalive_if_required()  # uvicorn leaves the timer after a reset
        super().connection_lost(exc)
        if not self.disconnected.done():
            self.disconnected.set_result(None)

    @property
    def paused(self) -> bool:
        return self.flow.write_paused

    def write(self, data: bytes) -> None:
        """Send a part of the body of the running response, as its `send` does with `more_body`."""
        cycle = self.cycle
        if cycle.disconnected:
            return
        if cycle.chunked_encoding:
            data = b"%x\r\n%b\r\n" % (len(data), data)
        else:
            cycle.expected_content_length -= len(data)
        self.transport.write_now(data)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.on_resume is not None:
            self.on_resume()

    def data_received(self, data: bytes) -> None:
        if self._discards:
            return
        self._unread_bytes += len(data)
        self._unset_keepalive_if_required()
        try:
            self._parse(data)
        except httptools.HttpParserError:
            self._refuse_invalid()  # without uvicorn's warning, with which any client could fill the log
        if self._discards or self.transport.is_closing():
            return
        if self._unread_bytes > MAX_HEAD_BYTES:
            self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        elif self._head_timer is None and not self._is_answering():
            # Any byte, even of an empty line, has stopped uvicorn's keep-alive timer.
            self._start_head_timer()

    def _parse(self, data: bytes) -> None:
        """Parse `data` as if there were no `Upgrade`, which a server may ignore (RFC 9110, 7.8).

        httptools ends such a request with its headers. The protocol ignores them and gives them to
        a new parser, without `Upgrade`: the old one discards all bytes after `Connection: close`.
        Pipelined requests are not parsed: a parser for each would take quadratic time.
        """
        while not self._discards:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                data, self._plain_head = self._plain_head + data[upgrade.args[0] :], b""
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's

    def on_message_begin(self) -> None:
        super().on_message_begin()
        scope = cast(dict[str, Any], self.scope)
        scope[CLIENT_CERTIFICATE] = bool(self.transport.get_extra_info("peercert"))
        scope[CONNECTION] = self
        self._in_head = True
        self._start_head_timer()

    def on_headers_complete(self) -> None:
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > MAX_HEAD_BYTES:
            self._too_large = True
            raise HeadTooLargeError
        if self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT":
            self._plain_head = self._without_upgrade()
            return
        self._in_head, self._unread_bytes = False, 0
        self._stop_head_timer()
        if self._discards or self._is_answering():
            self.cycle.keep_alive, self._discards = False, True
            return
        super().on_headers_complete()
        if self.parser.get_http_version() == "1.0":
            self.cycle.__class__ = UnframedCycle  # its task has not started yet

    def on_body(self, body: bytes) -> None:
        self._unread_bytes = 0
        if not self._discards:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self._plain_head:
            return
        self._unread_bytes = 0
        if not self._discards:
            super().on_message_complete()
            # Uvicorn pauses after a large unread body, and `connection_lost` then comes only after
            # the application's next `receive`.
            self.flow.resume_reading()

    def _without_upgrade(self) -> bytes:
        version = self.parser.get_http_version().encode()
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, version)]
        lines += [b"%s: %s" % header for header in self.headers if header[0] != b"upgrade"]
        return b"\r\n".join((*lines, b"\r\n"))

    def _refuse_invalid(self) -> None:
        status = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE if self._too_large else HTTPStatus.BAD_REQUEST
        self._refuse(status, "Invalid HTTP request received.")

    def _refuse(self, status: HTTPStatus, message: str = "") -> None:
        """Close the connection, after an error response unless another response is in progress."""
        if self._discards:
            return  # the connection closes after the answer
        between = self._is_answering() and (self._in_head or self.cycle.response_started)
        if not between:
            body = (message or f"{status.phrase}.").encode()
            head = (
                f"HTTP/1.1 {status.value} {status.phrase}",
                "content-type: text/plain; charset=utf-8",
                f"content-length: {len(body)}",
                "connection: close",
            )
            self.transport.write("\r\n".join((*head, "\r\n")).encode() + body)
        self.transport.close()

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _start_head_timer(self) -> None:
        self._stop_head_timer()
        self._head_timer = self.loop.call_later(HEAD_S, self._head_is_late)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        if self._is_answering():
            # Uvicorn's flow control may delay the headers until the end of the previous response,
            # which has its own timeouts.
            self._start_head_timer()
        elif self._in_head:
            self._refuse(HTTPStatus.REQUEST_TIMEOUT)
        else:
            self.transport.close()
