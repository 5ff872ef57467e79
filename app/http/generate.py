"""ASGI endpoint of vLLM's POST routes: relays answers and detects the client's disconnect."""

import asyncio
import json
import logging
from contextlib import suppress
from http import HTTPStatus
from typing import Any

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from actors.errors import with_causes
from actors.request import Endpoint
from actors.router.client_request import ClientRequest
from actors.router.model_router import ModelRouter
from actors.router.prompt_lists import AnyAnswer, open_answer
from actors.router.router import Router
from actors.upstream.uvicorn_protocol import CONNECTION
from app.http.auth import OPERATOR
from app.http.client_writer import KeepAlive, SendWriter, until_disconnect
from app.http.errors import error_event, error_response, late_error, status_of
from app.http.parsing import read_request
from app.http.record import DISCONNECTS, RECORD, REFUSED, RequestRecord
from app.http.traces import Traces
from connectors.errors import TandemError

logger = logging.getLogger(__name__)

STREAM_END_S = 5.0
"""Timeout in seconds for sending the end of a stream to a slow client."""

RELAYED_HEADERS = frozenset({b"content-type", b"content-length", b"x-request-id"})
"""Response headers of an engine that the router forwards to the client."""

HEADERS_OF_BODY = frozenset({b"content-type", b"content-length"})


class Generate:
    """ASGI application of one `Endpoint`."""

    def __init__(self, router: Router, endpoint: Endpoint, traces: Traces | None = None) -> None:
        self._router = router
        self._endpoint = endpoint
        self._traces = traces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        limits = self._router.limits
        record: RequestRecord = scope.get(RECORD) or RequestRecord()
        record.metrics = self._router.metrics
        keep_alive = KeepAlive(send, limits)
        try:
            with record, self._router.admitted() as count:
                request = await read_request(Request(scope, receive), self._endpoint, limits, wants_explanation(scope))
                record.received(request)
                model = await self._router.model_of(request.body.get("model"))
                count(request.sequences)
                request = record.serve(model, request, self._traces)
                await until_disconnect(scope, receive, self._answer(model, request, record, keep_alive, scope, send))
        except DISCONNECTS as error:
            if isinstance(error, asyncio.CancelledError):
                raise
        except Exception as error:
            status = status_of(error)
            if status is HTTPStatus.INTERNAL_SERVER_ERROR:
                logger.exception("a request to %s failed; the client gets an internal error", self._endpoint)
            record.count(REFUSED, None, int(status))
            if keep_alive.started:
                await self._refuse_late(error_event(error, self._endpoint), status, record, send)
            else:
                await error_response(error, limits.retry_after_s, self._endpoint)(scope, receive, send)

    async def _answer(
        self,
        model: ModelRouter,
        request: ClientRequest,
        record: RequestRecord,
        keep_alive: KeepAlive,
        scope: Scope,
        send: Send,
    ) -> None:
        """Serve `request` and send the answer to the client.

        Sends the status with the first bytes of the answer, because an error before them has a
        status of its own. If `keep_alive` has started the stream, the client has already
        received status 200.
        """
        answer = None
        keep_alive.begin(request)
        try:
            answer = await open_answer(model, request)
            head = await answer.begin()
            await keep_alive.stop()
            if answer.start.streams:
                model.metrics.first_byte.labels(answer.route).observe(answer.first_byte_s)
            try:
                await self._begin(answer, head, record, keep_alive.started, send)
                if answer.start.streams:
                    await self._send_rest(answer, model, record, scope, send)
                else:
                    record.complete = True
            finally:
                record.keep(answer, over=True)
        except Exception:
            if answer is not None:
                answer.close()  # `stop` may wait for a client that reads nothing
                answer = None
            await keep_alive.stop()  # an error event follows
            raise
        finally:
            if answer is not None:
                answer.close()
            await keep_alive.close()

    async def _begin(self, answer: AnyAnswer, head: bytes, record: RequestRecord, started: bool, send: Send) -> None:
        """Send the headers and the first bytes of an answer.

        In a `started` stream, headers are sent as comments, and an error as the last event.
        """
        status = answer.start.status
        route, reason = (REFUSED, None) if status >= HTTPStatus.BAD_REQUEST else (answer.route, answer.local_reason)
        record.count(route, reason, status)
        headers = [*_response_headers(answer), *await record.explanation(answer)]
        if not started:
            await send({"type": "http.response.start", "status": status, "headers": headers})
        elif not answer.start.streams:
            await self._refuse_late(late_error(json.loads(head), self._endpoint), status, record, send)
            return
        else:
            unsent = (header for header in headers if header[0] not in HEADERS_OF_BODY)
            head = b"".join(b": %s: %s\n\n" % header for header in unsent) + head
        await send({"type": "http.response.body", "body": head, "more_body": answer.start.streams})
        record.keep(answer)

    async def _refuse_late(self, event: bytes, status: int, record: RequestRecord, send: Send) -> None:
        """End a stream that has no tokens with an error event.

        ``status``  HTTP status that the error would have had, for the access log
        """
        record.line["late_status"] = int(status)
        with suppress(TimeoutError):
            async with asyncio.timeout(STREAM_END_S):
                await send({"type": "http.response.body", "body": event, "more_body": False})

    async def _send_rest(
        self, answer: AnyAnswer, model: ModelRouter, record: RequestRecord, scope: Scope, send: Send
    ) -> None:
        """Send the rest of a stream. After an error, the last event is an error event."""
        last, connection = b"", scope.get(CONNECTION)
        # `BoundedHttpProtocol`, or a writer for the proxy of Ray Serve.
        writer: Any = connection or SendWriter(send)
        try:
            try:
                last = await answer.relay(writer)
            except Exception as error:
                # A client that resumes reading receives the error of its idle timeout as well.
                model.metrics.broken_streams.inc()
                logger.warning(
                    "a stream was interrupted; ending it with an error event: %s",
                    with_causes(error),
                    exc_info=not isinstance(error, TandemError),
                )
                last = error_event(error, self._endpoint)
            finally:
                if connection is not None:  # else `send` has recorded them
                    record.relayed(answer.sent_bytes, answer.usage)
            # After this timeout the HTTP server closes the connection.
            with suppress(TimeoutError):
                async with asyncio.timeout(STREAM_END_S):
                    if connection is None:
                        await writer.drained()
                    await send({"type": "http.response.body", "body": last, "more_body": False})
                    record.complete = True
        finally:
            if connection is None:
                await writer.close()


def wants_explanation(scope: Scope) -> bool:
    """Return whether the client asks for an explanation and may have one.

    The decision tells which prefixes of other clients are cached. The header of a key that is not
    an operator's is ignored: diagnostics must not fail a request. ASGI header names are lower case.
    """
    for name, value in scope["headers"]:
        if name == b"x-tandem-explain" and value.strip().lower() in {b"1", b"true"}:
            return bool(scope.get(OPERATOR, True))
    return False


def _response_headers(answer: AnyAnswer) -> list[tuple[bytes, bytes]]:
    headers = [(name, value) for name, value in answer.start.headers if name in RELAYED_HEADERS]
    if answer.start.status >= HTTPStatus.BAD_REQUEST:
        return headers  # a refused request has no route
    headers.append((b"x-tandem-route", answer.route.encode()))
    if answer.sampled_by is not None:
        headers.append((b"x-tandem-first-token", answer.sampled_by.encode()))
    if answer.local_reason is not None:
        headers.append((b"x-tandem-local-reason", answer.local_reason.encode()))
    return headers
