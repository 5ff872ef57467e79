"""TLS contexts of the router's port and of connections to engines; reloads changed files."""

import logging
import ssl
import urllib.request
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cryptography import x509

from configs.settings.router import RouterSettings
from configs.settings.service import ServiceSettings
from connectors.errors import ConfigurationError

logger = logging.getLogger(__name__)

Signature = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class TlsFiles:
    """PEM files of one side of a connection.

    ``certfile``  certificate chain, this side's certificate first
    ``keyfile``   its private key, without a passphrase
    ``ca_certs``  authorities of the other side's certificate; None: clients need no certificate
    ``mutual``    whether a client without a certificate fails the handshake
    ``prefix``    prefix of setting names in errors
    """

    certfile: Path
    keyfile: Path
    ca_certs: Path | None = None
    mutual: bool = False
    prefix: str = "router.ssl_"

    def load(self, client: bool = False) -> ssl.SSLContext:
        """Return the TLS context of a server, or of a client if `client` is true.

        Raises ConfigurationError with the names of the setting and the file, if a file cannot be
        read or used, or if the certificate has expired or is not valid yet.
        """
        _check_dates(f"{self.prefix}certfile", self.certfile, self._own_certificate())
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT if client else ssl.PROTOCOL_TLS_SERVER)
        # Routers connect to engines by address, which certificates need not contain; the CA
        # authenticates engines.
        context.check_hostname = False
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if not self.mutual:
            context.set_alpn_protocols(["http/1.1"])
        try:
            # With an empty password an encrypted key fails to load. Without a password, OpenSSL
            # would ask for one on the terminal.
            context.load_cert_chain(self.certfile, self.keyfile, password="")
        except (OSError, ValueError) as error:
            raise ConfigurationError(
                f"{self.prefix}keyfile: {self.keyfile} is not the readable, unencrypted private key of the certificate "
                f"{self.certfile}: {error}"
            ) from error
        if self.ca_certs is not None:
            _certificates(f"{self.prefix}ca_certs", self.ca_certs)
            try:
                context.load_verify_locations(self.ca_certs)
            except OSError as error:  # OpenSSL also reads CRLs and keys in the file
                raise ConfigurationError(
                    f"{self.prefix}ca_certs: {self.ca_certs} cannot be loaded; it must contain PEM certificates of "
                    f"authorities only: {error}"
                ) from error
            # CERT_OPTIONAL is for clients of the router's port: an invalid certificate fails the
            # handshake, a missing one does not, because probes have none. The HTTP server refuses
            # other requests without a certificate.
            context.verify_mode = ssl.CERT_REQUIRED if client or self.mutual else ssl.CERT_OPTIONAL
        return context

    def _own_certificate(self) -> x509.Certificate:
        return _certificates(f"{self.prefix}certfile", self.certfile)[0]

    def expires_at(self) -> datetime:
        """Return the certificate's expiry time in UTC."""
        return self._own_certificate().not_valid_after_utc

    def signature(self) -> Signature:
        files = (self.certfile, self.keyfile, *([self.ca_certs] if self.ca_certs else ()))
        return tuple((found.st_ino, found.st_mtime_ns, found.st_size) for found in (file.stat() for file in files))


class ReloadedTls:
    """TLS context of files that may change.

    If changed files cannot be loaded, for example during a rotation or before the certificate is
    valid, the previous context stays in use. `context` tries to load them again at each call.
    """

    def __init__(self, files: TlsFiles, client: bool = True) -> None:
        """Load the files. Raises ConfigurationError if they cannot be loaded."""
        self._files = files
        self._client = client
        self._loaded = _signature(files)
        self._context = files.load(client)
        self._problem = ""
        """Last logged error of files that cannot be loaded; empty after a successful load."""

    def context(self) -> ssl.SSLContext:
        if (found := _signature(self._files)) != self._loaded:
            try:
                self._context = self._files.load(self._client)
            except ConfigurationError as error:
                if str(error) != self._problem:
                    self._problem = str(error)
                    logger.error("cannot load the changed TLS files, so the previous ones stay in use: %s", error)
            else:
                self._loaded, self._problem = found, ""
                logger.info("loaded the new TLS certificate %s", self._files.certfile)
        return self._context


def server_context(files: TlsFiles) -> ssl.SSLContext:
    """Return a server's context; each handshake uses the current files (`ReloadedTls`).

    Raises ConfigurationError if the files cannot be loaded now.
    """
    current = ReloadedTls(files, client=False)
    outer = current.context()

    def choose(connection: Any, _name: str | None, _context: ssl.SSLContext) -> None:
        connection.context = current.context()

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
        raise ConfigurationError(f"{setting}: {file} has no readable PEM certificate: {error}") from error


def _check_dates(setting: str, file: Path, certificate: x509.Certificate) -> None:
    now = datetime.now(UTC)
    start, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if now > end:
        raise ConfigurationError(f"{setting}: {file} expired at {end:%Y-%m-%d %H:%M} UTC; renew it")
    if now < start:
        raise ConfigurationError(f"{setting}: {file} is not valid before {start:%Y-%m-%d %H:%M} UTC; check the clock")


def router_files(settings: RouterSettings) -> TlsFiles | None:
    if settings.ssl_certfile is None or settings.ssl_keyfile is None:
        return None
    ca_certs = None if settings.ssl_ca_certs is None else Path(settings.ssl_ca_certs)
    return TlsFiles(Path(settings.ssl_certfile), Path(settings.ssl_keyfile), ca_certs)


def rpc_files(settings: ServiceSettings) -> TlsFiles | None:
    own = settings.rpc_tls
    if own is None:
        return None
    return TlsFiles(Path(own.certfile), Path(own.keyfile), Path(own.ca_certs), mutual=True, prefix="rpc_tls.")


def local_opener() -> urllib.request.OpenerDirector:
    """Return an opener for requests to routers at a local address: no proxy, no verification.

    The environment's proxy (`http_proxy`) does not reach this machine's loopback. A router's
    certificate is for the service's public address, so verification would fail. These requests
    contain no secret.
    """
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    handlers = urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
    return urllib.request.build_opener(*handlers)
