"""Prefill's first token in the router: its delivery to the client, over in-process handles."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from actors.errors import CannotResumeError, EngineDownError, UnavailableError
from actors.request import TRANSFER_FIELD, Call, EngineTimings, FirstTokenChunk, ResponseStart, TokenChunk, TokenSource
from actors.router.answer import Answer
from actors.router.client_request import is_one_token, needs_seed, why_decode_samples
from actors.router.router import Router
from testing.answers import body_of
from tests.actors.behaviours import EVENTS, JSON, LIMITS, TOKENS, answers, ask, counted, dies, engine, event, request
from tests.actors.fleet import METADATA, SOURCE, Handle, Replica, at_rest, router_of

pytestmark = pytest.mark.usefixtures("virtual_time")

FIRST = event(1, index=0, role="assistant", text="") + event(1, index=0, text="<0>", finish_reason=None)
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


def gated(serve: Any, gate: asyncio.Event) -> Any:
    """A decode engine that answers when `gate` is set."""

    async def wait(call: Call, turn: int) -> AsyncGenerator[Any, None]:
        await gate.wait()
        async for item in serve(call, turn):
            yield item

    return wait


async def whole(decode: Any) -> bytes:
    """The stream with decode's first token."""
    router, p, d = fleet([samples()], [decode], multiple=0)
    _, body = await ask(router, request())
    await at_rest(p, d)
    return body


async def test_the_first_token_is_sent_before_decode_answers():
    """The router does not send decode's events for this token again."""
    gate = asyncio.Event()
    router, p, d = fleet([samples()], [gated(engine(1, [1]), gate)])
    async with router.answer(request()) as answer:
        body = body_of(answer)
        first = await anext(body)
        assert (first, answer.sampled_by, answer.prompt_tokens) == (FIRST, "prefill", 9)
        gate.set()
        rest = b"".join([some async for some in body])
    assert (first + rest).replace(b": ping\n\n", b"") == (await whole(engine(1, [1]))).replace(b": ping\n\n", b"")
    assert answer.completion_tokens == TOKENS
    assert counted(router, "tandem_first_tokens_total", outcome="repeated") == 1
    await at_rest(p, d)


async def test_decode_with_another_prompt_does_not_continue_prefills_token():
    """An image URL may return other content to each engine."""
    router, p, d = fleet([samples(prompt=b"one")], [later(engine(1, [1], prompt=b"other"))] * 2)
    async with router.answer(request()) as answer:
        body = body_of(answer)
        assert await anext(body) == FIRST
        with pytest.raises(CannotResumeError, match="built a different prompt"):
            async for _ in body:
                pass
    assert len(d.calls) == 1, "no other engine is forced to continue"
    assert counted(router, "tandem_first_tokens_total", outcome="refused") == 1
    await at_rest(p, d)


async def test_decode_with_prefills_prompt_continues_its_token():
    router, p, d = fleet([samples(prompt=b"one")], [later(engine(1, [1], prompt=b"one"))])
    assert (await ask(router, request()))[1].endswith(b"data: [DONE]\n\n")
    await at_rest(p, d)


async def test_decode_with_another_adapter_does_not_continue_prefills_token():
    router, p, d = fleet([samples(source=TokenSource("model", "x"))], [later(engine(1, [1]))] * 2)
    with pytest.raises(CannotResumeError, match="another model or adapter"):
        await ask(router, request())
    assert len(d.calls) == 1
    await at_rest(p, d)


async def test_decode_that_does_not_know_its_adapter_yet_is_tried_again():
    """vLLM may report an adapter after its first token. Prefill's token stays."""

    async def learns(call: Call, turn: int) -> AsyncGenerator[Any, None]:
        async for item in later(engine(1, [1], source=SOURCE if turn > 1 else None))(call, turn):
            yield item

    router, p, d = fleet([samples()], [learns])
    answer, body = await ask(router, request())
    assert (body.endswith(b"data: [DONE]\n\n"), answer.sampled_by, len(d.calls)) == (True, "prefill", 2)
    assert d.calls[1].replay_log == ((0,),)
    await at_rest(p, d)


@pytest.mark.parametrize("known", [True, False])
async def test_a_first_token_of_unknown_weights_is_not_sent(known: bool):
    """Prefill cannot tell which adapter it has, or both engines are of an earlier release."""
    router, p, d = fleet([samples(source=None)], [later(engine(1, [1]))])
    if not known:
        for replica in (*p.replicas, *d.replicas):
            replica.identity = ""
    answer, body = await ask(router, request())
    assert (body, answer.sampled_by) == (await whole(engine(1, [1])), "decode")
    assert ("first_token" in json.loads(p.calls[0].body)[TRANSFER_FIELD]) == known
    await at_rest(p, d)


async def test_the_deadline_of_the_first_token_ends_with_it():
    """Decode takes over, or another attempt continues, within `idle_timeout_s`."""
    gate = asyncio.Event()
    router, p, d = fleet([samples()], [gated(dies, gate), engine(1, [1])])
    router.limits = router.limits.model_copy(update={"first_token_timeout_s": 60.0, "idle_timeout_s": 6000.0})
    async with router.answer(request()) as answer:
        body = body_of(answer)
        await anext(body)
        assert isinstance(answer, Answer)
        assert answer._dispatcher.left_s > 3000  # noqa: SLF001
        gate.set()
        rest = b"".join([some async for some in body])
    assert rest.endswith(b"data: [DONE]\n\n")
    await at_rest(p, d)


@pytest.mark.parametrize("part", [FIRST[:20], FIRST[: len(FIRST) // 2 + 30], b""])
async def test_events_that_prefill_has_sent_in_part(part: bytes):
    """Decode's events replace those that the client has not received whole."""
    router, p, d = fleet([samples(part)], [later(engine(1, [1]))])
    answer, body = await ask(router, request())
    expected = await whole(engine(1, [1]))
    assert body.replace(b": ping\n\n", b"") == expected.replace(b": ping\n\n", b"")
    assert (answer.sampled_by, answer.completion_tokens) == ("prefill" if b"\n\n" in part else "decode", TOKENS)
    await at_rest(p, d)


async def test_an_answer_that_ends_with_its_first_token_needs_no_decode():
    """Decode's call is cancelled, and the transfer discarded."""
    router, p, d = fleet([samples(LAST)], [gated(engine(1, [1]), asyncio.Event())])
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

    router, p, d = fleet([keeps_alive], [gated(engine(1, [1]), asyncio.Event())])
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
    router, p, d = fleet([one_token], [engine(1, [1])])
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
    "prefill", [answers(400, {"error": "refused"}), answers(500, {"error": "broken"}), dies, breaks, dies_after_a_token]
)
async def test_prefill_that_cannot_answer_for_one_token(prefill: Any):
    """Decode answers, and repeats the tokens that the client has received."""
    router, p, d = fleet([prefill], [engine(1, [1])])
    _, body = await ask(router, request(max_tokens=1))
    expected = await whole(engine(1, [1]))
    assert body.replace(b": ping\n\n", b"") == expected.replace(b": ping\n\n", b"")
    assert d.calls[-1].replay_log == (((0,),) if prefill is dies_after_a_token else ())
    await at_rest(p, d)


async def test_prefill_whose_tokens_differ_answers_no_request():
    """The router never requests a first token if the address has no `first_token_multiple`."""
    router, p, d = fleet([samples()], [engine(1, [1])], multiple=0)
    answer, _ = await ask(router, request(max_tokens=1))
    assert (answer.sampled_by, len(d.calls)) == ("decode", 1)
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


async def test_another_first_token_of_decode_is_not_sent():
    """The second attempt repeats prefill's token."""

    async def serve(call: Call, turn: int) -> AsyncGenerator[Any, None]:
        if call.replay_log:
            async for item in engine(1, [1])(call, turn):
                yield item
            return
        yield ResponseStart(200, EVENTS)
        data = event(1, index=0, role="assistant", text="") + event(1, index=0, text="<7>")
        yield TokenChunk(data, ((7,),), source=SOURCE)
        await asyncio.sleep(60)

    router, p, d = fleet([samples()], [later(serve)])
    _, body = await ask(router, request())
    expected = await whole(engine(1, [1]))
    assert body.replace(b": ping\n\n", b"") == expected.replace(b": ping\n\n", b"")
    assert [call.replay_log for call in d.calls] == [(), ((0,),)]
    assert "first_token" not in json.loads(p.calls[1].body)[TRANSFER_FIELD]
    assert counted(router, "tandem_first_tokens_total", outcome="replayed") == 1
    await at_rest(p, d)


@pytest.mark.parametrize("first", [FIRST, FIRST.partition(b"\n\n")[2]], ids=["two events", "one event"])
async def test_an_error_of_decode_after_the_first_token_is_sent(first: bytes):
    """The client must not take the token for the whole answer."""
    said = b'data: {"error": {"message": "m", "type": "InternalServerError", "param": null, "code": 500}}\n\n'

    async def fails(call: Call, _: int) -> AsyncGenerator[Any, None]:
        yield ResponseStart(200, EVENTS)
        yield said + b"data: [DONE]\n\n"

    router, p, d = fleet([samples(first)], [later(fails)])
    _, body = await ask(router, request())
    assert body == first + said + b"data: [DONE]\n\n"
    await at_rest(p, d)


@pytest.mark.parametrize(
    "fails",
    [
        *(pytest.param(engine(1, [1], dies_after=tokens), id=f"dies after {tokens}") for tokens in range(3)),
        *(pytest.param(answers(status, {}), id=f"HTTP {status}") for status in (429, 500, 503)),
    ],
)
async def test_decode_that_fails_around_its_first_token(fails: Any):
    """Another decode engine repeats the tokens that the client has received."""
    router, p, d = fleet([samples()], [later(fails), engine(2, [1])])
    _, body = await ask(router, request())
    expected = await whole(engine(1, [1]))
    assert body.replace(b": ping\n\n", b"") == expected.replace(b": ping\n\n", b"")
    assert {call.replay_log[:1] for call in d.calls} == {(), ((0,),)}
    await at_rest(p, d)


async def test_decode_that_stays_busy_after_the_first_token_is_asked_twice():
    router, p, d = fleet([samples()], [later(answers(429, {}))])
    with pytest.raises(UnavailableError, match="continue the stream answered HTTP 429"):
        await ask(router, request())
    assert len(d.calls) == 2
    await at_rest(p, d)


async def test_decode_that_dies_after_prefills_first_token_is_not_expected_to_hold_the_prompt():
    router, p, d = fleet([samples()], [later(engine(1, [1], dies_after=0)), later(engine(2, [1]))])
    await ask(router, request(prompt="word " * 400))
    assert [len(replica.calls) for replica in d.replicas] == [1, 1]
    await at_rest(p, d)
    held = router.models[0].planner._prefixes._caches  # noqa: SLF001
    assert held["d1"]
    assert not held["d0"]


async def test_prefill_that_dies_after_its_first_token():
    """A later attempt repeats the token, and the client receives each event once."""
    gate = asyncio.Event()
    behaviours = [gated(engine(1, [1]), gate), engine(1, [1])]
    router, p, d = fleet([samples(dies=True)], [lambda call, turn: behaviours[turn - 1](call, turn)])
    _, body = await ask(router, request())
    expected = await whole(engine(1, [1]))
    assert body.replace(b": ping\n\n", b"") == expected.replace(b": ping\n\n", b"")
    await at_rest(p, d)


ERROR = b'{"error": {"message": "refused"}}'


@pytest.mark.parametrize(
    "items",
    [
        [ResponseStart(400, JSON), ERROR],
        [ResponseStart(500, JSON), ERROR],
        [ResponseStart(200, EVENTS), b"data: " + ERROR + b"\n\ndata: [DONE]\n\n"],
    ],
    ids=["bad request", "server error", "error event"],
)
async def test_a_refused_first_token_leg_is_noticed_at_once(items: list[Any]):
    """Decode does not wait for KV that never comes. An older engine holds refused calls."""

    async def refuses(call: Call, _: int) -> AsyncGenerator[Any, None]:
        for item in items:
            yield item
        if items[0].status >= 400:
            await asyncio.sleep(60)

    behaviours = [gated(engine(1, [1]), asyncio.Event()), engine(1, [1])]
    router, p, d = fleet([refuses], [lambda call, turn: behaviours[turn - 1](call, turn)])
    async with asyncio.timeout(20):
        answer, body = await ask(router, request())
    assert (answer.sampled_by, answer.local_reason) == ("decode", "prefill_failed")
    assert body.replace(b": ping\n\n", b"") == (await whole(engine(1, [1]))).replace(b": ping\n\n", b"")
    assert TRANSFER_FIELD not in json.loads(d.calls[1].body)
    await at_rest(p, d)


async def test_both_legs_draw_with_the_same_seed():
    """The legs have the client's seed, or one of the router; at temperature 0 they have none."""
    cases: list[tuple[dict[str, Any], set[int | None]]] = [({"seed": 5}, {5}), ({"temperature": 0}, {None})]
    for more, seeds in cases:
        router, p, d = fleet([samples()], [engine(1, [1])])
        await ask(router, request(**more))
        assert {json.loads(call.body).get("seed") for call in (*p.calls, *d.calls)} == seeds
    router, p, d = fleet([samples()], [engine(1, [1])])
    await ask(router, request())
    [seed] = {json.loads(call.body)["seed"] for call in (*p.calls, *d.calls)}
    assert 0 <= seed < 2**31


@pytest.mark.parametrize(
    ("body", "needed"),
    [
        ({}, True),
        ({"seed": 0}, False),
        ({"temperature": 0}, False),
        ({"temperature": 0.1}, True),
        ({"seed": None}, True),
    ],
)
def test_needs_seed(body: dict[str, Any], needed: bool):
    assert needs_seed(body) == needed


def test_what_decode_samples():
    assert why_decode_samples("/v1/completions", {"stream": True}) is None
    assert why_decode_samples("/v1/chat/completions", {"stream": True}) is None
    assert why_decode_samples("/v1/completions", {}) == "not streamed"
    assert why_decode_samples("/v1/responses", {"stream": True}) == "engine-specific ids"
    assert why_decode_samples("/v1/messages", {"stream": True}) == "no seed"
    assert why_decode_samples("/v1/completions", {"stream": True, "n": 2}) == "n > 1"
