"""Several models behind one router: which engines get a request, and the lists and errors."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any, cast

import httpx
import pytest

from actors.adapter_records import AdapterRecord
from actors.errors import RefusedError
from actors.request import Call, ResponseStart
from actors.router.model_router import ModelEngines
from actors.router.peer_routers import RouterReplica
from tests.actors.behaviours import JSON, LIMITS
from tests.actors.fleet import Handle, Records, Replica, at_rest
from tests.app.http.servers import client_of

pytestmark = pytest.mark.usefixtures("virtual_time")


class Engines(Handle):
    """The engines of one role of one model, with the adapters and changes of each replica."""

    def __init__(self, *names: str, model: str, adapters: tuple[str, ...] = ()) -> None:
        super().__init__([Replica(name, self._serve) for name in names])
        self.model = model
        self.adapters = {name: set(adapters) for name in names}
        self.failing: dict[str, Any] = {}
        """Answer of each replica to a request to load an adapter."""
        self.unreachable: set[str] = set()
        """Replicas that have lost their connection after a load."""
        self.told: list[tuple[str, str]] = []
        self.models_reply: tuple[int, str] | None = None
        """Status and body of the answer to `/v1/models`; None: it lists the engine's model."""
        self._known = True

    async def _serve(self, call: Call, _: int) -> AsyncGenerator[Any, None]:
        if call.path == "/v1/models" and self.models_reply is not None:
            yield ResponseStart(self.models_reply[0], JSON)
            yield self.models_reply[1].encode()
            return
        if call.path == "/v1/models":
            body: Any = {"object": "list", "data": [{"id": self.model}]}
        else:
            body = {"answered_by": self.model, "usage": {"prompt_tokens": 1}}
        yield ResponseStart(200, JSON)
        yield json.dumps(body).encode()

    async def tell_all(self, method: str, timeout_s: float, *arguments: Any) -> dict[str, Any]:
        await asyncio.sleep(0)
        return {replica.name: self._change(replica.name, method, *arguments) for replica in self.replicas}

    def _change(self, replica: str, method: str, name: str, *_: Any) -> Any:
        own = self.adapters[replica]
        self.told.append((replica, method))
        match method:
            case "load_adapter":
                if replica in self.failing:
                    return self.failing[replica]
                own.add(name)
            case "unload_adapter" if replica in self.unreachable:
                return TimeoutError("no answer")
            case "unload_adapter" if name not in own:
                return error(f"The lora adapter '{name}' cannot be found.", "NotFoundError", 404)
            case "unload_adapter":
                own.remove(name)
        return None

    def loaded(self) -> set[str]:
        return set.union(*self.adapters.values())


def error(message: str, kind: str, code: int) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


class Service:
    """Two models: `a` (alias `a2`, adapter `a-lora`, loads adapters) and `b`."""

    def __init__(self, b_loads: bool = False) -> None:
        self.a = (Engines("pa", model="a", adapters=("a-lora",)), Engines("da", "da2", model="a", adapters=("a-lora",)))
        self.b = (Engines("pb", model="b"), Engines("db", model="b"))
        a, b = cast(Any, self.a), cast(Any, self.b)
        for prefill, decode in (self.a, self.b):
            decode.prefill, prefill.role = prefill, "prefill"
        models = (
            ModelEngines(a[0], a[1], ("a", "a2"), True, ("a-lora",), "-a"),
            ModelEngines(b[0], b[1], ("b",), b_loads, ("b-lora",), "-b"),
        )
        self.records = Records()
        self.router = RouterReplica(LIMITS, *models, records=self.records)
        self.http = client_of(self.router)

    async def post(self, path: str, **body: Any) -> httpx.Response:
        return await self.http.post(path, json=body)

    async def at_rest(self) -> None:
        await self.http.aclose()
        await at_rest(*self.a, *self.b)


@pytest.fixture
async def service() -> AsyncGenerator[Service, None]:
    made = Service()
    yield made
    await made.at_rest()


async def test_a_slow_body_of_a_change_gets_408(service: Service) -> None:
    service.router.reconfigure({"body_timeout_s": 0.05})

    async def slow() -> AsyncGenerator[bytes, None]:
        yield b"{"
        await asyncio.sleep(60)

    assert (await service.http.post("/v1/load_lora_adapter", content=slow())).status_code == 408


@pytest.fixture
async def two_loading() -> AsyncGenerator[Service, None]:
    made = Service(b_loads=True)
    yield made
    await made.at_rest()


@pytest.mark.parametrize(("name", "model"), [("a", "a"), ("a2", "a"), ("a-lora", "a"), ("b", "b"), ("b-lora", "b")])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings", "/tokenize"])
async def test_a_request_goes_to_the_engines_of_its_model(service: Service, path: str, name: str, model: str) -> None:
    reply = await service.post(path, model=name, prompt="x", input="x")
    assert reply.json()["answered_by"] == model
    assert not any(one.calls for one in (service.b if model == "a" else service.a))
    reply = await service.http.post("/v1/audio/transcriptions", files={"file": b"sound"}, data={"model": name})
    assert reply.json()["answered_by"] == model


UNKNOWN = "The model `c` does not exist. Valid aliases: a, a2, b."


@pytest.mark.parametrize(
    ("path", "model", "status", "kind", "message"),
    [
        *((path, "c", 404, "NotFoundError", UNKNOWN) for path in ("/v1/responses", "/pooling", "/v1/messages")),
        # A lone surrogate is a valid JSON escape, and the error quotes the name.
        ("/v1/completions", "\ud800", 404, "NotFoundError", r"The model `\ud800` does not exist."),
        ("/v1/messages", "\ud800", 404, "NotFoundError", r"The model `\ud800` does not exist."),
        *(("/v1/completions", none, 400, "BadRequestError", "a, a2, b") for none in (None, "")),
    ],
)
async def test_a_request_without_a_known_model(
    service: Service, path: str, model: str | None, status: int, kind: str, message: str
) -> None:
    """The error is that of vLLM's `_check_model` (entrypoints/serve/engine/serving.py)."""
    reply = await service.http.post(path, content=json.dumps({"model": model, "prompt": "x"}))
    told = reply.json()["error"]
    assert (reply.status_code, told["type"], message in told["message"]) == (status, kind, True)
    if path == "/v1/messages":
        assert (reply.json()["type"], told.keys()) == ("error", {"type", "message"})
    else:
        assert (told["param"], told["code"]) == ("model", status)
    assert not any(one.calls for one in (*service.a, *service.b))
    metrics = service.router.metrics
    assert metrics.value("tandem_requests_total", route="refused", reason="", status=str(status)) == 1


@pytest.mark.parametrize(
    ("answer", "listed"),
    [
        (None, ["a", "b"]),
        *((one, ["b"]) for one in [(500, '{"error": {}}'), (200, "not JSON"), (200, "[]"), (200, "{}")]),
    ],
    ids=str,
)
async def test_the_list_has_the_models_of_all_engines(
    service: Service, answer: tuple[int, str] | None, listed: list[str]
) -> None:
    """It leaves out a model that fails, or has no engine."""
    service.a[1].models_reply = answer
    reply = await service.http.get("/v1/models")
    assert reply.json() == {"object": "list", "data": [{"id": one} for one in listed]}
    service.a[1].replicas.clear()
    assert [one["id"] for one in (await service.http.get("/v1/models")).json()["data"]] == ["b"]


async def test_the_list_does_not_leave_out_a_busy_model(service: Service) -> None:
    """A client would take it for a model that does not exist. Other GET requests ask the others."""

    async def full(*_: Any) -> AsyncGenerator[Any, None]:
        await asyncio.sleep(0.01)
        raise RefusedError("full")
        yield

    service.router.limits = LIMITS.model_copy(update={"replica_timeout_s": 0.5})
    for replica in service.a[1].replicas:
        replica.serve = full
    reply = await service.http.get("/v1/models")
    assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")
    assert (await service.http.get("/version")).json()["answered_by"] == "b"


async def test_health_is_that_of_all_models(service: Service) -> None:
    """The service is healthy once each model has had a decode engine; a later loss only degrades
    it.
    """
    replicas, service.b[1].replicas = service.b[1].replicas, []
    assert (await service.http.get("/health")).status_code == 503
    service.b[1].replicas = replicas
    ready = await service.http.get("/health")
    assert (ready.status_code, ready.json()["status"]) == (200, "ok")
    assert ready.json()["models"] == {"a": {"prefill": 1, "decode": 2}, "b": {"prefill": 1, "decode": 1}}
    service.b[1].replicas = []
    later = await service.http.get("/health")
    assert (later.status_code, later.json()["status"]) == (200, "degraded")


async def test_each_model_has_its_own_metrics(service: Service) -> None:
    for _ in range(2):
        await service.post("/v1/embeddings", model="a2", input="x")
    await service.post("/v1/embeddings", model="b", input="x")
    for model, name, count in zip(service.router.models, "ab", (2, 1), strict=True):
        labels = {"route": "local", "reason": "one_engine", "status": "200"}
        assert model.metrics.value("tandem_requests_total", **labels) == count
        assert f'model_name="{name}"' in model.metrics.exposition()


async def test_an_adapter_is_loaded_on_all_engines_of_its_model_and_unloaded(service: Service) -> None:
    reply = await service.post("/v1/load_lora_adapter", lora_name="new", lora_path="/new", base_model_name="a2")
    assert (reply.status_code, reply.text) == (200, "Success: LoRA adapter 'new' added successfully.")
    assert {one for one, _ in (*service.a[0].told, *service.a[1].told)} == {"pa", "da", "da2"}
    assert not service.b[0].told
    assert (await service.post("/v1/completions", model="new", prompt="x")).json()["answered_by"] == "a"
    reply = await service.post("/v1/unload_lora_adapter", lora_name="new")
    assert (reply.status_code, reply.text) == (200, "Success: LoRA adapter 'new' removed successfully.")
    assert all("new" not in one.loaded() for one in service.a)
    again = await service.post("/v1/unload_lora_adapter", lora_name="new", base_model_name="a")
    assert (again.status_code, again.json()["error"]["type"]) == (404, "NotFoundError")


async def test_without_the_ray_head(service: Service) -> None:
    """Known adapters keep their model. The answer for others is 503: they may exist."""
    await service.records.add("new", AdapterRecord("-a", "/new"))
    await service.records.add("elsewhere", AdapterRecord("-gone", "/new"))
    assert (await service.post("/v1/completions", model="new", prompt="x")).json()["answered_by"] == "a"
    assert (await service.post("/v1/completions", model="elsewhere", prompt="x")).status_code == 404
    service.records.lost = True
    await asyncio.sleep(60)
    for name in ("new", "a-lora"):
        assert (await service.post("/v1/completions", model=name, prompt="x")).json()["answered_by"] == "a"
    unknown = await service.post("/v1/completions", model="c", prompt="x")
    assert (unknown.status_code, unknown.headers["retry-after"]) == (503, "1")
    for change in ("load", "unload"):
        body = {"lora_name": "c", "lora_path": "/c", "base_model_name": "a"}
        assert (await service.post(f"/v1/{change}_lora_adapter", **body)).status_code == 503
    assert not service.a[1].told


async def test_a_change_by_another_router(service: Service) -> None:
    """Its load is known at once, its unload after some seconds."""
    assert (await service.post("/v1/completions", model="new", prompt="x")).status_code == 404
    await service.records.add("new", AdapterRecord("-a", "/new"))
    assert (await service.post("/v1/completions", model="new", prompt="x")).status_code == 200
    await service.records.delete("new")
    await asyncio.sleep(60)
    assert (await service.post("/v1/completions", model="new", prompt="x")).status_code == 404


async def test_an_adapter_of_one_of_two_models(two_loading: Service) -> None:
    """The record decides which model gets a name: another router's load counts, too."""
    service, load = two_loading, {"lora_name": "new", "lora_path": "/new"}
    replies = await asyncio.gather(
        *(service.post("/v1/load_lora_adapter", base_model_name=model, **load) for model in ("a", "b"))
    )
    assert [reply.status_code for reply in replies] == [200, 400]
    assert replies[1].json()["error"]["type"] == "InvalidUserInput"
    assert "new" not in service.b[1].loaded()
    assert (await service.post("/v1/unload_lora_adapter", lora_name="new", base_model_name="b")).status_code == 400
    for model in ("a", "b"):
        assert (await service.post("/v1/completions", model="new", prompt="x")).json()["answered_by"] == model
        assert (await service.post("/v1/unload_lora_adapter", lora_name="new")).status_code == 200
        assert (await service.post("/v1/load_lora_adapter", base_model_name="b", **load)).status_code == 200


async def test_a_load_whose_client_leaves(service: Service) -> None:
    """Neither the record nor the adapter stays."""
    body = {"lora_name": "new", "lora_path": "/new", "base_model_name": "a"}
    for turns in range(12):
        loading = asyncio.create_task(service.router.adapters.load(service.router.models[0], "new", "/new"))
        for _ in range(turns):
            await asyncio.sleep(0)
        done = loading.done()
        loading.cancel()
        await asyncio.wait({loading})
        await asyncio.sleep(1)
        assert (
            ("new" in service.records.by_name) == ("new" in service.a[1].loaded()) == (done or not loading.cancelled())
        )
        if done or not loading.cancelled():
            assert (await service.post("/v1/unload_lora_adapter", **body)).status_code == 200


FULL = error("no memory", "InternalServerError", 500)
MISSING = error("No adapter found for /new", "NotFoundError", 404)
ALL = ("pa", "da", "da2")


@pytest.mark.parametrize(
    ("failing", "unreachable", "status", "said"),
    [
        *(({name: FULL}, set(), 500, ("1 of 3 engines failed, it is loaded on none", name)) for name in ("pa", "da2")),
        ({"da2": TimeoutError("no answer")}, set(), 503, ("it is loaded on none", "da2")),
        # Engines that have not confirmed the revert are named.
        ({"da": FULL}, {"da2"}, 500, ("decode da2 may have loaded it",)),
        # vLLM's own error, if all engines have it.
        (dict.fromkeys(ALL, MISSING), set(), 404, ("No adapter found for /new",)),
    ],
)
async def test_a_load_that_fails(
    service: Service, failing: dict[str, Any], unreachable: set[str], status: int, said: tuple[str, ...]
) -> None:
    """No engine that answers keeps the adapter, and no request for it is served."""
    for role in service.a:
        role.failing, role.unreachable = failing, unreachable
    reply = await service.post("/v1/load_lora_adapter", lora_name="new", lora_path="/new", base_model_name="a")
    assert reply.status_code == status
    assert all(words in reply.json()["error"]["message"] for words in said)
    assert status != 404 or reply.json() == MISSING
    kept = {name for role in service.a for name, loaded in role.adapters.items() if "new" in loaded}
    assert kept <= unreachable
    assert service.records.by_name == {}
    assert (await service.post("/v1/completions", model="new", prompt="x")).status_code == 404


async def test_without_decode_no_engine_keeps_an_adapter(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """A decode engine that starts later would load it from prefill."""

    async def nobody(*_: Any) -> dict[str, Any]:
        return {}

    monkeypatch.setattr(service.a[1], "tell_all", nobody)
    reply = await service.post("/v1/load_lora_adapter", lora_name="new", lora_path="/new", base_model_name="a")
    assert (reply.status_code, "no decode engine" in reply.text) == (503, True)
    assert "new" not in service.a[0].loaded()


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ({"lora_name": "new"}, 400, "Both 'lora_name' and 'lora_path' must be provided."),
        ({"lora_name": "b", "lora_path": "/x"}, 400, "The lora adapter 'b' conflicts with a served base model."),
        ({"lora_name": "new", "lora_path": "/x"}, 400, "'base_model_name' must be one of the models: a, b"),
        ({"lora_name": "new", "lora_path": "/x", "base_model_name": "c"}, 404, "The model `c` does not exist."),
        ({"lora_name": "new", "lora_path": "/x", "base_model_name": "b"}, 404, "allow_runtime_lora_updating"),
        ({"lora_name": "new", "lora_path": "/x", "load_inplace": True}, 400, "load_inplace is not supported"),
        ({"lora_name": 1, "lora_path": "/x"}, 400, "`lora_name` must be a string"),
        ({"lora_name": "a-lora", "lora_path": "/x", "base_model_name": "a"}, 400, "frontend.lora_modules"),
    ],
)
async def test_refused_changes(service: Service, body: dict[str, Any], status: int, said: str) -> None:
    reply = await service.post("/v1/load_lora_adapter", **body)
    assert reply.status_code == status
    assert said in reply.json()["error"]["message"]
    assert not any(one.told for one in (*service.a, *service.b))


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ("load", "lora_name"),
        ("load", "lora_path"),
        ("load", "base_model_name"),
        ("unload", "lora_name"),
        ("unload", "base_model_name"),
    ],
)
@pytest.mark.parametrize("value", ["\ud800", "a\nINFO forged", "x" * 4097], ids=["surrogate", "two lines", "long"])
async def test_a_change_that_no_engine_can_receive(service: Service, change: str, field: str, value: str) -> None:
    """The connections to engines encode strings in UTF-8, which has no lone surrogates. Engines
    write names and paths to their logs.
    """
    body = {"lora_name": "new", "lora_path": "/x", "base_model_name": "a", field: value}
    reply = await service.http.post(f"/v1/{change}_lora_adapter", content=json.dumps(body))
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, field)
    assert not any(one.told for one in (*service.a, *service.b))


async def test_without_the_setting_there_is_no_such_endpoint() -> None:
    made: Any = [ModelEngines(cast(Any, Engines(model="a")), cast(Any, Engines("da", model="a")))]
    async with client_of(RouterReplica(LIMITS, *made)) as http:
        reply = await http.post("/v1/load_lora_adapter", json={"lora_name": "x", "lora_path": "/x"})
    assert reply.status_code == 404
