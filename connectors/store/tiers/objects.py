"""File format of a stored object: a header of 112 bytes, then the payload. Little endian.

    magic, version, header bytes   8 + 2 + 2
    group                          4
    namespace, key                 16 + 32   must equal the requested name
    payload bytes, end token       8 + 8     the file ends with the payload
    payload digest, header digest  16 + 16   xxh3_128; the header digest covers all fields before it

A lookup checks the header; a read checks header and payload before a request uses the object.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import xxhash

from connectors.errors import CorruptObjectError
from connectors.store.keys.names import FORMAT, KEY_BYTES, NAMESPACE_BYTES

MAGIC = b"TandemKV"
_FIELDS = struct.Struct(f"<8sHHI{NAMESPACE_BYTES}s{KEY_BYTES}sQQ16s")
HEADER_BYTES = _FIELDS.size + 16

PayloadDigest = xxhash.xxh3_128


@dataclass(frozen=True, slots=True)
class ObjectName:
    """Name of an object: ``key`` in the namespace ``space``.

    ``group``      KV cache group, for people who inspect files
    ``end_token``  number of tokens up to the object's end; orders evictions
    """

    space: bytes
    key: bytes
    group: int = 0
    end_token: int = 0

    @property
    def path(self) -> tuple[str, str]:
        return self.space.hex(), self.key.hex()


def encode_header(name: ObjectName, payload: memoryview) -> bytes:
    sizes = MAGIC, FORMAT, HEADER_BYTES, name.group, name.space, name.key, payload.nbytes, name.end_token
    fields = _FIELDS.pack(*sizes, PayloadDigest(payload).digest())
    return fields + xxhash.xxh3_128_digest(fields)


def check_header(data: bytes, file_bytes: int, path: tuple[str, str]) -> bytes:
    """Return the payload's digest from the first bytes of a file of ``file_bytes``.

    Raises CorruptObjectError unless the file is the object at ``path`` (``ObjectName.path``).
    """
    if len(data) < HEADER_BYTES:
        raise CorruptObjectError(f"the file has only {len(data)} of the {HEADER_BYTES} bytes of a header")
    magic, version, header_bytes, _, space, key, payload_bytes, _, digest = _FIELDS.unpack_from(data)
    if magic != MAGIC or version != FORMAT or header_bytes != HEADER_BYTES:
        raise CorruptObjectError(f"the file begins with {data[:12]!r} and is not an object of format {FORMAT}")
    if xxhash.xxh3_128_digest(data[: _FIELDS.size]) != data[_FIELDS.size : HEADER_BYTES]:
        raise CorruptObjectError("the file's header has changed since it was written")
    if file_bytes != HEADER_BYTES + payload_bytes:
        raise CorruptObjectError(
            f"the file has {file_bytes} bytes, but its header states {HEADER_BYTES + payload_bytes}"
        )
    if (space.hex(), key.hex()) != path:
        raise CorruptObjectError("the file contains another object: it was moved or copied here")
    return bytes(digest)
