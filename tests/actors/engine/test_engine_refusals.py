"""Bad requests that vLLM's application detects after its stream has started: its error handlers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from vllm.entrypoints.serve.exception_handling.register import init_exception_handler
from vllm.exceptions import VLLMValidationError
from vllm.v1.engine.exceptions import EngineDeadError

from actors.engine.vllm_engine import StopFlag, VllmEngine
from actors.errors import EngineDownError
from actors.request import Call

BEGUN = "event: response.created\ndata: {}\n\n"


async def pinged(_: int) -> None:
    """Answer as the engine core of a running rank."""


def engine(error: Exception, dies: bool = False) -> VllmEngine:
    """An engine whose application streams one event and then fails, behind vLLM's error
    handlers. With ``dies``, the engine core dies before the error.
    """
    llm: Any = SimpleNamespace(errored=False, ping_rank=pinged)
    app = FastAPI()
    app.state.args = SimpleNamespace(log_error_stack=False)
    init_exception_handler(app)

    @app.post("/v1/responses")
    async def respond() -> StreamingResponse:
        async def events() -> AsyncGenerator[str, None]:
            yield BEGUN
            await asyncio.sleep(0.05)  # until the event has been read
            llm.errored = dies
            raise error

        return StreamingResponse(events(), media_type="text/event-stream")

    return VllmEngine(llm, app, StopFlag(), AsyncExitStack(), None, load=None, supervisor="")


async def answer(error: Exception, dies: bool = False) -> tuple[int, bytes]:
    items: list[Any] = [item async for item in engine(error, dies).serve(Call("POST", "/v1/responses"))]
    start, *body = items
    return start.status, b"".join(body)


@pytest.mark.parametrize("kind", [VLLMValidationError, ValueError])
async def test_a_bad_request_within_a_stream_is_an_event(kind):
    """The client receives an error event; the connection does not break."""
    status, body = await answer(kind("no such regex"))
    begun, event, rest = body.decode().split("\n\n")
    kind, data = event.split("\n")
    said = json.loads(data.removeprefix("data: "))
    assert (status, f"{begun}\n\n", kind, rest) == (200, BEGUN, "event: error", "")
    assert (said["type"], said["code"]) == ("error", "BadRequestError")
    assert "no such regex" in said["message"]


@pytest.mark.parametrize(
    ("error", "dies", "raised"), [(KeyError("inside"), False, KeyError), (EngineDeadError(), True, EngineDownError)]
)
async def test_an_error_of_the_engine_is_none_of_the_clients(error, dies, raised):
    """The router retries after EngineDownError, or answers 500."""
    with pytest.raises(raised):
        await answer(error, dies)
