"""Keys, and the request limit of a key: the middleware before an application that waits on
demand.
"""

import asyncio
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from actors.telemetry.router_metrics import RouterMetrics
from app import main
from app.http.auth import Authenticated, digest
from app.main import DeployedModel, HttpRouter, build
from configs.settings.auth import API_KEYS_VARIABLE, OPERATOR_KEYS_VARIABLE, AuthSettings
from configs.settings.base import SettingsError
from configs.settings.parsing import parse_settings
from configs.settings.router import RouterLimits, RouterSettings
from configs.settings.service import ServiceSettings
from testing.prometheus import value_of
from testing.serve_objects import deployment_of
from tests.actors.fleet import Handle, router_of

KEYS = ("key-of-anna", "key-of-bjoern")
LIMITS = RouterLimits(max_ongoing_requests_per_key=2, retry_after_s=7)


class Surface:
    """An application behind keys. Requests to /wait are answered when `go` is set."""

    def __init__(self, keys: tuple[str, ...], limits: RouterLimits = LIMITS) -> None:
        self.go = asyncio.Event()
        self.arrived = asyncio.Semaphore(0)
        self.metrics = RouterMetrics()
        app = Starlette(routes=[Route("/{path:path}", self._serve, methods=["GET", "POST"])])
        router = router_of(limits, Handle([]), Handle([]))
        router.metrics = self.metrics
        self.guarded = Authenticated(app, router, [digest(key) for key in keys])
        transport = httpx.ASGITransport(self.guarded, raise_app_exceptions=False)
        self.client = httpx.AsyncClient(transport=transport, base_url="http://tandem")

    async def _serve(self, request: Request) -> JSONResponse:
        if request.url.path == "/wait":
            self.arrived.release()
            await self.go.wait()
        if request.url.path == "/break":
            raise ZeroDivisionError
        return JSONResponse({"path": request.url.path})

    async def get(self, path: str, key: str | None = None) -> httpx.Response:
        return await self.client.get(path, headers={} if key is None else bearer(key))

    def refused(self, status: int) -> float:
        return value_of(self.metrics.requests.labels("refused", "", status))


def bearer(key: str) -> dict[bytes, bytes]:
    return {b"Authorization": f"Bearer {key}".encode("latin-1")}


@pytest.mark.parametrize(
    "authorization",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        "Bearer key-of-ann",
        "Bearer key-of-anna2",
        "Bearer  key-of-anna",
        "Bearer key-of-anna,key-of-anna",
        "Basic key-of-anna",
        "key-of-anna",
        "Bearer " + "x" * 5000,
        "Bearer \x00ÿ",
    ],
)
async def test_without_a_key_nobody_comes_in(authorization):
    surface = Surface(KEYS)
    headers = {} if authorization is None else {"Authorization": authorization.encode("latin-1")}
    for path in ("/v1/completions", "/v1/models", "/health/", "/metricsx", "/tandem/status", "http://tandem//health"):
        reply = await surface.client.get(path, headers=headers)
        assert reply.status_code == 401
        assert reply.headers["www-authenticate"] == "Bearer"
        assert reply.json()["error"] | {"message": ""} == {
            "message": "",
            "type": "AuthenticationError",
            "param": None,
            "code": 401,
        }
    assert surface.refused(401) == 6


@pytest.mark.parametrize(
    ("path", "authorization", "prefix", "status"),
    [
        ("/v1/models", f"Bearer {KEYS[0]}", "", 200),
        ("/v1/models", f"bEaRer {KEYS[1]}", "", 200),  # as in HTTP
        *((path, "", "", 200) for path in ("/", "/health", "/metrics")),  # as in vLLM, for probes and scrapers
        # Serve reports the prefix of the application's paths.
        ("/tandem/health", "", "/tandem", 200),
        ("/tandem/health", "", "", 401),
    ],
)
async def test_who_comes_in(path: str, authorization: str, prefix: str, status: int) -> None:
    transport = httpx.ASGITransport(Surface(KEYS).guarded, root_path=prefix)
    async with httpx.AsyncClient(transport=transport, base_url="http://tandem") as client:
        assert (await client.get(path, headers={"Authorization": authorization})).status_code == status


async def test_one_key_at_once():
    """429 with Retry-After beyond the limit; other keys have their own slots; ended requests
    return theirs.
    """
    surface = Surface((*KEYS[:1], "key-of-carla"))
    waiting = [asyncio.create_task(surface.get("/wait", KEYS[0])) for _ in range(2)]
    for _ in waiting:
        await surface.arrived.acquire()
    reply = await surface.get("/v1/models", KEYS[0])
    assert (reply.status_code, reply.headers["retry-after"]) == (429, "7")
    assert "limit" in reply.json()["error"]["message"]
    assert (await surface.get("/health")).status_code == 200
    assert (await surface.get("/v1/models", "key-of-carla")).status_code == 200
    waiting[0].cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting[0]
    assert (await surface.get("/v1/models", KEYS[0])).status_code == 200
    surface.go.set()
    assert (await waiting[1]).status_code == 200
    for _ in range(5):
        assert (await surface.get("/break", KEYS[0])).status_code == 500
    assert (await surface.get("/v1/models", KEYS[0])).status_code == 200
    assert surface.refused(429) == 1


async def test_one_key_cannot_have_everything():
    """Without a setting, a key may use half of a router's limit; the only key may use all."""
    for keys, most in ((KEYS, 2), (KEYS[:1], 4)):
        surface = Surface(keys, RouterLimits(max_ongoing_sequences=4))
        waiting = [asyncio.create_task(surface.get("/wait", KEYS[0])) for _ in range(most)]
        for _ in waiting:
            await surface.arrived.acquire()
        assert (await surface.get("/v1/models", KEYS[0])).status_code == (429 if most < 4 else 200)
        surface.go.set()
        await asyncio.gather(*waiting)


@pytest.mark.parametrize(
    ("variables", "keys"),
    [
        ({API_KEYS_VARIABLE: " one, two,,\n"}, {"one", "two", "three"}),
        ({"VLLM_API_KEY": "one,two"}, {"one,two", "three"}),  # one key, as `vllm serve` reads it
        ({API_KEYS_VARIABLE: ""}, {"three"}),
        # The operator configured keys: a lost value must not admit every client.
        *(({API_KEYS_VARIABLE: lost}, None) for lost in (",", " ", "\n", " , ")),
        ({"VLLM_API_KEY": " "}, None),
    ],
)
def test_keys_from_settings_and_environment(monkeypatch, variables, keys):
    """Keys of both sources admit requests; neither is printed."""
    for name in (API_KEYS_VARIABLE, "VLLM_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    auth = AuthSettings(api_keys=[" three "])
    assert "three" not in repr(auth) + str(auth) + auth.model_dump_json()
    assert AuthSettings().all_keys() == ()
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if keys is None:
        (name,) = variables
        with pytest.raises(SettingsError, match=f"^{name}: is set, but contains no key"):
            auth.all_keys()
    else:
        assert {key.get_secret_value() for key in auth.all_keys()} == keys


@pytest.mark.parametrize(
    "settings",
    [
        {"transfer": {"secret": "a-secret-of-32-characters-or-more", "alive_s": 20}},
        {"transfer": {"secret": "a-secret-of-32-characters-or-more"}, "model": "demo", "models": [{"model": "demo"}]},
        {"auth": {"api_keys": "a-secret-that-is-no-list"}},
        {"auth": ["a-secret-of-32-characters-or-more"]},
        {"auth": "a-secret-of-32-characters-or-more"},
        {"transfer": "a-secret-of-32-characters-or-more"},
        {"transfer": {"secret": ["a-secret-of-32-characters-or-more"]}},
    ],
)
def test_errors_do_not_quote_secrets(settings: dict[str, object]) -> None:
    with pytest.raises(SettingsError) as raised:
        parse_settings(settings)
    assert "a-secret" not in str(raised.value)
    assert not str(raised.value).startswith(":")
    with pytest.raises(ValidationError, match="must not be empty"):
        AuthSettings(api_keys=[" "])


async def http_router(built: dict[str, Any]) -> httpx.AsyncClient:
    """A router's HTTP side as a replica in this process; `built` are digests from its build."""
    undecorated: Any = HttpRouter.__mro__[1]  # Serve's wrapper reports its use to the cluster
    handle: Any = SimpleNamespace(deployment_id="nobody's", options=lambda: handle)
    router = undecorated.__new__(undecorated)
    settings = RouterSettings(**LIMITS.model_dump(), http_port=None, access_log=False)
    with pytest.MonkeyPatch.context() as replica:  # its log is not this process's
        replica.setattr(main, "own_replica_id", lambda: "r1")
        for name in ("link_logs", "prepare_process"):
            replica.setattr(main, name, lambda *_: None)
        await router.__init__(settings, [DeployedModel(handle, handle)], **built)
    transport = httpx.ASGITransport(router.__serve_build_asgi_app__())
    return httpx.AsyncClient(transport=transport, base_url="http://tandem")


def built(**args: Any) -> dict[str, Any]:
    """The digests of keys that a router receives from its build in this environment."""
    bound = deployment_of(build(ServiceSettings.model_validate(args))).init_kwargs
    return {name: value for name, value in bound.items() if "digests" in name}


@pytest.mark.parametrize(
    ("variable", "args", "of_build", "of_router", "valid", "invalid"),
    [
        # Serve builds the application in a task on any node, on Kubernetes the head's pod, which
        # has no keys. A router whose own pod has some must not admit every client.
        (API_KEYS_VARIABLE, {}, None, "own", ["own"], [None]),
        (API_KEYS_VARIABLE, {}, "built", None, ["built"], [None]),
        # After a rotation of the secret, new replicas read another one without a new build.
        (API_KEYS_VARIABLE, {"api_keys": ["set"]}, "old", "new", ["set", "new"], [None, "old"]),
        # Alone, operators' keys are the only keys of the service.
        (OPERATOR_KEYS_VARIABLE, {"operator_keys": ["set"]}, None, "own", ["set", "own"], [None]),
    ],
)
async def test_keys_of_settings_build_and_router(
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    args: dict[str, Any],
    of_build: str | None,
    of_router: str | None,
    valid: list[str],
    invalid: list[str | None],
) -> None:
    for name in (API_KEYS_VARIABLE, OPERATOR_KEYS_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    if of_build:
        monkeypatch.setenv(variable, of_build)
    keys = built(auth=args)
    monkeypatch.delenv(variable, raising=False)
    if of_router:
        monkeypatch.setenv(variable, of_router)
    client = await http_router(keys)
    for key in (*valid, *invalid):
        reply = await client.get("/v1/nothing", headers=bearer(key) if key else {})
        assert reply.status_code == (404 if key in valid else 401), key


async def test_one_key_in_two_places_is_one_key(monkeypatch):
    """The only key may use the whole router; one of two, half of it."""
    found = []
    monkeypatch.setattr(Authenticated, "__init__", lambda self, app, router, digests, _: found.append(digests))
    monkeypatch.setenv(API_KEYS_VARIABLE, "the-key")
    await http_router(built(auth={"api_keys": ["the-key"]}))
    assert found == [[digest("the-key")]]


@pytest.mark.parametrize("key", ["key-of-björn", "two words", "tab\there", "line\nbreak", "bell\x07", "a\u00a0x", "🔑"])
def test_a_key_that_no_client_can_send_is_refused(monkeypatch, key):
    """The key could never match. The error states the remedy and does not contain the key."""
    with pytest.raises(SettingsError, match=r"^auth.api_keys: .*printable ASCII") as raised:
        parse_settings({"auth": {"api_keys": [key]}})
    assert key not in str(raised.value)
    monkeypatch.setenv(API_KEYS_VARIABLE, f"good-key,{key}")
    with pytest.raises(SettingsError, match=f"^{API_KEYS_VARIABLE}: .*printable ASCII") as raised:
        AuthSettings().all_keys()
    assert key not in str(raised.value)
