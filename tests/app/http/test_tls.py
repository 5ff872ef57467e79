"""TLS of the router's port: real handshakes, with certificates created by each test."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from actors.tls import TlsFiles
from app.doctor.machine import check_tls
from app.http.http_server import SERVICE_PATH, HttpServer
from app.main import build
from configs.settings.parsing import parse_settings
from connectors.errors import ConfigurationError
from testing.certificates import Authority
from testing.ports import free_port
from tests.app.http.servers import HOST, Behind


@pytest.fixture
def ours(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "ours")


@pytest.fixture
def foreign(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "foreign")


@asynccontextmanager
async def served(files: TlsFiles, port: int) -> AsyncGenerator[str, None]:
    server = HttpServer(Behind("router").app, HOST, port, 0.1, "ours", tls=files)
    await server.open()
    try:
        yield f"https://localhost:{port}"
    finally:
        await server.close()


async def get(url: str, ca: Path, own: tuple[Path, Path] | None = None) -> httpx.Response:
    context = ssl.create_default_context(cafile=str(ca))
    if own is not None:
        context.load_cert_chain(*own)
    async with httpx.AsyncClient(verify=context, timeout=60) as client:
        return await client.get(url)


async def answer(port: int, ca: Path, own: tuple[Path, Path]) -> bytes:
    """Return the answer to a request; empty if the router closes the connection.

    TLS 1.3 reports a refused client certificate after the client's part of the handshake.
    """
    context = ssl.create_default_context(cafile=str(ca))
    context.load_cert_chain(*own)
    async with asyncio.timeout(60):
        reader, writer = await asyncio.open_connection(HOST, port, ssl=context, server_hostname="localhost")
        try:
            writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            return await reader.read()
        except OSError:  # also an SSLError
            return b""
        finally:
            writer.close()


async def test_clients_verify_the_router(ours: Authority, foreign: Authority) -> None:
    """The second router of the port requests the first one's service id over TLS."""
    files, port = TlsFiles(*ours.issue("router")), free_port()
    async with served(files, port) as url, served(files, port):
        assert (await get(url, ours.file)).text == "router"
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            await get(url, foreign.file)
        with pytest.raises(httpx.HTTPError):
            await get(url.replace("https", "http"), ours.file)


async def test_changed_files_are_used_by_the_next_connection(ours: Authority, foreign: Authority) -> None:
    files = TlsFiles(*ours.issue("router"))
    async with served(files, free_port()) as url:
        assert (await get(url, ours.file)).text == "router"
        foreign.issue("router")
        assert (await get(url, foreign.file)).text == "router"
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            await get(url, ours.file)
        files.keyfile.write_text("half of a rotation")
        assert (await get(url, foreign.file)).text == "router"


async def test_client_certificates(ours: Authority, foreign: Authority) -> None:
    """Wrong and expired ones fail the handshake; without one, only probes are answered."""
    own, client, expired = ours.issue("router"), ours.issue("client"), ours.issue("expired", days=-1)
    wrong = foreign.issue("client of another")
    async with served(TlsFiles(*own, ca_certs=ours.file), free_port()) as url:
        assert (await get(f"{url}/slow2", ours.file, client)).status_code == 404
        assert (await get(url + SERVICE_PATH, ours.file)).status_code == 200
        assert (await get(url, ours.file)).text == "router"
        refused = await get(f"{url}/slow2", ours.file)
        assert refused.status_code == 403
        assert refused.json()["error"]["message"] == "a client certificate is required; connect with one"
        port = int(url.rpartition(":")[2])
        assert b"router" in await answer(port, ours.file, client)
        assert await answer(port, ours.file, expired) == b""
        assert await answer(port, ours.file, wrong) == b""


def test_files_that_cannot_be_used(ours: Authority, tmp_path: Path) -> None:
    """The router's start and the doctor name the setting of an unusable file."""
    certificate, key = ours.issue("router")
    other = ours.issue("other")[1]
    revoked = tmp_path / "revoked.crt"
    revoked.write_text(ours.file.read_text() + "-----BEGIN X509 CRL-----\nAAAA\n-----END X509 CRL-----\n")
    for wrong, message in (
        (TlsFiles(*ours.issue("old", days=-1)), "router.ssl_certfile: .*old.crt expired at "),
        (TlsFiles(certificate, other), "router.ssl_keyfile: .*other.key is not .* of the certificate .*router.crt"),
        (TlsFiles(tmp_path / "none", key), "router.ssl_certfile: .*none has no readable PEM certificate"),
        (TlsFiles(certificate, tmp_path / "none"), "router.ssl_keyfile: .*none is not"),
        (TlsFiles(certificate, key, key), "router.ssl_ca_certs: .*router.key has no readable PEM certificate"),
        (TlsFiles(certificate, key, revoked), "router.ssl_ca_certs: .*revoked.crt cannot be loaded"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            wrong.load()
    for days, key_file, remedy in ((10, None, ""), (2, None, "renew it"), (10, other, "renew or replace the files")):
        own = ours.issue("router", days)
        settings = parse_settings({"router": {"ssl_certfile": str(own[0]), "ssl_keyfile": str(key_file or own[1])}})
        (found,) = check_tls({"proxy_location": "Disabled"}, settings)
        assert found.remedy == remedy
        assert [one.ok for one in check_tls({}, settings)] == [True, not remedy]
    both = {"certfile": str(certificate), "keyfile": str(other), "ca_certs": str(ours.file)}
    (found,) = check_tls({}, parse_settings({"rpc_tls": both}))
    assert found.what.startswith("rpc_tls.keyfile: ")


def test_the_build_and_the_doctor_report_what_serves_proxy_refuses(caplog: pytest.LogCaptureFixture) -> None:
    router = {"ssl_certfile": "/tls/a", "ssl_keyfile": "/tls/b", "ssl_ca_certs": "/tls/c", "http_port": 8443}
    build(parse_settings({"router": router}))
    reported = [caplog.messages[-1], next(iter(check_tls({}, parse_settings({"router": router})))).what]
    assert all("TLS and a client certificate, so Ray Serve's proxy answers only" in one for one in reported)
    assert all("router's port 8443 " in one for one in reported)
