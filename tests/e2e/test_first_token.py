"""Prefill samples the first token: the client's stream equals decode's own, byte for byte."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio

from actors.request import Call, Endpoint
from testing.answers import whole_body
from testing.facts import make_prompt
from testing.sse import said
from testing.streams import KINDS, MODEL, chat, completion
from tests.actors.behaviours import counted
from tests.e2e.two_engines import EnginePair, Fault, request, start

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module")]

LONG = make_prompt(random.Random("first token"), 24, distance_facts=23).text
"""A prompt of about 170 tokens: several chunks and blocks."""

Kind = tuple[Endpoint, dict[str, Any]]


def long(kind: Kind) -> Kind:
    endpoint, body = kind
    new = {"prompt": LONG} if "prompt" in body else {"messages": [{"role": "user", "content": LONG}]}
    return endpoint, body | new | {"max_tokens": 12, "min_tokens": min(body.get("min_tokens", 0), 6)}


SEAM: dict[str, Kind] = {
    "one token": completion(temperature=0, max_tokens=1),
    "two tokens": completion(temperature=0, max_tokens=2, logprobs=2),
    "three tokens": chat(seed=5, max_tokens=3, logprobs=True, top_logprobs=1),
    "default length": completion(temperature=0, max_tokens=None, stop=["\n"]),
    "without options": ("/v1/completions", {"model": MODEL, "prompt": LONG, "max_tokens": 4, "stream": True}),
    "continuous usage": completion(
        temperature=0, max_tokens=4, stream_options={"include_usage": True, "continuous_usage_stats": True}
    ),
    "a short prompt": completion(temperature=0, prompt="ab", max_tokens=4, ignore_eos=True),
    "a block": completion(temperature=0, prompt=list(range(3, 3 + 16)), max_tokens=4, ignore_eos=True),
    "a block and a token": completion(temperature=0, prompt=list(range(3, 3 + 17)), max_tokens=4, ignore_eos=True),
    "a chunk": completion(temperature=0, prompt=list(range(3, 3 + 64)), max_tokens=4, ignore_eos=True),
    "a chunk and a token": completion(temperature=0, prompt=list(range(3, 3 + 65)), max_tokens=4, ignore_eos=True),
}


ATTEMPTS = 5


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engines() -> AsyncIterator[EnginePair]:
    pair = EnginePair(await start("prefill"), await start("decode"))
    yield pair
    await pair.close()


@pytest_asyncio.fixture(loop_scope="module")
async def pair(engines: EnginePair) -> AsyncIterator[EnginePair]:
    yield engines
    assert await engines.idle()


async def stream(
    pair: EnginePair, kind: Kind, first_token: str, *faults: Fault, sampled_by: tuple[str, ...] = ("prefill",)
) -> tuple[bytes, Any]:
    """The stream of a request, and its router. All slots, calls and blocks are free after it.

    ``sampled_by``  roles that may sample the first token, if it is prefill's
    """
    router, prefill, decode = pair.router(first_token, *faults)
    async with router.answer(request(*kind)) as answer:
        sent = await whole_body(answer)
        assert answer.start.streams, sent
        assert answer.sampled_by in (sampled_by if first_token == "prefill" else (None,))
    await at_rest_of(prefill, decode)
    return sent, router


async def at_rest_of(*handles: Any) -> None:
    async with asyncio.timeout(60):
        while any(handle.taken or handle.running for handle in handles):  # noqa: ASYNC110 - they have no event
            await asyncio.sleep(0.001)


def dated(sent: bytes) -> list[bytes]:
    """The events of a stream without what differs between two equal requests."""
    sent = re.sub(rb'"created":\d+', b'"created":0', sent)
    return re.sub(rb'"(call_|chatcmpl-tool-)[\w-]+"', b'"call"', sent).split(b"\n\n")


@pytest.mark.parametrize("name", [*(name for name in KINDS if name != "echo"), *SEAM])
async def test_streams_are_those_of_decode(pair: EnginePair, name: str) -> None:
    """Every event, with usage, logprobs, tool calls and finish reason.

    vLLM joins outputs that the serving layer has not read, so a busy machine may change the number
    of events in one of the streams.
    """
    kind = SEAM[name] if name in SEAM else long(KINDS[name])
    for _ in range(ATTEMPTS):
        expected, _ = await stream(pair, kind, "decode")
        sent, router = await stream(pair, kind, "prefill")
        if kind[1].get("temperature") != 0 and kind[1].get("seed") is None:
            break
        assert said(sent) == said(expected)
        if dated(sent) == dated(expected):
            break
    else:
        assert dated(sent) == dated(expected)
    ended = kind[1]["max_tokens"] == 1
    assert counted(router, "tandem_first_tokens_total", outcome="ended" if ended else "repeated") == 1


GREEDY = completion(prompt=LONG, temperature=0, max_tokens=8, ignore_eos=True, logprobs=2)
SEEDED = completion(prompt=LONG, temperature=2.0, seed=17, max_tokens=8, ignore_eos=True, return_token_ids=True)
DEATHS: dict[str, tuple[int | None, ...]] = {
    "decode before its first": (None, 0, None),
    "decode after its first": (None, 1, None),
    "decode after its second": (None, 2, None),
    "prefill": (1, None, None),
    "both": (1, 1, None),
}
"""Tokens after which prefill and the decode replicas die."""


@pytest.mark.parametrize("kind", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("name", DEATHS)
async def test_engines_that_die_after_the_first_token(pair: EnginePair, kind: Kind, name: str) -> None:
    """The stream resumes with the token that the client has.

    If decode dies before prefill has sampled, the next attempt's prefill has the prompt cached, and
    decode's token may overtake prefill's.
    """
    overtaken = ("prefill", "decode") if DEATHS[name][1] == 0 else ("prefill",)
    expected, _ = await stream(pair, kind, "decode")
    sent, _ = await stream(pair, kind, "prefill", *map(Fault, DEATHS[name]), sampled_by=overtaken)
    assert said(sent) == said(expected)


async def test_decode_that_draws_another_token(pair: EnginePair) -> None:
    """Prefill's token stays: the stream is sent again with it."""
    expected, _ = await stream(pair, SEEDED, "decode")
    first = said(expected)["token_ids"][0]

    def without_first(call: Call) -> Call:
        changed = json.dumps(json.loads(call.body) | {"logit_bias": {str(first): -100}}).encode()
        return call if call.replay_log else replace(call, body=changed)

    sent, router = await stream(pair, SEEDED, "prefill", Fault(), Fault(change=without_first))
    assert said(sent) == said(expected)
    assert counted(router, "tandem_first_tokens_total", outcome="replayed") == 1
