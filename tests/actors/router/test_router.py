"""The router over real Serve handles, with actors that have no engine."""

import asyncio
import json
import os
import signal
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import aclosing, nullcontext
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray
from prometheus_client.parser import text_string_to_metric_families
from ray import serve
from ray.serve.config import RequestRouterConfig

from actors.engine.asgi_call import Notices
from actors.engine.split_call import SplitCall
from actors.engine_pool.serve_discovery import DiscoveryRouter
from actors.request import TRANSFER_FIELD, Accepted, Call, ResponseStart, StreamChunk
from actors.router.peer_routers import STATUS_AGE_S
from actors.rpc.client import Channels
from actors.rpc.messages import RpcRequest
from actors.rpc.server import RpcServer, replica_metadata
from actors.rpc.server_connection import ServedStream
from app.http.routes import OPEN_AGE_S
from app.main import ROUTER_ENVIRONMENT, DeployedModel, HttpRouter
from configs.settings.router import RouterSettings, RoutingSettings
from testing.ports import free_port
from testing.sse import said
from tests.actors.behaviours import ALL, JSON, TOKENS, engine
from tests.actors.fleet import SOURCE

SETTINGS = RouterSettings(
    http_port=None,
    access_log=False,
    # Longer than a pause of a busy machine.
    keep_alive_s=None,
    prefill_timeout_s=5,
    prefill_wait_s=0.2,
    replica_timeout_s=1,
    metrics_timeout_s=20,
    routing=RoutingSettings(policy="round_robin"),
)


def exit_once(mark: Path) -> None:
    """End this process abruptly, unless the file `mark` shows that it was done before."""
    if not mark.exists():
        mark.touch()
        os._exit(1)


class Engine:
    """One role's actor without an engine."""

    async def __init__(self, role: str) -> None:  # type: ignore[misc]
        self.role = role
        methods: dict[str, Callable[..., Awaitable[Any]]] = {
            "status": self.status,
            "metrics": self.metrics,
        }
        self.server = RpcServer(self.serve_request, slots=100, methods=methods)
        self.address = await self.server.open("127.0.0.1", 0)
        self.running = 0
        self.channels = Channels()

    def record_replica_metadata(self) -> dict[str, object]:
        producer = {"remote_engine_id": "e", "remote_host": "127.0.0.1", "remote_port": 1, "tp_size": 1}
        return replica_metadata(self.address, 100, producer=producer, identity=SOURCE.engine)

    async def serve_request(self, request: RpcRequest, stream: ServedStream) -> AsyncGenerator[object, None]:
        if request.prefill is not None:
            split = SplitCall(request.call, request.prefill, self.channels, self.answer, lambda _: nullcontext())
            answer: AsyncGenerator[Any, None] = split.items(Accepted("fake"))
        else:
            yield Accepted("fake")
            answer = self.answer(request.call, Notices(), 0)
        self.running += 1
        try:
            async with aclosing(answer) as items:
                async for item in items:
                    yield item
            if request.transfer_id is not None:
                await asyncio.sleep(request.hold_s)
        finally:
            self.running -= 1

    async def answer(self, call: Call, notices: Notices, _: float) -> AsyncGenerator[object, None]:
        """Answer after 0.05 s, or stream forty tokens one by one.

        Decode's process ends after `at` of them, if the file `once` is absent.
        """
        body = json.loads(call.body)
        if self.role == "prefill" or not body["stream"]:
            await asyncio.sleep(0.05)
            yield ResponseStart(200, JSON)
            yield json.dumps({"role": self.role, "split": TRANSFER_FIELD in body}).encode()
            return
        sent, known = 0, sum(map(len, call.replay_log))
        async for item in engine(os.getpid(), [1, 2])(call, 1):
            if sent >= body.get("at", TOKENS + 1):
                exit_once(Path(body["once"]))
            yield item
            sent += sum(map(len, item.groups)) if isinstance(item, StreamChunk) else 0
            if sent > known:
                await asyncio.sleep(0.01)

    async def status(self) -> dict[str, object]:
        return {"role": self.role, "replica": "fake", "running": self.running}

    async def metrics(self) -> tuple[str, str]:
        return "fake", f"# TYPE calls gauge\ncalls {self.running}\n"


def deploy(num_cpus: float = 0.1, routers: int = 1, name: str = "tandem", **settings: object) -> None:
    """Start the service `name`, or replace the engines of a running one. A replica to stop gets no
    time.
    """
    actor = serve.deployment(Engine).options(
        ray_actor_options={"num_cpus": num_cpus},
        request_router_config=RequestRouterConfig(request_router_class=DiscoveryRouter),
        graceful_shutdown_timeout_s=0.2,
    )
    options = {"num_cpus": 0.1, "runtime_env": {"env_vars": ROUTER_ENVIRONMENT}}
    router = serve.deployment(HttpRouter).options(ray_actor_options=options, num_replicas=routers)
    prefill, decode = actor.options(name="Prefill"), actor.options(name="Decode", num_replicas=2)
    models = [DeployedModel(prefill.bind("prefill"), decode.bind("decode"))]
    built = SETTINGS.model_copy(update=settings)
    serve.run(router.bind(built, models), name=name, route_prefix="/" if name == "tandem" else f"/{name}")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Start a Ray cluster for this module; yield the router's address."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(address="local", namespace="serve", include_dashboard=False, num_cpus=4, log_to_driver=False)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        deploy()
        yield f"http://127.0.0.1:{port}"
    finally:
        serve.shutdown()
        ray.shutdown()


@pytest.fixture
async def client(url) -> AsyncGenerator[httpx.AsyncClient, None]:
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        yield client
        await idle(client)


async def ask(client: httpx.AsyncClient, stream: bool = False, **more: object) -> httpx.Response:
    return await client.post("/v1/completions", json={"prompt": "all is well", "stream": stream, **more})


async def idle(client: httpx.AsyncClient) -> None:
    """Wait until no actor has a call."""
    async with asyncio.timeout(60):
        while True:
            calls = [line for line in (await exposition(client)).splitlines() if line.startswith("calls{")]
            if [line.rsplit(" ", 1)[1] for line in calls] == ["0"] * 3:
                return


async def exposition(client: httpx.AsyncClient) -> str:
    """Return current metrics, not a cached response."""
    await asyncio.sleep(OPEN_AGE_S)  # the router returns a cached response for this time
    return (await client.get("/metrics")).text


async def test_both_legs_answer(client):
    """Decode's answer is relayed; the held prefill leg is ended."""
    reply = await ask(client)
    assert reply.json() == {"role": "decode", "split": True}
    assert reply.headers["x-tandem-route"] == "remote"


def counted(reply: httpx.Response) -> str:
    """Return the tokens of a stream of `counts`, from the first to the last."""
    assert reply.status_code == 200, reply.text
    answer = said(reply.content)
    assert (answer["finish_reason"], answer["usage"]) == ("length", {"completion_tokens": TOKENS})
    return answer["text"]


@pytest.mark.parametrize("at", [0, 1, 17])
async def test_a_stream_outlives_its_actor(client, tmp_path, at):
    """Ray reports that the process has ended, before and after the first byte."""
    reply = await ask(client, stream=True, at=at, once=str(tmp_path / "once"))
    assert (tmp_path / "once").exists()
    assert counted(reply) == ALL


async def test_streams_outlive_a_rolling_restart(client):
    """Serve replaces each engine during streams, without waiting for them: no client notices."""
    restarting = asyncio.create_task(asyncio.to_thread(deploy, 0.11))
    replies: list[Any] = []
    while not restarting.done() or len(replies) < 8:
        replies += await asyncio.gather(*(ask(client, stream=True) for _ in range(3)))
    await restarting
    assert {counted(reply) for reply in replies} == {ALL}


async def test_whichever_router_answers_it_tells_of_all(client):
    """Two routers: each response has both routers' series and requests, and all are equal."""
    await asyncio.to_thread(deploy, routers=2)
    before = sum(answered(await exposition(client)).values())
    for _ in range(12):
        assert (await ask(client)).status_code == 200
    await asyncio.sleep(OPEN_AGE_S)  # the router returns a cached response for this time
    texts = [(await client.get("/metrics")).text for _ in range(12)]
    counts = [answered(text) for text in texts]
    assert len(counts[0]) == 2, "both have answered"
    assert sum(counts[0].values()) == before + 12
    assert counts == counts[:1] * 12, "both routers return the same"
    await asyncio.sleep(STATUS_AGE_S)
    told = [(await client.get("/tandem/status")).json() for _ in range(12)]
    for status in told:
        assert {router["replica"] for router in status["routers"]} == counts[0].keys()
        assert [engine["role"] for engine in status["engines"]] == ["prefill", "decode", "decode"]
    recent = [[one["request_id"] for one in status["recent"]] for status in told]
    assert recent == recent[:1] * 12
    assert len(set(recent[0])) == len(recent[0]) >= 12


def answered(exposition: str) -> dict[str, float]:
    """Return the number of successful requests of each router replica."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(exposition):
        for sample in family.samples:
            if sample.name == "tandem_requests_total" and sample.labels["status"] == "200":
                replica = sample.labels["replica"]
                found[replica] = found.get(replica, 0.0) + sample.value
    return found


@pytest.fixture
async def unasked(url) -> AsyncGenerator[httpx.AsyncClient, None]:
    """Yield a client of a second service, whose router has not queried its peers yet."""
    port = free_port()
    await asyncio.to_thread(deploy, name="unasked", http_port=port, leave_s=0, metrics_timeout_s=1)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20) as client:
        yield client
    await asyncio.to_thread(serve.delete, "unasked")


async def test_a_router_answers_without_the_head_and_is_not_adopted_while_it_stops(unasked):
    """The first query of peers does not wait for Serve's controller.

    A new controller takes each live replica for a running one, also one that its predecessor has
    told to stop: the replica's health check fails.
    """
    controller = ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve")
    pid = ray.get(controller.get_pid.remote())
    os.kill(pid, signal.SIGSTOP)
    try:
        assert (await unasked.get("/metrics")).status_code == 200
        assert (await unasked.get("/tandem/status")).status_code == 200
    finally:
        os.kill(pid, signal.SIGCONT)
    (name,) = (one["name"] for one in ray.util.list_named_actors(all_namespaces=True) if "unasked#HttpR" in one["name"])
    router = ray.get_actor(name, namespace="serve")
    await router.initialize_and_get_metadata.remote()
    await router.perform_graceful_shutdown.remote()
    with pytest.raises(RuntimeError, match="this router is stopping"):
        await router.initialize_and_get_metadata.remote()
