"""A whole router on its port: real sockets to a client and to a decode engine's RPC server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from actors.engine.engine_actor import EngineActor
from actors.engine_pool import engines
from actors.request import Accepted, ResponseStart
from actors.router import router
from actors.rpc.address import RpcAddress
from actors.rpc.messages import RpcRequest
from actors.rpc.server import RpcServer, replica_metadata
from app import drain, main
from app.http import http_server
from app.http.http_server import SERVICE_PATH
from app.main import DeployedModel, HttpRouter
from configs.settings.auth import OPERATOR_KEYS_VARIABLE
from configs.settings.base import RoleName
from configs.settings.router import RouterSettings
from testing.certificates import Authority
from testing.ports import free_port
from tests.actors.behaviours import JSON, LIMITS
from tests.app.http.servers import HOST, WAIT_S

PREFILL, DECODE = "prefill of the router's port", "decode of the router's port"
"""Deployment ids of the engines in the registry of this process."""

UNDECORATED: Any = HttpRouter.__mro__[1]
"""The router without Serve's wrapper, which reports its use to the cluster."""


class Replica(UNDECORATED):
    """A router that `stop` ends, as Serve does with the hook `__del__`."""

    async def stop(self) -> None:
        await super().__del__()

    def __del__(self) -> None:
        """Nothing: Python calls it without awaiting its result."""


@pytest.fixture
def ours(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls"), "ours")


@pytest.fixture(autouse=True)
def identity(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Give the router the ids and the log directory that it reads from Serve's replica."""
    monkeypatch.setattr(http_server, "this_service", lambda: "ours")
    monkeypatch.setattr(main, "own_replica_id", lambda: "r1")
    monkeypatch.setattr(main, "log_directory", lambda: tmp_path)


@asynccontextmanager
async def listening(by_serve: str | None = None, **settings: Any) -> AsyncGenerator[httpx.AsyncClient, None]:
    """Start a router without prefill engines; yield a client of its port.

    ``by_serve``  yield a client of Serve's proxy instead, which adds this prefix to paths
    """
    port = free_port()
    handles: list[Any] = [SimpleNamespace(deployment_id=one) for one in (PREFILL, DECODE)]
    engines.publish(PREFILL, {})
    for handle in handles:
        handle.options = lambda handle=handle: handle
    router: Any = Replica.__new__(Replica)
    built = RouterSettings(**{**LIMITS.model_dump(), "http_port": port, "leave_s": 0.1, **settings})
    await router.__init__(built, [DeployedModel(*handles)])
    try:
        proxy = httpx.ASGITransport(router.__serve_build_asgi_app__(), root_path=by_serve or "")
        url = f"http://{HOST}:{port}{by_serve or ''}"
        transport = None if by_serve is None else proxy
        async with httpx.AsyncClient(base_url=url, timeout=WAIT_S, transport=transport) as client:
            yield client
    finally:
        await router.stop()


@asynccontextmanager
async def decode() -> AsyncGenerator[list[RpcRequest], None]:
    """Run a decode engine that answers with an empty object; yield the calls that it received."""
    calls: list[RpcRequest] = []

    async def serve(request: RpcRequest, _: Any) -> AsyncGenerator[Any, None]:
        calls.append(request)
        yield Accepted("d0", 1)
        yield ResponseStart(200, JSON)
        yield b"{}"

    server = RpcServer(serve, slots=2)
    engines.publish(DECODE, {"d0": {**replica_metadata(await server.open(HOST, 0), 10), "slots": 2}})
    try:
        yield calls
    finally:
        engines.publish(DECODE, {})
        await server.close()


@pytest.mark.parametrize("waited", [False, True])
async def test_it_is_ready_while_decode_runs_once_prefill_has_run(
    monkeypatch: pytest.MonkeyPatch, waited: bool
) -> None:
    """A load balancer sends no request to a new cluster before its engines run.

    A router that starts while prefill is away does not wait for ever.
    """

    async def status() -> int:
        return (await client.get(SERVICE_PATH)).status_code

    async with listening() as client:
        before = await client.get(SERVICE_PATH)
        assert (before.status_code, before.text) == (503, "ours")
        async with decode():
            assert await status() == 503
            assert (await client.get("/health")).status_code == 200
            if waited:
                monkeypatch.setattr(router, "FIRST_PREFILL_S", 0.0)
            else:
                engines.publish(PREFILL, {"p0": {**replica_metadata(RpcAddress(HOST, 1, ""), 10), "slots": 2}})
            assert await status() == 200
            engines.publish(PREFILL, {})
            assert await status() == 200
        assert await status() == 503


async def test_a_router_that_is_told_to_stop_serves_until_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is unready at once; it keeps the engine that Serve stops at the same time."""
    monkeypatch.setattr(router, "FIRST_PREFILL_S", 0.0)
    stop: list[Callable[[], None]] = []
    monkeypatch.setattr(main, "in_replica", lambda: True)
    monkeypatch.setattr(UNDECORATED, "find_peers", lambda _: None)
    monkeypatch.setattr(main, "link_logs", lambda *_: None)
    monkeypatch.setattr(main.RouterReplica, "find_peers", lambda _: None)
    monkeypatch.setattr(main, "on_stop", stop.append)
    async with decode() as calls, listening(leave_s=4.0) as client:
        assert (await client.get(SERVICE_PATH)).status_code == 200
        stop[0]()
        assert (await client.get(SERVICE_PATH)).status_code == 503
        engines.publish(DECODE, {})
        assert (await client.post("/v1/completions", json={"prompt": "a"})).status_code == 200
        assert len(calls) == 1


async def test_an_idle_connection_ends_after_the_configured_time() -> None:
    async with listening(keep_alive_timeout_s=0.2) as client:
        reader, writer = await asyncio.open_connection(HOST, client.base_url.port)
        assert await asyncio.wait_for(reader.read(), WAIT_S) == b""
        writer.close()


async def test_the_router_limits_a_clients_pause_before_the_kernel_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit of connections to engines (`LOST_S`) is shorter."""
    limits_s: list[float] = []
    monkeypatch.setattr(http_server, "enable_keepalive", lambda _, lost_s: limits_s.append(lost_s))
    async with listening(idle_timeout_s=400):
        assert min(limits_s) > 400


@pytest.mark.parametrize("prefix", ["", "/llm"])
@pytest.mark.parametrize("tls", ["", "TLS", "TLS and a client certificate"])
async def test_serves_proxy_refuses_what_the_port_refuses(tls: str, prefix: str, ours: Authority) -> None:
    """With TLS settings, nothing but probes travels in clear text through the other port."""
    files = dict(zip(("ssl_certfile", "ssl_keyfile"), map(str, ours.issue("router")), strict=True)) if tls else {}
    files |= {"ssl_ca_certs": str(ours.file)} if "client" in tls else {}
    async with decode() as calls, listening(by_serve=prefix, **files) as client:
        for path in ("/health", "/ping", "/load"):
            assert (await client.get(path)).status_code == 200, path
        replies = [await client.get("/v1/models")]
        replies.append(await client.post("/v1/completions", json={"prompt": "a"}))
        assert {reply.status_code for reply in replies} == {403 if tls else 200}
        assert bool(calls) != bool(tls)
        for reply in replies if tls else []:
            assert f"requires {tls}, so" in reply.json()["error"]["message"]


@pytest.mark.parametrize("allowed", [None, False, True])
async def test_a_priority_reaches_engines_only_if_the_setting_allows_it(allowed: bool | None) -> None:
    """Unset, the router drops the header."""
    settings: dict[str, Any] = {} if allowed is None else {"client_priority": allowed}
    async with decode() as calls, listening(**settings) as client:
        headers = {"x-vllm-priority": "-9"}
        reply = await client.post("/v1/completions", json={"prompt": "a"}, headers=headers)
        assert (reply.status_code, reply.headers["x-tandem-route"]) == (200, "local")
        assert dict(calls[0].call.headers).get(b"x-vllm-priority") == (b"-9" if allowed else None)


@pytest.mark.parametrize("given", ["0af76519-16cd-43dd-8448-eb211c80319c", "trace-1", None])
async def test_an_id_in_the_header_and_in_the_body(given: str | None) -> None:
    """The header precedes the body, as in vLLM's `_base_request_id`, also if it is a UUID."""
    async with decode() as calls, listening() as client:
        headers = {"x-request-id": given} if given else {}
        await client.post("/v1/completions", json={"prompt": "a", "request_id": "mine"}, headers=headers)
    assert dict(calls[0].call.headers).get(b"x-request-id", b"").decode() == (given or "")


def written(folder: Path) -> dict[str, list[Any]]:
    return {path.name: [json.loads(line) for line in path.read_text().splitlines()] for path in folder.iterdir()}


@pytest.mark.parametrize("settings", [{}, {"access_log": False}])
async def test_a_request_is_in_the_access_log_unless_it_is_off(settings: dict[str, Any], tmp_path: Path) -> None:
    async with decode(), listening(**settings) as client:
        await client.post("/v1/completions", json={"prompt": "a"}, headers={"x-request-id": "trace-7"})
    files = written(tmp_path)
    if settings:
        assert files == {}
        return
    (line,) = files.pop("access-r1.log")
    assert (line["request_id"], line["status"], line["route"], line["decode"]) == ("trace-7", 200, "local", "d0")
    assert files == {}


class Drainable(EngineActor):
    """An engine's actor without an engine; a call runs until `go_on` is set."""

    def __init__(self, role: RoleName, replica: str) -> None:
        self.role, self.replica, self.go_on = role, replica, asyncio.Event()
        self._changes_adapters = False
        self._rpc_servers = [RpcServer(self._run, 2, self._router_methods(0))]

    async def _run(self, *_: Any) -> AsyncGenerator[Any, None]:
        yield Accepted(self.replica, 1)
        await self.go_on.wait()
        yield ResponseStart(200, JSON)
        yield b"{}"

    async def open(self) -> dict[str, Any]:
        metadata = replica_metadata(await self._rpc_servers[0].open(HOST, 0), 10, slots=2)
        return {self.replica: metadata | await self.record_routing_stats()}

    def __del__(self) -> None:  # type: ignore[override]
        """Replace Serve's hook."""


class Earlier(Drainable):
    """An engine of a release without drains."""

    def _router_methods(self, rank: int) -> dict[str, Any]:
        return {}


@asynccontextmanager
async def opened(*actors: Drainable) -> AsyncGenerator[list[dict[str, Any]], None]:
    """Open the engines' RPC servers; yield what Serve would list of each."""
    async with AsyncExitStack() as stack:
        stack.callback(engines.publish, DECODE, {})
        for one in actors:
            stack.push_async_callback(one._rpc_servers[0].close)  # noqa: SLF001
        yield [await one.open() for one in actors]


async def test_an_operator_drains_an_engine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`tandem drain` ends when the engine is empty. The last decode engine is not drained."""
    monkeypatch.setattr(drain, "POLL_S", 0.01)
    monkeypatch.setenv(OPERATOR_KEYS_VARIABLE, "otto")
    d, e, p = Drainable("decode", "d-1"), Drainable("decode", "e-1"), Drainable("prefill", "p-1")
    async with listening() as client, opened(d, e, p) as listed:
        client.headers["Authorization"] = "Bearer otto"
        engines.publish(DECODE, listed[0])
        call = asyncio.create_task(client.post("/v1/completions", json={"prompt": "a"}))
        while not d.ongoing:  # noqa: ASYNC110 - the server has no event for it
            await asyncio.sleep(0.01)
        engines.publish(DECODE, listed[0] | listed[1])
        engines.publish(PREFILL, listed[2])

        async def run(*arguments: str) -> tuple[int, str]:
            status = await asyncio.to_thread(drain.main, [*arguments, "--url", str(client.base_url)])
            said = capsys.readouterr()
            return status, said.out + said.err

        assert await run("d", "--timeout-s", "0") == (
            1,
            "  0 s: decode d-1 has 1 sequences left\n"
            "tandem drain: 1 sequences run after 0 s; decode d-1 stays drained: --undo\n",
        )
        status, said = await run("e")
        assert (status, "no other decode engine" in said) == (1, True)
        d.go_on.set()
        assert (await call).status_code == 200
        status, said = await run("d")
        assert (status, said.splitlines()[-1].startswith("Empty.")) == (0, True), said
        assert await run("d", "--undo") == (0, "decode d-1 accepts requests again.\n")
        assert (await run("p"))[0] == 0
        status, said = await run("x")
        assert (status, "decode d-1, decode e-1, prefill p-1" in said) == (1, True), said
        monkeypatch.setenv(OPERATOR_KEYS_VARIABLE, "anna")
        assert (await run("d"))[1].endswith(": a valid API key is required: send `Authorization: Bearer KEY`\n")
        assert not d._drained  # noqa: SLF001


async def test_drains_at_the_same_time_leave_an_engine() -> None:
    """One of an earlier release accepts calls. An id that two engines begin with is none."""
    one, two, earlier = Drainable("decode", "d-1"), Drainable("decode", "d-2"), Earlier("decode", "e")
    async with listening() as client, opened(one, two, earlier) as listed:

        async def drained() -> list[int]:
            asked = (client.post(f"/tandem/drain/{each.replica}") for each in (one, two))
            return [reply.status_code for reply in await asyncio.gather(*asked)]

        engines.publish(DECODE, listed[0] | listed[1])
        assert 409 in await drained()
        assert not (one._drained and two._drained)  # noqa: SLF001
        assert (await client.post("/tandem/drain/d")).status_code == 404
        engines.publish(DECODE, listed[0] | listed[1] | listed[2])
        assert await drained() == [200, 200]
        engines.publish(DECODE, listed[0] | listed[1])
        assert await drained() == [200, 200], "they are drained already"
