"""The router over real Serve handles, with engines that misbehave on demand.

`Engine` has the actors' interface, and a request's prompt determines its behaviour. A decode leg
with `kv_transfer_params` waits for KV that does not arrive until its prefill leg answers.
"""

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
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from actors.engine.asgi_call import Notices, call_asgi
from actors.engine.split_call import SplitCall
from actors.engine_pool.serve_discovery import DiscoveryRouter
from actors.errors import EngineDownError
from actors.request import TRANSFER_FIELD, Accepted, Call, ResponseStart, StreamChunk, TokenChunk
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
from testing.timing import server_timing
from tests.actors.behaviours import TOKENS, engine
from tests.actors.fleet import SOURCE

SETTINGS = RouterSettings(
    http_port=None,
    access_log=False,
    # Longer than a pause of a busy machine, also after a prefill leg that the router has cancelled.
    request_timeout_s=10,
    first_token_timeout_s=10,
    idle_timeout_s=20,
    body_timeout_s=20,
    keep_alive_s=None,  # the first token may come after the default
    prefill_timeout_s=5,
    prefill_wait_s=0.2,
    replica_timeout_s=1,
    metrics_timeout_s=20,
    max_ongoing_sequences=4,
    retry_after_s=7,
    max_body_bytes=10_000,
    routing=RoutingSettings(policy="round_robin"),
)
FIRST_TOKEN = b"data: {}\n\n"
FOREVER_S = 60.0


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
        self.discarded = 0
        routes = [Route("/v1/completions", self.complete, methods=["POST"])]
        self.app = Starlette(routes=routes)

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
        stream.done = request.transfer_id is None
        self.running += 1
        try:
            async with aclosing(answer) as items:
                async for item in items:
                    stream.done = stream.done or (isinstance(item, ResponseStart) and item.status >= 400)
                    yield item
            if not stream.done:
                await asyncio.sleep(request.hold_s)
        finally:
            self.running -= 1
            self.discarded += not stream.done

    async def answer(self, call: Call, notices: Notices, _: float) -> AsyncGenerator[object, None]:
        if "counts" in json.loads(call.body)["prompt"]:
            async with aclosing(self.count(call)) as items:
                async for item in items:
                    yield item
            return
        if f"{self.role} dies" in json.loads(call.body)["prompt"]:
            raise EngineDownError(self.role)
        async with aclosing(call_asgi(self.app, call, disconnect_s=0.1, notices=notices)) as answer:
            async for item in answer:
                if item == b"poison":
                    raise EngineDownError(self.role)
                yield TokenChunk(item, ()) if item == FIRST_TOKEN else item

    async def count(self, call: Call) -> AsyncGenerator[object, None]:
        """Stream forty tokens one by one.

        Decode's process ends after `at` of them, if the file `once` is absent.
        """
        body = json.loads(call.body)
        if self.role == "prefill":
            yield ResponseStart(200, ())
            return
        sent, known = 0, sum(map(len, call.replay_log))
        async for item in engine(os.getpid(), [1, 2])(call, 1):
            if sent >= body.get("at", FOREVER_S):
                exit_once(Path(body["once"]))
            yield item
            sent += sum(map(len, item.groups)) if isinstance(item, StreamChunk) else 0
            if sent > known:
                await asyncio.sleep(0.01)

    async def status(self) -> dict[str, object]:
        return {"role": self.role, "replica": "fake", "running": self.running}

    async def metrics(self) -> tuple[str, str]:
        return "fake", f"# TYPE calls gauge\ncalls {self.running}\n# TYPE gave gauge\ngave {self.discarded}\n"

    async def complete(self, request: Request) -> Response:
        body = await request.json()
        prompt = body["prompt"]
        if f"{self.role} rejects" in prompt:
            return JSONResponse({"error": {"message": "no", "code": 400}}, status_code=400)
        if f"{self.role} hangs" in prompt:
            await asyncio.sleep(FOREVER_S)
        parked = body.get(TRANSFER_FIELD, {}).get("do_remote_prefill")
        if parked and "prefill" in prompt:
            await asyncio.sleep(FOREVER_S)
        await asyncio.sleep(0.05)
        if not body.get("stream"):
            return JSONResponse({"role": self.role, "parked": bool(parked)})

        async def events() -> AsyncGenerator[bytes, None]:
            yield FIRST_TOKEN
            await asyncio.sleep(0.1)
            yield b"poison" if "breaks off" in prompt else b"data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")


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


async def ask(client: httpx.AsyncClient, prompt: str, explain: bool = False, **more: object) -> httpx.Response:
    headers = {"x-tandem-explain": "1"} if explain else {}
    return await client.post("/v1/completions", json={"prompt": prompt, **more}, headers=headers)


async def idle(client: httpx.AsyncClient) -> None:
    """Every test leaves all actors without a call."""
    async with asyncio.timeout(60):
        while True:
            if await ongoing(client) == ["0"] * 3:
                return


async def ongoing(client: httpx.AsyncClient) -> list[str]:
    """Return the sorted numbers of calls of the three actors."""
    text = await exposition(client)
    return sorted(line.rsplit(" ", 1)[1] for line in text.splitlines() if line.startswith("calls{"))


async def exposition(client: httpx.AsyncClient) -> str:
    """Return current metrics, not a cached response."""
    await asyncio.sleep(OPEN_AGE_S)  # the router returns a cached response for this time
    return (await client.get("/metrics")).text


async def test_both_legs_answer(client):
    """Decode's answer is relayed; the held prefill leg is ended."""
    reply = await ask(client, "all is well")
    assert reply.json() == {"role": "decode", "parked": True}
    assert reply.headers["x-tandem-route"] == "remote"


@pytest.mark.parametrize("failure", ["prefill dies", "prefill rejects", "prefill hangs"])
async def test_a_broken_prefill_leg_leaves_the_request_to_decode(client, failure):
    """Dead, refusing or later than prefill_timeout_s: without another replica, decode serves the
    client's own request.
    """
    reply = await ask(client, failure)
    assert reply.json() == {"role": "decode", "parked": False}
    assert reply.headers["x-tandem-local-reason"] == "prefill_failed"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("prompt", "status"), [("decode dies", 503), ("decode hangs", 504), ("decode rejects", 400)])
async def test_decodes_end_is_the_requests(client, prompt, status, stream):
    """An error before the first byte has its own status, also for streams."""
    reply = await ask(client, prompt, stream=stream)
    assert reply.status_code == status
    assert reply.json()["error"]["code"] == status
    assert "x-tandem-route" not in reply.headers
    assert reply.headers.get("retry-after") == ("7" if status == 503 else None)


async def discarded(client: httpx.AsyncClient) -> float:
    """Return the number of held calls that the prefill actor was told to discard."""
    lines = (await exposition(client)).splitlines()
    (count,) = (line.rsplit(" ", 1)[1] for line in lines if line.startswith("gave{") and 'role="prefill"' in line)
    return float(count)


@pytest.mark.parametrize(
    ("prompt", "times"),
    [
        ("all is well", 0),
        ("breaks off", 0),
        ("prefill rejects", 0),
        ("decode rejects", 1),
        ("decode dies", 2),  # both prefill replicas, each with its own transfer
        ("prefill hangs", 1),
    ],
)
async def test_kv_that_decode_does_not_fetch_is_discarded(client, prompt, times):
    """The router discards the KV while the call is held, so the replica still has the transfer."""
    before = await discarded(client)
    await ask(client, prompt)
    await idle(client)
    assert await discarded(client) == before + times


async def test_kv_of_a_client_that_leaves_is_discarded(client):
    """Decode may not have received the transfer."""
    before = await discarded(client)
    asking = asyncio.create_task(ask(client, "decode hangs"))
    async with asyncio.timeout(60):
        while await ongoing(client) != ["0", "1", "1"]:  # prefill holds its call, and decode has one
            assert not asking.done()
    asking.cancel()
    await asyncio.wait({asking})
    await idle(client)
    assert await discarded(client) == before + 1


async def test_a_stream_that_breaks_off_says_so(client):
    """Sent data stays; an error event and the end mark follow."""
    reply = await ask(client, "breaks off", stream=True)
    first, error, done = reply.text.strip().split("\n\n")
    assert (reply.status_code, first, done) == (200, "data: {}", "data: [DONE]")
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == 503


async def test_too_many_requests_are_refused_at_once(client):
    """Requests within the limit are served; the others get 429 with Retry-After."""
    replies = await asyncio.gather(*(ask(client, "decode hangs") for _ in range(6)))
    assert sorted(reply.status_code for reply in replies) == [429, 429, 504, 504, 504, 504]
    refused = next(reply for reply in replies if reply.status_code == 429)
    assert refused.headers["retry-after"] == "7"
    assert refused.json()["error"]["type"] == "RateLimitError"


@pytest.mark.parametrize("prompt", ["decode hangs", "prefill hangs", "both are well"])
async def test_a_client_that_leaves_ends_both_calls(client, prompt):
    """The fixture waits until both actors have no call."""
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.03):
            await ask(client, prompt)


async def test_health_names_the_replicas(client):
    """The response counts the replicas that Serve has published, by role."""
    reply = await client.get("/health")
    assert (reply.status_code, reply.json()) == (200, {"status": "ok", "replicas": {"prefill": 1, "decode": 2}})


def counted(reply: httpx.Response) -> str:
    """Return the tokens of a stream of `counts`, from the first to the last."""
    assert reply.status_code == 200, reply.text
    answer = said(reply.content)
    assert (answer["finish_reason"], answer["usage"]) == ("length", {"completion_tokens": TOKENS})
    return answer["text"]


ALL = "".join(f"<{token}>" for token in range(TOKENS))


@pytest.mark.parametrize("at", [0, 1, 17])
async def test_a_stream_outlives_its_actor(client, tmp_path, at):
    """Ray reports that the process has ended, before and after the first byte."""
    reply = await ask(client, "counts", stream=True, at=at, once=str(tmp_path / "once"))
    assert (tmp_path / "once").exists()
    assert counted(reply) == ALL


async def test_streams_outlive_a_rolling_restart(client):
    """Serve replaces each engine during streams, without waiting for them: no client notices."""
    restarting = asyncio.create_task(asyncio.to_thread(deploy, 0.11))
    replies: list[Any] = []
    while not restarting.done() or len(replies) < 8:
        replies += await asyncio.gather(*(ask(client, "counts", stream=True) for _ in range(3)))
    await restarting
    assert {counted(reply) for reply in replies} == {ALL}


async def test_whichever_router_answers_it_tells_of_all(client):
    """Two routers: each response has both routers' series and requests, and all are equal."""
    await asyncio.to_thread(deploy, routers=2)
    before = sum(answered(await exposition(client)).values())
    for _ in range(12):
        assert (await ask(client, "all is well")).status_code == 200
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


async def test_a_client_that_asks_is_told_where_its_time_went(client):
    """These engines report no timings, and the router invents none; clients without the header
    get none.
    """
    reply = await ask(client, "all is well", explain=True)
    parts = server_timing(reply)
    total = parts.pop("total")
    assert sum(parts.values()) == pytest.approx(total, abs=0.1)
    assert parts["unexplained"] >= 50, "how long decode takes"
    assert "server-timing" not in (await ask(client, "all is well")).headers


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
