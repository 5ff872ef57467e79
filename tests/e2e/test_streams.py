"""A stream interrupted at some token and resumed elsewhere equals the uninterrupted one.

The campaign `streams` kills real engines under streams of all kinds, `continued` interrupts or
moves random streams at random tokens.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from safetensors.torch import load_file, save_file

from actors.engine.vllm_engine import VllmEngine
from actors.errors import CannotResumeError
from actors.replay_log import ServedCall
from actors.request import Call, ReplayLog, TokenChunk
from app.demo.paths import MODEL_DIR
from configs.settings.service import ServiceSettings
from testing.sse import said
from testing.streams import KINDS, MODEL, PARAMETERS, PROMPT, TOKENS, completion
from tests.e2e.two_engines import HEADERS, SETTINGS, identity_of, start, stream

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module")]

MESSAGE_TOOL = {"name": "weather", "input_schema": PARAMETERS}
ATTEMPTS = 5


@asynccontextmanager
async def started(settings: ServiceSettings) -> AsyncIterator[VllmEngine]:
    engine = await start("decode", settings)
    try:
        yield engine
    finally:
        await engine.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine() -> AsyncIterator[VllmEngine]:
    async with started(SETTINGS) as engine:
        yield engine


@pytest.mark.parametrize(
    "more", [{}, {"tools": [MESSAGE_TOOL], "tool_choice": {"type": "any"}}], ids=["text", "any tool"]
)
async def test_a_message_goes_on_as_if_nothing_was(engine: VllmEngine, more: dict[str, Any]) -> None:
    """Anthropic's events: the same ones, but for ids of tool calls, which each engine draws."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": PROMPT}], "max_tokens": TOKENS, "stream": True}

    async def run(cut: int | None) -> list[str]:
        sent = await stream(engine, "/v1/messages", {**body, "temperature": 0, **more}, dies_at=cut)
        return re.sub("chatcmpl-tool-[0-9a-f]+", "", sent.decode()).split("\n\n")

    def text_of(events: list[str]) -> str:
        return "".join(re.findall(r'"(?:text|partial_json)":"((?:[^"\\]|\\.)*)"', "".join(events)))

    for cut in (1, 3):
        # vLLM joins outputs that the serving layer has not read, so a busy machine may change the
        # number of events.
        for _ in range(ATTEMPTS):
            whole, resumed = await run(None), await run(cut)
            assert whole[-2].startswith("event: message_stop")
            assert text_of(resumed) == text_of(whole), f"cut at token {cut}"
            if resumed == whole:
                break
        else:
            assert resumed == whole, f"cut at token {cut}"


@pytest.mark.parametrize(
    ("kind", "prefilled"),
    [("greedy", True), ("greedy schema", True), ("greedy bad words", True), ("penalties", False), ("logprobs", False)],
)
async def test_sent_tokens_are_computed_with_the_prompt(engine: VllmEngine, kind: str, prefilled: bool) -> None:
    """Not where logprobs or the V1 runner's generator of a seed depend on the steps."""

    async def chunks(log: ReplayLog) -> list[TokenChunk]:
        endpoint, body = KINDS[kind]
        call = Call("POST", endpoint, HEADERS, json.dumps(body).encode(), log)
        return [one async for one in engine.serve(call) if isinstance(one, TokenChunk)]

    whole = [group for chunk in await chunks(()) for group in chunk.groups]
    resumed = await chunks(tuple(whole[:20]))
    assert [group for chunk in resumed for group in chunk.groups][:20] == whole[:20]
    assert resumed[0].prefilled == (sum(map(len, whole[:20])) - 1 if prefilled else 0)


async def test_a_client_leaves_while_its_stream_resumes(engine: VllmEngine) -> None:
    """vLLM's frontend has not processed all sent tokens, and must abort the request."""
    endpoint, body = completion(temperature=0, ignore_eos=True, max_tokens=900)
    call = Call("POST", endpoint, HEADERS, json.dumps(body).encode(), tuple((7,) for _ in range(800)))
    states = engine._llm.output_processor.request_states  # noqa: SLF001 - no public way to them

    async def run() -> None:
        async for _ in engine.serve(call):
            pass

    running = asyncio.create_task(run())
    while not states:  # noqa: ASYNC110 - vLLM has no event of a request's registration
        await asyncio.sleep(0)
    (served,) = [state.served for state in states.values()]
    await asyncio.sleep(0)
    assert 0 < len(served.emitted) < 799
    running.cancel()
    await asyncio.wait([running])
    assert states == {}
    while not await engine._llm.reset_prefix_cache():  # noqa: ASYNC110, SLF001 - fails while a request runs
        await asyncio.sleep(0.05)


def test_chunks_of_sent_tokens_are_held_back() -> None:
    """A chunk with tokens shows that the engine has the prompt's KV."""
    served = ServedCall(prefilled=2)
    held = [served.repeats]
    for token in (1, 2, 3):
        served.record((token,))
        held.append(served.repeats)
    assert held == [True, True, True, False]
    assert not ServedCall().repeats


async def test_a_stream_without_a_seed_keeps_what_was_sent(engine: VllmEngine) -> None:
    """Tokens after the interruption are sampled again; sent tokens are not."""
    endpoint, body = completion(temperature=2.0, ignore_eos=True, return_token_ids=True)
    tokens = said(await stream(engine, endpoint, body, dies_at=25))["token_ids"]
    assert len(tokens) == body["max_tokens"]


async def test_a_stream_does_not_continue_on_other_weights(engine: VllmEngine, tmp_path: Path) -> None:
    """The weights at the path of the second engine's model are replaced before it starts again."""
    model = Path(shutil.copytree(MODEL_DIR, tmp_path / "model"))
    settings = SETTINGS.model_copy(update={"model": str(model), "served_model_name": MODEL})
    endpoint, body = completion(temperature=0, ignore_eos=True)
    whole = said(await stream(engine, endpoint, body))
    async with started(settings) as heir:
        assert said(await stream(engine, endpoint, body, dies_at=14, heir=heir)) == whole
        assert heir.described[0]["frontend"] == engine.described[0]["frontend"]
    weights = load_file(model / "model.safetensors")
    save_file({name: tensor.flip(0).contiguous() for name, tensor in weights.items()}, model / "model.safetensors")
    other = settings.model_copy(update={"frontend": SETTINGS.frontend | {"chat_template": "{{ 1 }}"}})
    async with started(other) as heir:
        assert heir.described[0]["frontend"] != engine.described[0]["frontend"]
        assert said(await stream(heir, endpoint, body)) != whole
        with pytest.raises(CannotResumeError, match="another model"):
            await stream(engine, endpoint, body, dies_at=14, heir=heir)
        # Serve's metadata is wrong: the chunks decide.
        with pytest.raises(CannotResumeError, match="another model"):
            await stream(engine, endpoint, body, 14, heir, heirs_identity=identity_of(engine))


async def test_a_client_cannot_force_tokens(engine: VllmEngine) -> None:
    endpoint, body = completion(temperature=0, ignore_eos=True)
    forced = body | {"vllm_xargs": {"tandem_forced_tokens": [7, 7, 7], "tandem_emitted_tokens": [7, 7]}}
    assert said(await stream(engine, endpoint, forced)) == said(await stream(engine, endpoint, body))
