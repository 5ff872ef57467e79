"""Keys from the secret that peers share: one signs messages, the other identifies an engine on the side channel.

Pure computation. The derivation is deliberately slow (scrypt, about 50 ms): an engine shows a stranger the public half
of its identity, from which a secret that a person made up could otherwise be guessed.
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
    """32 bytes each, or none where peers share no secret: then anybody who can connect is a peer."""

    messages: bytes = field(default=b"", repr=False)
    identity: bytes = field(default=b"", repr=False)


@cache
def derive_keys(secret: str) -> Keys:
    """Keys for ``secret``; none for an empty one. Raises ConfigurationError for one that could be guessed."""
    if not secret:
        return Keys()
    if len(secret) < MIN_SECRET_CHARACTERS:
        raise ConfigurationError(
            f"the secret has {len(secret)} characters; peers need one of at least {MIN_SECRET_CHARACTERS}, "
            "for example from `openssl rand -hex 32`"
        )
    material = hashlib.scrypt(secret.encode(), salt=_PURPOSE, n=2**14, r=8, p=1, dklen=64)
    return Keys(material[:32], material[32:])
