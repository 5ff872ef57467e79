"""JSON bodies: large ones are decoded in a thread, and fields are copied as the client wrote them.

A thread alone does not help: the C scanner of `json` holds the GIL for a whole body. So large
bodies are decoded with hooks for objects and numbers, written in Python. The interpreter may switch
threads when the scanner calls a hook. A copied prompt is not encoded again for each engine, and
numbers and strings keep the client's encoding.
"""

import asyncio
import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request

OFF_LOOP_BYTES = 256 * 2**10
"""Size in bytes above which a body is decoded in a thread."""

Decoded = TypeVar("Decoded")

_DECODER = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ENCODER = msgspec.json.Encoder()


def loads(raw: bytes) -> Any:
    """Decode JSON as `json.loads` does, with the same errors.

    While `raw` of more than OFF_LOOP_BYTES is decoded, other threads can run at each object and
    number.
    """
    if len(raw) <= OFF_LOOP_BYTES:
        return json.loads(raw)
    return json.loads(raw, object_hook=_object, parse_int=_int, parse_float=_float)


async def off_loop(body_bytes: int, decode: Callable[[], Decoded]) -> Decoded:
    """Return the result of `decode`; run it in a thread if `body_bytes` exceeds OFF_LOOP_BYTES."""
    return decode() if body_bytes <= OFF_LOOP_BYTES else await asyncio.to_thread(decode)


def as_written(raw: bytes) -> dict[str, Any]:
    """Return the fields of the JSON object `raw` with values that `write` copies unchanged.

    Returns parsed values if msgspec cannot decode `raw`.
    """
    try:
        return _DECODER.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return dict(loads(raw))  # msgspec refuses NaN, UTF-16 and lone surrogates, which Python and the engines accept


def write(fields: Mapping[str, Any]) -> bytes:
    """Return a JSON object of these fields; values may be from `as_written` or plain."""
    if any(isinstance(value, msgspec.Raw) for value in fields.values()):
        return _ENCODER.encode(fields)
    return json.dumps(fields).encode()


def decode_large_bodies_off_loop() -> None:
    """Make the applications of this process decode large bodies in a thread.

    FastAPI awaits Starlette's `Request.json` for each JSON body (`get_request_handler` in
    fastapi/routing.py), which decodes it on the event loop and so delays all streams of an engine.
    """
    on_loop = Request.json

    async def decoded(request: Request) -> Any:
        body = await request.body()
        if len(body) <= OFF_LOOP_BYTES:
            return await on_loop(request)
        return await off_loop(len(body), partial(loads, body))

    Request.json = decoded  # type: ignore[method-assign,assignment]


def _object(fields: dict[str, Any]) -> dict[str, Any]:
    return fields


def _int(digits: str) -> int:
    return int(digits)


def _float(digits: str) -> float:
    return float(digits)
