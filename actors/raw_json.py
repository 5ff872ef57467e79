"""Copy fields of a JSON body unchanged, so that the prompt is not encoded again for each engine.

The copy also preserves the client's encoding of numbers and strings.
"""

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from actors.large_json import loads

_DECODER = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ENCODER = msgspec.json.Encoder()


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
