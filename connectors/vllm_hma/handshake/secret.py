"""The secret that engines share: keys of message tags, and TLS between engines.

The derivation is deliberately slow (scrypt, about 50 ms): an engine sends the public key of its TLS
certificate to any client, which could otherwise guess a weak secret from it.

Both ends of a TLS connection present and accept one certificate only. Its private key derives from
the secret, and all else in it is constant: a peer that completes the handshake has the secret.
"""

from __future__ import annotations

import datetime
import hashlib
import os
import ssl
from dataclasses import dataclass, field
from functools import cache

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from connectors.errors import ConfigurationError
from connectors.vllm_hma.settings import MIN_SECRET_CHARACTERS

_PURPOSE = b"tandem peers 1"


@dataclass(frozen=True, slots=True)
class Keys:
    """32 bytes each; empty without a secret: the engine then accepts every client as a peer.

    ``messages``  key of the tags of messages between workers
    ``identity``  private key of the TLS certificate on the side channel
    """

    messages: bytes = field(default=b"", repr=False)
    identity: bytes = field(default=b"", repr=False)


@cache
def derive_keys(secret: str) -> Keys:
    """Raises ConfigurationError for a short secret."""
    if not secret:
        return Keys()
    if len(secret) < MIN_SECRET_CHARACTERS:
        raise ConfigurationError(
            f"transfer.secret (kv_connector_extra_config: secret) has {len(secret)} characters, at least "
            f"{MIN_SECRET_CHARACTERS} are required; create one with `openssl rand -hex 32`"
        )
    material = hashlib.scrypt(secret.encode(), salt=_PURPOSE, n=2**14, r=8, p=1, dklen=64)
    return Keys(material[:32], material[32:])


_NAME = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "tandem engine")])
# X.509 requires dates. These are valid for any time on an engine's clock.
_FROM, _UNTIL = datetime.datetime(2000, 1, 1), datetime.datetime(9999, 12, 31)


def tls_context(identity: bytes, server: bool) -> ssl.SSLContext:
    """``identity`` is ``Keys.identity`` of both ends."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    # No session tickets: a resumed session would not prove that the peer has the secret.
    context.options |= ssl.OP_NO_TICKET
    if server:
        context.num_tickets = 0
    private = Ed25519PrivateKey.from_private_bytes(identity)
    certificate = _certificate(private)
    context.load_verify_locations(cadata=certificate.decode())
    _load(context, certificate + private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return context


def _certificate(private: Ed25519PrivateKey) -> bytes:
    """Equal keys give equal bytes: Ed25519 is deterministic."""
    builder = x509.CertificateBuilder().subject_name(_NAME).issuer_name(_NAME).serial_number(1)
    builder = builder.public_key(private.public_key()).not_valid_before(_FROM).not_valid_after(_UNTIL)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    return builder.sign(private, None).public_bytes(Encoding.PEM)


def _load(context: ssl.SSLContext, chain: bytes) -> None:
    """``ssl`` reads a certificate and its key from files only, such as this one in memory."""
    file = os.memfd_create("tandem-identity", os.MFD_CLOEXEC)
    try:
        os.write(file, chain)
        context.load_cert_chain(f"/proc/self/fd/{file}")
    finally:
        os.close(file)
