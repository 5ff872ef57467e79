"""Prefill's first token in the router: its delivery to the client, over in-process handles."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

import pytest

from actors.errors import CannotResumeError, EngineDownError, UnavailableError
from actors.request import TRANSFER_FIELD, Call, EngineTimings, FirstTokenChunk, ResponseStart, TokenChunk, TokenSource
from actors.router.answer import Answer
from actors.router.client_request import is_one_token, needs_seed, prefill_may_sample
from actors.router.router import Router
from testing.answers import body_of
from tests.actors.behaviours import (
    EVENTS,
    JSON,
    LIMITS,
    TOKENS,
    answers,
    ask,
    counted,
    dies,
    engine,
    event,
    hangs,
    request,
)
from tests.actors.fleet import METADATA, SOURCE, Handle, Replica, at_rest, router_of

pytestmark = pytest.mark.usefixtures("virtual_time")

SECOND_EVENT = event(1, index=0, text="<0>", finish_reason=None)
FIRST = event(1, index=0, role="assistant", text="") + SECOND_EVENT
LAST = event(1, index=0, text="<0>", finish_reason="length") + b"data: [DONE]\n\n"


def samples(
    body: bytes = FIRST, dies: bool = False, prompt: bytes | None = None, source: TokenSource | None = SOURCE
) -> Any:
    """A prefill engine that sends the first token, if it is asked for it, and is held."""

    async def serve(call: Call, _: int) -> AsyncGenerator[Any, None]:
        yield ResponseStart(200, EVENTS)
        if json.loads(call.body)[TRANSFER_FIELD].get("first_token"):
            yield FirstTokenChunk(body, ((0,),), None, 9, prompt, source)
            if dies:
                raise EngineDownError("killed")
        else:
            yield b"{}"
        await asyncio.sleep(60)

    return serve


def later(serve: Any) -> Any:
    """A decode engine that answers after prefill."""

    async def wait(call: Call, turn: int) -> AsyncGenerator[Any, None]:
        await asyncio.sleep(0.05)
        async for item in serve(call, turn):
            yield item

    return wait


def fleet(prefill: list[Any], decode: list[Any], multiple: int = 16) -> tuple[Router, Handle, Handle]:
    p = Handle([Replica(f"p{n}", serve) for n, serve in enumerate(prefill)])
    p.metadata = {"producer": METADATA["producer"] | {"first_token_multiple": multiple}}
    d = Handle([Replica(f"d{n}", serve) for n, serve in enumerate(decode)][::-1])
    d.in_order = True
    return router_of(LIMITS.model_copy(update={"first_token": "prefill"}), p, d), p, d


async def own_stream() -> bytes:
    """Return decode's stream with its own first token."""
    router, p, d = fleet([samples()], [DECODE], multiple=0)
    _, body = await ask(router, request())
    await at_rest(p, d)
    return without_pings(body)


def without_pings(body: bytes) -> bytes:
    return body.replace(b": ping\n\n", b"")


async def learns(call: Call, turn: int) -> AsyncGenerator[Any, None]:
    """A decode engine that knows its adapter from the second call on: vLLM may report it after the
    first token.
    """
    async for item in engine(1, [1], source=SOURCE if turn > 1 else None)(call, turn):
        yield item


async def draws_another(call: Call, turn: int) -> AsyncGenerator[Any, None]:
    if call.replay_log:
        async for item in engine(1, [1])(call, turn):
            yield item
        return
    yield ResponseStart(200, EVENTS)
    data = event(1, index=0, role="assistant", text="") + event(1, index=0, text="<7>")
    yield TokenChunk(data, ((7,),), source=SOURCE)
    await asyncio.sleep(60)


async def fails(call: Call, _: int) -> AsyncGenerator[Any, None]:
    yield ResponseStart(200, EVENTS)
    yield ERROR_EVENT


def refuses(*items: Any) -> Any:
    """A prefill engine that refuses. An older one holds refused calls."""

    async def serve(call: Call, _: int) -> AsyncGenerator[Any, None]:
        for item in items:
            yield item
        if items[0].status >= 400:
            await asyncio.sleep(60)

    return serve


def in_turn(*behaviours: Any) -> Any:
    """One replica with a behaviour for each call."""
    return lambda call, turn: behaviours[turn - 1](call, turn)


REFUSAL = b'{"error": {"message": "refused"}}'
ERROR_EVENT = (
    b'data: {"error": {"message": "m", "type": "InternalServerError", "param": null, "code": 500}}\n\ndata: [DONE]\n\n'
)
OWN = "decode's own stream"
REPLAYED = ((0,),)
DECODE = engine(1, [1])
OTHER_PROMPT, OTHER_MODEL = (CannotResumeError, "different prompt"), (CannotResumeError, "another model or adapter")


@dataclass
class Case:
    """Behaviours of prefill and, in the order of their calls, decode; the stream or error.

    ``replays``  replay log of each call to decode
    ``outcome``  what is counted for the first token
    """

    name: str
    prefill: Any
    decode: list[Any]
    end: Any = OWN
    replays: list[Any] | None = None
    sampled_by: str = "prefill"
    outcome: str | None = None


CASES = [
    Case("same prompt", samples(prompt=b"one"), [engine(1, [1], prompt=b"one")], replays=[()]),
    # An image URL may return other content to each engine. No other engine is forced to continue.
    Case(
        "other prompt", samples(prompt=b"one"), [engine(1, [1], prompt=b"b")] * 2, OTHER_PROMPT, [()], outcome="refused"
    ),
    Case("other adapter", samples(source=TokenSource("model", "x")), [DECODE] * 2, OTHER_MODEL, [()]),
    Case("adapter known later", samples(), [learns], replays=[(), REPLAYED]),
    Case("prefill's adapter unknown", samples(source=None), [DECODE], sampled_by="decode"),
    # Decode's events replace those that the client has not received whole.
    Case("part of an event", samples(FIRST[:20]), [DECODE], sampled_by="decode"),
    Case("one and a half events", samples(FIRST[: len(FIRST) // 2 + 30]), [DECODE]),
    Case("no event", samples(b""), [DECODE], sampled_by="decode"),
    Case("another token", samples(), [draws_another], replays=[(), REPLAYED], outcome="replayed"),
    # The client must not take the token for the whole answer.
    *(Case(f"error after {len(one)} bytes", samples(one), [fails], one + ERROR_EVENT) for one in (FIRST, SECOND_EVENT)),
    # Another decode engine repeats the tokens that the client has.
    *(Case(f"dies after {n}", samples(), [engine(1, [1], n), DECODE]) for n in range(3)),
    *(Case(f"HTTP {n}", samples(), [answers(n, {}), DECODE], replays=[(), *[REPLAYED] * 2]) for n in (429, 500, 503)),
    Case("stays busy", samples(), [answers(429, {})], (UnavailableError, "HTTP 429"), [(), REPLAYED]),
    Case("prefill dies", samples(dies=True), [in_turn(hangs, DECODE)]),
    # Decode does not wait for KV that never comes.
    *(
        Case(f"prefill refuses {number}", refuses(*items), [in_turn(hangs, DECODE)], sampled_by="decode")
        for number, items in enumerate(
            (
                (ResponseStart(400, JSON), REFUSAL),
                (ResponseStart(500, JSON), REFUSAL),
                (ResponseStart(200, EVENTS), b"data: " + REFUSAL + b"\n\ndata: [DONE]\n\n"),
            )
        )
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
async def test_a_stream_after_prefills_first_token(case: Case) -> None:
    """The client receives each event once, whoever fails."""
    router, p, d = fleet([case.prefill], [later(serve) for serve in case.decode])
    async with asyncio.timeout(20):
        if isinstance(case.end, tuple):
            with pytest.raises(case.end[0], match=case.end[1]):
                await ask(router, request())
        else:
            answer, body = await ask(router, request())
            assert without_pings(body) == (await own_stream() if case.end == OWN else case.end)
            assert case.name == "prefill dies" or answer.sampled_by == case.sampled_by
            assert case.end != OWN or answer.completion_tokens == TOKENS
            assert answer.local_reason == ("prefill_failed" if case.name.startswith("prefill ") else None)
    assert case.replays in (None, [call.replay_log for replica in d.replicas[::-1] for call in replica.calls])
    if case.outcome:
        assert counted(router, "tandem_first_tokens_total", outcome=case.outcome) == 1
    await at_rest(p, d)


async def test_the_first_token_is_sent_before_decode_answers():
    """The router does not send decode's events for this token again."""
    router, p, d = fleet([samples()], [later(DECODE)])
    async with router.answer(request()) as answer:
        body = body_of(answer)
        first = await anext(body)
        assert (first, answer.sampled_by, answer.prompt_tokens) == (FIRST, "prefill", 9)
        rest = b"".join([some async for some in body])
    assert without_pings(first + rest) == await own_stream()
    assert answer.completion_tokens == TOKENS
    assert counted(router, "tandem_first_tokens_total", outcome="repeated") == 1
    await at_rest(p, d)


async def test_the_deadline_of_the_first_token_ends_with_it():
    """Decode takes over, or another attempt continues, within `idle_timeout_s`."""
    router, p, d = fleet([samples()], [later(dies), DECODE])
    router.limits = router.limits.model_copy(update={"first_token_timeout_s": 60.0, "idle_timeout_s": 6000.0})
    async with router.answer(request()) as answer:
        body = body_of(answer)
        await anext(body)
        assert isinstance(answer, Answer)
        assert answer._dispatcher.left_s > 3000  # noqa: SLF001
        rest = b"".join([some async for some in body])
    assert rest.endswith(b"data: [DONE]\n\n")
    await at_rest(p, d)


async def test_an_answer_that_ends_with_its_first_token_needs_no_decode():
    """Decode's call is cancelled, and the transfer discarded."""
    router, p, d = fleet([samples(LAST)], [hangs])
    _, body = await ask(router, request())
    assert body == LAST
    assert counted(router, "tandem_first_tokens_total", outcome="ended") == 1
    await at_rest(p, d)
    assert p.discarded == [json.loads(d.calls[0].body)[TRANSFER_FIELD]["transfer_id"]]


async def test_a_comment_before_the_first_token_does_not_start_the_response():
    """Until the first event, the router may still change the status."""

    async def keeps_alive(call: Call, _: int) -> AsyncGenerator[Any, None]:
        yield ResponseStart(200, EVENTS)
        yield b": keep-alive\n\n"
        await asyncio.sleep(0.05)
        yield FirstTokenChunk(LAST, ((0,),), None, 9, None, SOURCE)
        await asyncio.sleep(60)

    router, p, d = fleet([keeps_alive], [hangs])
    async with router.answer(request()) as answer:
        pieces = [piece async for piece in body_of(answer)]
    assert pieces == [b": keep-alive\n\n" + LAST]
    await at_rest(p, d)


async def test_the_first_byte_is_that_of_the_answer():
    """The first engine's stream had no whole event: the client receives another answer."""

    async def ends_within_event(call: Call, _: int) -> AsyncGenerator[Any, None]:
        yield ResponseStart(200, EVENTS)
        yield TokenChunk(b"data: {", ())
        await asyncio.sleep(7)
        raise EngineDownError("killed")

    router, p, d = fleet([samples()], [ends_within_event, engine(1, [1])], multiple=0)
    async with router.answer(request()) as answer:
        async for _ in body_of(answer):
            break
        assert answer.first_byte_s >= 7
    await at_rest(p, d)


async def one_token(call: Call, _: int) -> AsyncGenerator[Any, None]:
    """An engine that computes a whole answer of one token."""
    if json.loads(call.body)["stream"]:
        yield ResponseStart(200, EVENTS)
        yield TokenChunk(LAST, ((0,),), EngineTimings(0, 1e-6, 2e-6, 3e-6))
    else:
        yield ResponseStart(200, JSON)
        yield b'{"text": "<0>"}'


@pytest.mark.parametrize("stream", [True, False])
async def test_a_request_for_one_token_is_answered_by_prefill_alone(stream: bool):
    """The router calls no decode engine, and no KV moves."""
    router, p, d = fleet([one_token], [DECODE])
    wanted = request(stream, max_tokens=1)
    answer, body = await ask(router, wanted)
    assert body == (LAST if stream else b'{"text": "<0>"}')
    assert (answer.sampled_by, answer.route, answer.pair.prefill, answer.pair.decode) == (
        "prefill",
        "remote",
        "p0",
        None,
    )
    assert answer.completion_tokens == (1 if stream else None)
    assert [call.body for call in p.calls] == [wanted.raw]
    parts = answer.breakdown.parts
    assert ("prefill_queue" in parts, "decode_queue" in parts) == (stream, False)
    assert counted(router, "tandem_first_tokens_total", outcome="ended") == 1
    await at_rest(p, d)
    assert (d.calls, p.discarded) == ([], [])


async def breaks(call: Call, _: int) -> AsyncGenerator[Any, None]:
    """An engine that dies within the first event."""
    yield ResponseStart(200, EVENTS)
    yield TokenChunk(LAST[:20], ((0,),))
    raise EngineDownError("killed")


async def dies_after_a_token(call: Call, _: int) -> AsyncGenerator[Any, None]:
    yield ResponseStart(200, EVENTS)
    yield TokenChunk(FIRST, ((0,),), source=SOURCE)
    raise EngineDownError("killed")


@pytest.mark.parametrize(
    ("prefill", "multiple"),
    [
        *((answers(status, {"error": "no"}), 16) for status in (400, 500)),
        *((serve, 16) for serve in (dies, breaks, dies_after_a_token)),
        # The router never requests a first token if the address has no `first_token_multiple`.
        (one_token, 0),
    ],
)
async def test_prefill_that_cannot_answer_for_one_token(prefill: Any, multiple: int):
    """Decode answers, and repeats the tokens that the client has received."""
    router, p, d = fleet([prefill], [DECODE], multiple)
    answer, body = await ask(router, request(max_tokens=1))
    assert without_pings(body) == await own_stream()
    again = prefill is dies_after_a_token
    assert (answer.sampled_by, d.calls[-1].replay_log) == (("prefill", ((0,),)) if again else ("decode", ()))
    await at_rest(p, d)


@pytest.mark.parametrize(
    ("endpoint", "body", "one"),
    [
        ("/v1/completions", {"max_tokens": 1}, True),
        ("/v1/completions", {"max_tokens": 2}, False),
        ("/v1/completions", {"max_tokens": True}, False),
        ("/v1/completions", {}, False),
        ("/v1/chat/completions", {"max_tokens": 5, "max_completion_tokens": 1}, True),
        ("/v1/chat/completions", {"max_tokens": 1, "max_completion_tokens": 5}, False),
        ("/v1/messages", {"max_tokens": 1}, True),
        ("/v1/responses", {"max_tokens": 1, "max_output_tokens": 1}, False),
    ],
)
def test_is_one_token(endpoint: Any, body: dict[str, Any], one: bool):
    assert is_one_token(endpoint, body) == one


async def test_decode_that_dies_after_prefills_first_token_is_not_expected_to_hold_the_prompt():
    router, p, d = fleet([samples()], [later(engine(1, [1], dies_after=0)), later(engine(2, [1]))])
    await ask(router, request(prompt="word " * 400))
    assert [len(replica.calls) for replica in d.replicas] == [1, 1]
    await at_rest(p, d)
    held = router.models[0].planner._prefixes._caches  # noqa: SLF001
    assert held["d1"]
    assert not held["d0"]


@pytest.mark.parametrize(
    ("body", "needed"),
    [({}, True), ({"temperature": 0.1, "seed": None}, True), ({"seed": 0}, False), ({"temperature": 0}, False)],
)
async def test_both_legs_draw_with_the_same_seed(body: dict[str, Any], needed: bool):
    """The client's, or one of the router; at temperature 0 they need none."""
    assert needs_seed(body) == needed
    router, p, d = fleet([samples()], [DECODE])
    await ask(router, request(**body))
    [seed] = {json.loads(call.body).get("seed") for call in (*p.calls, *d.calls)}
    assert 0 <= seed < 2**31 if needed else seed == body.get("seed")
    await at_rest(p, d)


def test_what_prefill_samples():
    assert prefill_may_sample("/v1/completions", {"stream": True})
    assert prefill_may_sample("/v1/chat/completions", {"stream": True})
    assert not prefill_may_sample("/v1/responses", {"stream": True})
    assert not prefill_may_sample("/v1/messages", {"stream": True})
    for body in ({}, {"stream": 1}, {"stream": True, "n": 2}):
        assert not prefill_may_sample("/v1/completions", body)


async def test_engines_of_an_earlier_release_are_not_asked_for_a_first_token():
    router, p, d = fleet([samples(source=None)], [later(DECODE)])
    for replica in (*p.replicas, *d.replicas):
        replica.identity = ""
    answer, body = await ask(router, request())
    assert (without_pings(body), answer.sampled_by) == (await own_stream(), "decode")
    assert "first_token" not in json.loads(p.calls[0].body)[TRANSFER_FIELD]
    await at_rest(p, d)
