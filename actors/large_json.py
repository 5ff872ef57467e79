"""Decodes large JSON bodies beside the event loop.

A thread alone does not help: the scanner of `json` keeps the interpreter's lock for a whole body.
It calls hooks written in Python, and in each call the interpreter may switch threads.
"""

import asyncio
import json
from collections.abc import Callable
from typing import Any, TypeVar

OFF_LOOP_BYTES = 256 * 2**10
"""Size above which a body is decoded in a thread."""

Decoded = TypeVar("Decoded")


def loads(raw: bytes) -> Any:
    """Return what `json.loads` returns; other threads run meanwhile if `raw` is large."""
    if len(raw) <= OFF_LOOP_BYTES:
        return json.loads(raw)
    return json.loads(raw, object_hook=_object, parse_int=_int, parse_float=_float)


async def off_loop(body_bytes: int, decode: Callable[[], Decoded]) -> Decoded:
    """Return the result of `decode`, which runs in a thread if the body is large."""
    return decode() if body_bytes <= OFF_LOOP_BYTES else await asyncio.to_thread(decode)


def _object(fields: dict[str, Any]) -> dict[str, Any]:
    return fields


def _int(digits: str) -> int:
    return int(digits)


def _float(digits: str) -> float:
    return float(digits)
