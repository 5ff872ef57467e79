"""Decode large JSON bodies in a thread.

A thread alone does not help: the C scanner of `json` holds the GIL for a whole body. So large
bodies are decoded with hooks for objects and numbers, written in Python. The interpreter may switch
threads when the scanner calls a hook.
"""

import asyncio
import json
from collections.abc import Callable
from typing import Any, TypeVar

OFF_LOOP_BYTES = 256 * 2**10
"""Size in bytes above which a body is decoded in a thread."""

Decoded = TypeVar("Decoded")


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


def _object(fields: dict[str, Any]) -> dict[str, Any]:
    return fields


def _int(digits: str) -> int:
    return int(digits)


def _float(digits: str) -> float:
    return float(digits)
