"""The fields of a request's body, each as its client wrote it, to be written again beside others.

A request's legs differ from the request by a few short fields. Its prompt, which may be long, is neither written anew
for each of them nor changed: an engine reads the same numbers and texts as without a router.
"""

import json
from collections.abc import Mapping
from typing import Any

import msgspec

_DECODER = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ENCODER = msgspec.json.Encoder()


def as_written(raw: bytes, body: Mapping[str, Any]) -> dict[str, Any]:
    """`body`, which is what Python reads in `raw`, with values that `write` writes as they stand there."""
    try:
        return _DECODER.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return dict(body)  # it is stricter than Python, and than the engines' servers: of NaN, UTF-16, half surrogates


def write(fields: Mapping[str, Any]) -> bytes:
    """A JSON object with these fields: all of a body `as_written`, or some, and others."""
    if any(isinstance(value, msgspec.Raw) for value in fields.values()):
        return _ENCODER.encode(fields)
    return json.dumps(fields).encode()
