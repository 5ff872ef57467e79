"""Relay requests without a body to a decode engine.

They concern models, vLLM's version, the tokenizer, and stored responses.
"""

import logging
from http import HTTPStatus
from urllib.parse import quote

from starlette.requests import ClientDisconnect, Request
from starlette.types import Message, Receive, Scope, Send

from actors.errors import with_causes
from actors.request import Call
from actors.router.router import Router
from app.http.client_writer import until_disconnect
from app.http.errors import error_event, error_response, status_of
from app.http.generate import RELAYED_HEADERS
from app.http.parsing import forwarded_headers, path_of

logger = logging.getLogger(__name__)


class FromDecode:
    """ASGI endpoint that relays the answer of a decode engine (`Router.ask_decode`)."""

    def __init__(self, router: Router) -> None:
        self._router = router

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope)
        path = quote(path_of(scope))
        query = scope["query_string"].decode("latin-1")
        call = Call(request.method, f"{path}?{query}" if query else path, forwarded_headers(request))
        has_begun = False

        async def relay(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await until_disconnect(scope, receive, self._relay(call, relay))
        except ClientDisconnect:
            return
        except Exception as error:
            if status_of(error) is HTTPStatus.INTERNAL_SERVER_ERROR:
                logger.exception("%s %s failed", request.method, path)
            if not has_begun:
                await error_response(error, self._router.limits.retry_after_s)(scope, receive, send)
                return
            logger.warning(
                "the stream of a stored response was interrupted; ending it with an error event: %s", with_causes(error)
            )
            await send({"type": "http.response.body", "body": error_event(error, "/v1/responses"), "more_body": False})

    async def _relay(self, call: Call, send: Send) -> None:
        async with self._router.ask_decode(call) as (start, body):
            headers = [(name, value) for name, value in start.headers if name in RELAYED_HEADERS]
            head = {"type": "http.response.start", "status": start.status, "headers": headers}
            if start.streams:
                await send(head)
                async for piece in body:
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
                last = b""
            else:
                last = b"".join([piece async for piece in body])
                await send(head)
            await send({"type": "http.response.body", "body": last, "more_body": False})
