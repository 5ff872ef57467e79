"""The service of `app.main:build` with engines that compute nothing, so that a restart takes
seconds.

Serve, the deployments, routers, RPC servers and settings are those of the product. Only vLLM's
processes are missing: an engine records the arguments that vLLM and the connector would get.
"""

# No `from __future__ import annotations`: Serve reads the type of the argument of `build`.
import json
from collections.abc import Mapping
from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import Any

from pydantic import SecretStr
from ray import serve
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

import app.main
from actors.engine import engine_actor
from actors.engine.adapters import EngineAdapters
from actors.engine.arguments import engine_arguments
from actors.engine.decode import Decode
from actors.engine.node_failures import new_engine_id
from actors.engine.prefill import Prefill
from actors.engine.vllm_engine import StopFlag, VllmEngine
from actors.request import TRANSFER_FIELD
from configs.settings.base import RoleName
from configs.settings.service import ServiceSettings

DEFAULT_SEQS = 16
KV_BLOCKS = 1024


class InstantLLM:
    """Part of vLLM's engine that `VllmEngine` uses besides the application."""

    errored = False

    def __init__(self, engine_id: str, arguments: Mapping[str, Any]) -> None:
        self.vllm_config = SimpleNamespace(
            kv_transfer_config=SimpleNamespace(engine_id=engine_id),
            instance_id="instant",
            model_config=SimpleNamespace(served_model_name=arguments["served_model_name"][0]),
            parallel_config=SimpleNamespace(tensor_parallel_size=arguments["tensor_parallel_size"]),
            cache_config=SimpleNamespace(num_gpu_blocks=KV_BLOCKS),
            scheduler_config=SimpleNamespace(max_num_seqs=arguments.get("max_num_seqs", DEFAULT_SEQS)),
        )

    async def ping_rank(self, rank: int) -> None:
        """Answer as an engine core that runs."""

    async def notify_kv_transfer_request_rejected(
        self, request_id: str, params: Mapping[str, Any], *, data_parallel_rank: int | None = None
    ) -> None:
        """Do nothing: this engine holds no KV."""


class InstantEngine(VllmEngine):
    """An engine that answers completions at once.

    ``given``  settings, and the arguments that vLLM and the connector would get
    """

    given: dict[str, Any]

    @classmethod
    async def start(cls, settings: ServiceSettings, role: RoleName, node_ip: str) -> "InstantEngine":
        """Return an engine; start no process."""
        arguments = engine_arguments(settings, role)
        llm: Any = InstantLLM(new_engine_id(), arguments)
        models: Any = SimpleNamespace(lora_requests={})
        engine = cls(
            llm,
            Starlette(routes=[Route("/v1/completions", _complete, methods=["POST"])]),
            StopFlag(),
            AsyncExitStack(),
            "an instant engine repeats no replay log",
            None,
            "nobody",
            settings.role(role).data_parallel_size,
            EngineAdapters(models, llm, None),
        )
        engine.given = {
            "settings": settings.model_dump(mode="json"),
            "secret": settings.transfer.secret.get_secret_value() if settings.transfer.secret else None,
            "engine": arguments,
            "connector": settings.transfer.connector_config(node_ip) | settings.store.connector_config(),
        }
        # Addresses at which no process listens.
        engine.described = [_producer(name) | {"identity": "instant"} for name in engine.describe()["engine_ids"]]
        return engine

    async def produce_probe(self, timeout_s: float, rank: int = 0) -> dict[str, Any]:
        """Return the parameters of a probe without KV."""
        return _producer(f"{self.describe()['engine_ids'][rank]}")

    async def consume_probe(self, params: Mapping[str, Any], timeout_s: float, rank: int = 0) -> None:
        """Do nothing: there is no KV."""


def _producer(engine_id: str) -> dict[str, Any]:
    return {"remote_engine_id": engine_id, "remote_host": "127.0.0.1", "remote_port": 1, "tp_size": 1}


async def _complete(request: Request) -> Response:
    """Answer as vLLM's completions endpoint; the prefill leg gets the parameters of a transfer."""
    body = json.loads(await request.body())
    answer: dict[str, Any] = {
        "id": "cmpl-instant",
        "object": "text_completion",
        "model": body.get("model"),
        "choices": [{"index": 0, "text": " token", "finish_reason": "length"}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
    }
    if (body.get(TRANSFER_FIELD) or {}).get("do_remote_decode"):
        answer[TRANSFER_FIELD] = _producer("instant") | {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [[0]],
            "remote_request_id": "cmpl-instant",
        }
    return JSONResponse(answer)


class InstantPrefill(Prefill):
    """The product's Prefill actor with an instant engine."""

    async def __init__(self, settings: ServiceSettings, fallback_secret: SecretStr) -> None:  # type: ignore[misc]
        engine_actor.VllmEngine = InstantEngine  # type: ignore[misc]
        await super().__init__(settings, fallback_secret)


class InstantDecode(Decode):
    """The product's Decode actor with an instant engine."""

    async def __init__(self, settings: ServiceSettings, fallback_secret: SecretStr) -> None:  # type: ignore[misc]
        engine_actor.VllmEngine = InstantEngine  # type: ignore[misc]
        await super().__init__(settings, fallback_secret)


def build(args: ServiceSettings) -> serve.Application:
    """Return the application of `app.main:build` with instant engines."""
    app.main.Prefill, app.main.Decode = InstantPrefill, InstantDecode  # type: ignore[misc]
    return app.main.build(args)
