"""Certificates for tests of TLS, signed by authorities that the tests create."""

from __future__ import annotations

import datetime
import inspect
from dataclasses import dataclass, field
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

NOW = datetime.datetime.now(datetime.UTC)


class MonthsAgo(datetime.datetime):
    """A clock that is behind the beginning of all certificates of `Authority`."""

    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> MonthsAgo:
        return super().now(tz) - datetime.timedelta(days=90)


NO_USES = dict.fromkeys(inspect.signature(x509.KeyUsage).parameters, False)


def named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])


@dataclass
class Authority:
    """A certificate authority that writes its certificates to `folder`."""

    folder: Path
    name: str
    key: ec.EllipticCurvePrivateKey = field(default_factory=lambda: ec.generate_private_key(ec.SECP256R1()))

    @property
    def file(self) -> Path:
        return self._write(self.name, self.name, self.key, 10)[0]

    def issue(self, name: str, days: float = 10) -> tuple[Path, Path]:
        """Issue a certificate that is valid for `days` days from now, or expired if negative.

        Return the paths of the certificate and its key.
        """
        return self._write(name, self.name, ec.generate_private_key(ec.SECP256R1()), days)

    def _write(self, name: str, issuer: str, key: ec.EllipticCurvePrivateKey, days: float) -> tuple[Path, Path]:
        builder = x509.CertificateBuilder(named(issuer), named(name), key.public_key(), x509.random_serial_number())
        builder = builder.not_valid_before(NOW - datetime.timedelta(days=30))
        builder = builder.not_valid_after(NOW + datetime.timedelta(days=days))
        builder = builder.add_extension(x509.BasicConstraints(ca=name == issuer, path_length=None), critical=True)
        builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        # Python 3.13 refuses certificates without these three (VERIFY_X509_STRICT).
        builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        authority = x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key())
        builder = builder.add_extension(authority, critical=False)
        used = "key_cert_sign" if name == issuer else "digital_signature"
        builder = builder.add_extension(x509.KeyUsage(**NO_USES | {used: True}), critical=True)
        files = self.folder / f"{name}.crt", self.folder / f"{name}.key"
        for file in files:
            file.unlink(missing_ok=True)  # new inodes: on old kernels, two writes may have equal modification times
        files[0].write_bytes(builder.sign(self.key, SHA256()).public_bytes(Encoding.PEM))
        files[1].write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        return files
