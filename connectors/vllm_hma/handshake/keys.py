"""Keys derived from the shared secret: one for message tags, one for TLS on the side channel.

Pure computation. The derivation is deliberately slow (scrypt, about 50 ms): an engine sends the
public key of its TLS certificate to any client, which could otherwise guess a weak secret from it.
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
    """Keys of 32 bytes each.

    ``messages``  key of the tags of messages between workers
    ``identity``  private key of the TLS certificate on the side channel

    Both are empty without a secret: the engine then accepts every client as a peer.
    """

    messages: bytes = field(default=b"", repr=False)
    identity: bytes = field(default=b"", repr=False)


@cache
def derive_keys(secret: str) -> Keys:
    """Return the keys for ``secret``; empty keys for an empty secret.

    Raises ConfigurationError for a secret of fewer than MIN_SECRET_CHARACTERS characters.
    """
    if not secret:
        return Keys()
    if len(secret) < MIN_SECRET_CHARACTERS:
        raise ConfigurationError(
            f"transfer.secret (kv_connector_extra_config: secret) has {len(secret)} characters, at least "
            f"{MIN_SECRET_CHARACTERS} are required; create one with `openssl rand -hex 32`"
        )
    material = hashlib.scrypt(secret.encode(), salt=_PURPOSE, n=2**14, r=8, p=1, dklen=64)
    return Keys(material[:32], material[32:])
