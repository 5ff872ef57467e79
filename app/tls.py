"""TLS of the router's port: certificate files, reloaded when they change."""

import logging
import ssl
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cryptography import x509

from configs.settings import RouterSettings
from connectors.errors import ConfigurationError

logger = logging.getLogger(__name__)

Signature = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class TlsFiles:
    """PEM files of the router's port.

    ``certfile``  certificate chain, the server's certificate first
    ``keyfile``   its private key, without a passphrase
    ``ca_certs``  authorities of client certificates; None: clients need no certificate
    """

    certfile: Path
    keyfile: Path
    ca_certs: Path | None = None

    def load(self) -> ssl.SSLContext:
        """Return a context. Raises ConfigurationError that names the setting and the file."""
        certificate = _certificates("ssl_certfile", self.certfile)[0]
        _check_dates("ssl_certfile", self.certfile, certificate)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        try:
            # The empty password refuses an encrypted key; OpenSSL would ask on the terminal.
            context.load_cert_chain(self.certfile, self.keyfile, password="")
        except (OSError, ValueError) as error:
            raise ConfigurationError(
                f"router.ssl_keyfile: {self.keyfile} is not the readable, unencrypted private key of the certificate "
                f"{self.certfile}: {error}"
            ) from error
        if self.ca_certs is not None:
            _certificates("ssl_ca_certs", self.ca_certs)
            context.load_verify_locations(self.ca_certs)
            # A wrong certificate fails the handshake. The HTTP server refuses requests without one,
            # because probes have none.
            context.verify_mode = ssl.CERT_OPTIONAL
        return context

    def expires_at(self) -> datetime:
        """Return the end of the server certificate. Raises ConfigurationError."""
        return _certificates("ssl_certfile", self.certfile)[0].not_valid_after_utc

    def signature(self) -> Signature:
        """Return a value that changes when a file is written or replaced. Raises OSError."""
        files = (self.certfile, self.keyfile, *([self.ca_certs] if self.ca_certs else ()))
        return tuple((found.st_ino, found.st_mtime_ns, found.st_size) for found in (file.stat() for file in files))


def server_context(files: TlsFiles) -> ssl.SSLContext:
    """Return a context that loads changed files at the next handshake. Raises ConfigurationError.

    Files that cannot be loaded, for example half of a rotation, leave the previous ones in use.
    """
    outer = files.load()
    current, loaded = outer, _signature(files)

    def choose(connection: Any, _name: str | None, _context: ssl.SSLContext) -> None:
        nonlocal current, loaded
        found = _signature(files)
        if found != loaded:
            loaded = found
            try:
                current = files.load()
                logger.info("loaded the new TLS certificate %s", files.certfile)
            except ConfigurationError as error:
                logger.error("the previous TLS certificate stays in use: %s", error)
        connection.context = current

    # OpenSSL calls it for each handshake, also without a server name.
    outer.sni_callback = choose
    return outer


def _signature(files: TlsFiles) -> Signature | None:
    try:
        return files.signature()
    except OSError:
        return None


def _certificates(setting: str, file: Path) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(file.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"router.{setting}: {file} has no readable PEM certificate: {error}") from error


def _check_dates(setting: str, file: Path, certificate: x509.Certificate) -> None:
    now = datetime.now(UTC)
    start, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if now > end:
        raise ConfigurationError(f"router.{setting}: {file} expired at {end:%Y-%m-%d %H:%M} UTC; renew it")
    if now < start:
        raise ConfigurationError(
            f"router.{setting}: {file} is valid from {start:%Y-%m-%d %H:%M} UTC only; check the clock"
        )


def router_files(settings: RouterSettings) -> TlsFiles | None:
    """Return the files of `settings`, or None without TLS."""
    if settings.ssl_certfile is None or settings.ssl_keyfile is None:
        return None
    ca_certs = None if settings.ssl_ca_certs is None else Path(settings.ssl_ca_certs)
    return TlsFiles(Path(settings.ssl_certfile), Path(settings.ssl_keyfile), ca_certs)


def unverified_context() -> ssl.SSLContext:
    """Return a client context for questions to this machine's own routers, which carry no secret.

    Their certificate names the service's public address, not this one.
    """
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context
