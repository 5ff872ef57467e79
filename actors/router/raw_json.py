"""Fields of a JSON body kept as the client wrote them, so that a leg can be written without
encoding the prompt again.

The legs differ from the client's request in a few short fields. A long prompt is copied, not parsed
and encoded anew, so that the engine reads the same numbers and strings as without a router.
"""

import json
from collections.abc import Mapping
from typing import Any

import msgspec

_DECODER = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ENCODER = msgspec.json.Encoder()


def as_written(raw: bytes, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `body`, which was parsed from `raw`, with values that `write` copies
    unchanged."""
    try:
        return _DECODER.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return dict(body)  # msgspec refuses NaN, UTF-16 and lone surrogates, which Python and the engines accept


def write(fields: Mapping[str, Any]) -> bytes:
    """Return a JSON object of these fields, which may mix values of `as_written` and plain ones."""
    if any(isinstance(value, msgspec.Raw) for value in fields.values()):
        return _ENCODER.encode(fields)
    return json.dumps(fields).encode()
