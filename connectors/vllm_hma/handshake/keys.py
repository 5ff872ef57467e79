"""Keys derived from the shared secret: one signs messages, the other identifies an engine on the side channel.

Pure computation. The derivation is deliberately slow (scrypt, about 50 ms): an engine sends the public half of its
identity to any client, which could otherwise guess a weak secret from it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import cache

from connectors.errors import ConfigurationError

MIN_SECRET_CHARACTERS = 16
_PURPOSE = b"tandem peers 1"


@dataclass(frozen=True, slots=True)
class Keys:
    """Keys of 32 bytes each, or empty without a shared secret: then every client that can connect is a peer."""

    messages: bytes = field(default=b"", repr=False)
    identity: bytes = field(default=b"", repr=False)


@cache
def derive_keys(secret: str) -> Keys:
    """Return the keys for ``secret``; empty keys for an empty one. Raises ConfigurationError for a short one."""
    if not secret:
        return Keys()
    if len(secret) < MIN_SECRET_CHARACTERS:
        raise ConfigurationError(
            f"the secret has {len(secret)} characters; peers need one of at least {MIN_SECRET_CHARACTERS}, "
            "for example from `openssl rand -hex 32`"
        )
    material = hashlib.scrypt(secret.encode(), salt=_PURPOSE, n=2**14, r=8, p=1, dklen=64)
    return Keys(material[:32], material[32:])
