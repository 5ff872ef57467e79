"""Mutual TLS between routers and engines: real handshakes on both kinds of event loop."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

import actors.tls
from actors.errors import EngineDownError
from actors.rpc.address import RpcAddress
from actors.rpc.client import Channels
from actors.rpc.server import RpcServer
from actors.tls import ReloadedTls, TlsFiles, server_context
from testing.certificates import Authority, MonthsAgo
from tests.actors.rpc.world import WAIT_S, Served


@pytest.fixture
def ours(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "ours")


@pytest.fixture
def foreign(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "foreign")


def files(authority: Authority, name: str, trusted: Authority, days: float = 10) -> TlsFiles:
    return TlsFiles(*authority.issue(name, days), trusted.file, mutual=True, prefix="rpc_tls.")


@asynccontextmanager
async def listening(own: ssl.SSLContext | None) -> AsyncGenerator[tuple[RpcServer, RpcAddress], None]:
    async def double(number: int) -> int:
        return 2 * number

    server = RpcServer(Served(), slots=2, methods={"double": double})
    try:
        yield server, await server.open("127.0.0.1", 0, own)
    finally:
        await server.close()


async def ask(address: RpcAddress, tls: ReloadedTls | None) -> int:
    channels = Channels(tls)
    try:
        async with asyncio.timeout(WAIT_S):
            return await channels.to(address).ask("double", 21)
    finally:
        channels.close()


@pytest.mark.parametrize("which", ["foreign router", "foreign engine", "expired router", "no certificate", "no TLS"])
async def test_refused(ours: Authority, foreign: Authority, which: str) -> None:
    """The call fails at once, no call reaches the engine, and no connection stays."""
    engine = server_context(files(foreign if which == "foreign engine" else ours, "engine", ours))
    router: ReloadedTls | None = None
    if which != "no TLS":
        router = ReloadedTls(files(foreign if which == "foreign router" else ours, "router", ours))
    if which == "expired router":
        router = Presenting(files(ours, "router", ours, days=10), ours.issue("expired", days=-1))
    if which == "no certificate":
        router = Presenting(files(ours, "router", ours), None)
    async with listening(engine) as (server, address):
        with pytest.raises(EngineDownError):
            await ask(address, router)
        async with asyncio.timeout(WAIT_S):
            while server._connections:  # noqa: ASYNC110, SLF001
                await asyncio.sleep(0.01)


class Presenting(ReloadedTls):
    """A router that presents a certificate which it would refuse to load itself, or none."""

    def __init__(self, trusting: TlsFiles, own: tuple[Path, Path] | None) -> None:
        self._bad = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self._bad.check_hostname = False
        assert trusting.ca_certs is not None
        self._bad.load_verify_locations(trusting.ca_certs)
        if own is not None:
            self._bad.load_cert_chain(*own)

    def context(self) -> ssl.SSLContext:
        return self._bad


async def test_a_router_with_tls_does_not_talk_to_an_engine_without(ours: Authority) -> None:
    async with listening(None) as (_, address):
        with pytest.raises(EngineDownError):
            await ask(address, ReloadedTls(files(ours, "router", ours)))


async def test_changed_files_are_used_by_the_next_connection(ours: Authority, foreign: Authority) -> None:
    """Both sides move to another authority; a file that is half written changes nothing."""
    engine, router = files(ours, "engine", ours), files(ours, "router", ours)
    async with listening(server_context(engine)) as (_, address):
        tls = ReloadedTls(router)
        assert await ask(address, tls) == 42
        foreign.issue("engine")
        foreign.issue("router")
        assert engine.ca_certs is not None
        engine.ca_certs.write_bytes(foreign.file.read_bytes())
        assert await ask(address, tls) == 42
        with pytest.raises(EngineDownError):
            await ask(address, ReloadedTls(files(ours, "late", ours)))
        foreign_ca = foreign.file.read_bytes()
        engine.ca_certs.write_bytes(foreign_ca)
        router.keyfile.write_text("half of a rotation")
        assert await ask(address, tls) == 42


def test_files_that_cannot_be_loaded_are_tried_again(
    ours: Authority, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A certificate's validity begins without a change of its files."""
    client = ReloadedTls(files(ours, "router", ours))
    before = client.context()
    with monkeypatch.context() as behind:
        behind.setattr(actors.tls, "datetime", MonthsAgo)
        ours.issue("router")
        for _ in range(2):
            assert client.context() is before
    assert caplog.text.count("is not valid before") == 1
    assert client.context() is not before
