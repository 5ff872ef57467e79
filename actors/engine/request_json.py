"""Make the engine's HTTP application decode large JSON bodies in a thread.

FastAPI awaits `Request.json` for each JSON body (`get_request_handler` in fastapi/routing.py).
Starlette's `Request.json` decodes the body on the event loop and so delays all streams of the
engine.
"""

from functools import partial
from typing import Any

from starlette.requests import Request

from actors.large_json import OFF_LOOP_BYTES, loads, off_loop

_on_loop = Request.json


async def _json(request: Request) -> Any:
    body = await request.body()
    if len(body) <= OFF_LOOP_BYTES:
        return await _on_loop(request)
    return await off_loop(len(body), partial(loads, body))


def decode_large_bodies_off_loop() -> None:
    Request.json = _json  # type: ignore[method-assign,assignment]
