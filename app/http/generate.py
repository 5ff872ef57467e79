"""ASGI endpoint of vLLM's POST routes: relays answers and detects the client's disconnect."""

import asyncio
import json
import logging
from contextlib import suppress
from http import HTTPStatus

from ray.exceptions import TaskCancelledError
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from actors.errors import with_causes
from actors.request import Endpoint
from actors.router.client_request import ClientRequest
from actors.router.models.model_router import AnyAnswer
from actors.router.relay import ClientWriter
from actors.router.router import Router
from actors.telemetry.access_log import ENTRY, AccessEntry
from actors.telemetry.router_metrics import RouterMetrics
from actors.upstream.uvicorn_protocol import CONNECTION
from app.http.client_writer import SendWriter, until_disconnect
from app.http.errors import BadRequestError, error_event, error_response, late_error, status_of
from app.http.explain import Observer, wants_explanation
from app.http.keep_alive import KeepAlive
from app.http.parsing import read_request
from app.http.traces import Traces
from connectors.errors import TandemError

logger = logging.getLogger(__name__)

STREAM_END_S = 5.0
"""Timeout in seconds for sending the end of a stream to a slow client."""

RELAYED_HEADERS = frozenset({b"content-type", b"content-length", b"x-request-id"})
"""Response headers of an engine that the router forwards to the client."""

HEADERS_OF_BODY = frozenset({b"content-type", b"content-length"})

ROUTE_HEADER = b"x-tandem-route"
LOCAL_REASON_HEADER = b"x-tandem-local-reason"
FIRST_TOKEN_HEADER = b"x-tandem-first-token"

REFUSED = "refused"
"""Label `route`, in the metrics, of a request that got an error instead of an answer."""

LEFT = "left"
"""Label `route` of a request whose client disconnected before the answer started."""

CLIENT_CLOSED_REQUEST = 499
"""Label `status` of a `left` request in the metrics: the non-standard code that nginx logs."""


class Tally:
    """Counter that adds one request to the metrics, at the first call of `count` only."""

    def __init__(self, metrics: RouterMetrics) -> None:
        self.metrics = metrics
        """Metrics that count the request: the router's until the request's model is known."""
        self._counted = False

    def count(self, route: str, reason: str | None, status: int) -> None:
        """Count the request at the first call; ignore later calls."""
        if not self._counted:
            self._counted = True
            self.metrics.requests.labels(route, reason or "", status).inc()


class Generate:
    """ASGI application of one `Endpoint`."""

    def __init__(self, router: Router, endpoint: Endpoint, traces: Traces | None = None) -> None:
        self._router = router
        self._endpoint = endpoint
        self._traces = traces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        limits = self._router.limits
        tally = Tally(self._router.metrics)
        keep_alive = KeepAlive(send, limits)
        try:
            with self._router.admitted() as count:
                request = await self._read(Request(scope, receive))
                if (entry := scope.get(ENTRY)) is not None:
                    entry.received(request.body)
                model = await self._router.model_of(request.body.get("model"))
                tally.metrics = model.metrics
                count(request.sequences)
                with Observer.of(model, request, self._traces, scope.get(ENTRY)) as observer:
                    work = self._relay(observer, tally, keep_alive, scope, send)
                    await until_disconnect(scope, receive, work)
        except (ClientDisconnect, TaskCancelledError):
            return
        except Exception as error:
            status = status_of(error)
            if status is HTTPStatus.INTERNAL_SERVER_ERROR:
                logger.exception("a request to %s failed; the client gets an internal error", self._endpoint)
            tally.count(REFUSED, None, int(status))
            if keep_alive.started:
                await self._refuse_late(error_event(error, self._endpoint), status, scope.get(ENTRY), send)
            else:
                await error_response(error, limits.retry_after_s, self._endpoint)(scope, receive, send)
        finally:
            tally.count(LEFT, None, CLIENT_CLOSED_REQUEST)

    async def _read(self, request: Request) -> ClientRequest:
        """Read the request within `body_timeout_s`, which limits the time of a slow upload.

        Raises BadRequestError for an invalid request, or with status 408 after the timeout, and
        ClientDisconnect if the client closes the connection.
        """
        limits = self._router.limits
        try:
            async with asyncio.timeout(limits.body_timeout_s):
                found = await read_request(
                    request, self._endpoint, limits.max_body_bytes, limits.max_prompts, limits.client_priority
                )
                session = request.headers.get(limits.routing.session_header)
                found = found.with_metadata(session=session, explain=wants_explanation(request.scope))
                await found.prepare()
        except TimeoutError:
            message = f"the body did not arrive within {limits.body_timeout_s:g} s"
            raise BadRequestError(message, status=HTTPStatus.REQUEST_TIMEOUT) from None
        except ClientDisconnect:
            self._router.metrics.disconnects.inc()
            raise
        return found

    async def _relay(self, observer: Observer, tally: Tally, keep_alive: KeepAlive, scope: Scope, send: Send) -> None:
        complete = False
        try:
            async with keep_alive.waiting(observer.request), observer.model.answer(observer.request) as answer:
                await self._send(answer, observer, tally, keep_alive, scope, send)
                complete = True
        except asyncio.CancelledError:
            # Serve's proxy also cancels the task after it has received the whole answer.
            if not complete:
                observer.model.metrics.disconnects.inc()
            raise

    async def _send(
        self, answer: AnyAnswer, observer: Observer, tally: Tally, keep_alive: KeepAlive, scope: Scope, send: Send
    ) -> None:
        """Send `answer` to the client.

        Sends the status with the first bytes of the answer, because an error before them has a
        status of its own. If `keep_alive` has started the stream, the client has already
        received status 200.
        """
        head = await answer.begin()
        await keep_alive.stop()
        if answer.start.streams:
            observer.model.metrics.first_byte.labels(answer.route).observe(answer.first_byte_s)
        try:
            await self._begin(answer, head, observer, tally, keep_alive.started, send)
            if answer.start.streams:
                await self._send_rest(answer, observer, scope, send)
        finally:
            observer.keep(answer, over=True)

    async def _begin(
        self, answer: AnyAnswer, head: bytes, observer: Observer, tally: Tally, started: bool, send: Send
    ) -> None:
        """Send the headers and the first bytes of an answer.

        In a `started` stream, headers are sent as comments, and an error as the last event.
        """
        status = answer.start.status
        route, reason = (REFUSED, None) if status >= HTTPStatus.BAD_REQUEST else (answer.route, answer.local_reason)
        tally.count(route, reason, status)
        headers = [*_response_headers(answer), *await observer.response_headers(answer)]
        if not started:
            await send({"type": "http.response.start", "status": status, "headers": headers})
        elif not answer.start.streams:
            await self._refuse_late(late_error(json.loads(head), self._endpoint), status, observer.entry, send)
            return
        else:
            unsent = (header for header in headers if header[0] not in HEADERS_OF_BODY)
            head = b"".join(b": %s: %s\n\n" % header for header in unsent) + head
        await send({"type": "http.response.body", "body": head, "more_body": answer.start.streams})
        observer.keep(answer)

    async def _refuse_late(self, event: bytes, status: int, entry: AccessEntry | None, send: Send) -> None:
        """End a stream that has no tokens with an error event.

        ``status``  HTTP status that the error would have had, for the access log
        """
        if entry is not None:
            entry.answered(late_status=int(status))
        with suppress(TimeoutError):
            async with asyncio.timeout(STREAM_END_S):
                await send({"type": "http.response.body", "body": event, "more_body": False})

    async def _send_rest(self, answer: AnyAnswer, observer: Observer, scope: Scope, send: Send) -> None:
        """Send the rest of a stream. After an error, the last event is an error event."""
        last = b""
        connection: ClientWriter | None = scope.get(CONNECTION)
        through_proxy = SendWriter(send) if connection is None else None
        try:
            try:
                await answer.relay(connection or through_proxy)
            except Exception as error:
                # A client that resumes reading receives the error of its idle timeout as well.
                last = self._broken(error, observer)
            finally:
                if observer.entry is not None:
                    observer.entry.relayed(answer.sent_bytes, answer.usage)
            # After this timeout the HTTP server closes the connection.
            with suppress(TimeoutError):
                async with asyncio.timeout(STREAM_END_S):
                    if through_proxy is not None:
                        await through_proxy.drained()
                    await send({"type": "http.response.body", "body": last, "more_body": False})
        finally:
            if through_proxy is not None:
                await through_proxy.close()

    def _broken(self, error: Exception, observer: Observer) -> bytes:
        """Count and log an error after the response has started; return its error events."""
        observer.model.metrics.broken_streams.inc()
        logger.warning(
            "a stream was interrupted; ending it with an error event: %s",
            with_causes(error),
            exc_info=not isinstance(error, TandemError),
        )
        return error_event(error, self._endpoint)


def _response_headers(answer: AnyAnswer) -> list[tuple[bytes, bytes]]:
    headers = [(name, value) for name, value in answer.start.headers if name in RELAYED_HEADERS]
    if answer.start.status >= HTTPStatus.BAD_REQUEST:
        return headers  # a refused request has no route
    headers.append((ROUTE_HEADER, answer.route.encode()))
    if answer.sampled_by is not None:
        headers.append((FIRST_TOKEN_HEADER, answer.sampled_by.encode()))
    if answer.local_reason is not None:
        headers.append((LOCAL_REASON_HEADER, answer.local_reason.encode()))
    return headers
