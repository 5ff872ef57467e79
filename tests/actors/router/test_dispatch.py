"""Failed legs, and the router's reaction: the real router over in-process handles."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from actors.errors import CannotResumeError, DeadlineError, EngineDownError, UnavailableError
from actors.request import TRANSFER_FIELD, Call, Heartbeat, ResponseStart, StreamChunk, TokenChunk, TokenSource
from testing.answers import body_of
from testing.sse import said
from tests.actors.behaviours import (
    EVENTS,
    JSON,
    LIMITS,
    OK,
    TOKENS,
    WHOLE,
    answers,
    ask,
    counted,
    cut_off,
    dies,
    engine,
    event,
    fed,
    fleet,
    hangs,
    prefills,
    request,
    transfers,
    well,
)
from tests.actors.fleet import METADATA, SOURCE, Handle, Replica, at_rest, router_of

pytestmark = pytest.mark.usefixtures("virtual_time")


@pytest.mark.parametrize("fault", [dies, answers(503, {}), hangs], ids=["dies", "refuses", "is late"])
async def test_a_broken_prefill_leg_goes_to_another_replica(fault):
    """Each retry has a new transfer id, also on decode: an id is valid for one request."""
    router, p, d = fleet([fault, well], [OK])
    if fault is hangs:
        router.limits = LIMITS.model_copy(update={"prefill_timeout_s": 1})
    for _ in range(4):
        answer, body = await ask(router, request(stream=False))
        assert (answer.route, json.loads(body)) == ("remote", WHOLE)
    await at_rest(p, d)
    assert 0 < len(p.replicas[0].calls) < 4, "the broken replica is called in its turn, once per request"
    assert len(set(transfers(p))) == len(p.calls) == 4 + len(p.replicas[0].calls)
    assert set(transfers(d)) <= set(transfers(p))
    late = "late" if fault is hangs else "failed"
    assert counted(router, "tandem_retries_total", leg="prefill", reason=late) == len(p.replicas[0].calls)


@pytest.mark.parametrize(("replicas", "asked"), [(1, 1), (2, 2), (3, 3), (5, 3)])
async def test_when_prefill_legs_keep_breaking_decode_serves_alone(replicas, asked):
    """Decode serves alone after `attempts` failures, or if no other prefill replica is left."""
    router, p, d = fleet([dies] * replicas, [OK])
    answer, body = await ask(router, request(stream=False))
    await at_rest(p, d)
    assert (answer.local_reason, json.loads(body)) == ("prefill_failed", WHOLE)
    assert len(p.calls) == asked
    assert TRANSFER_FIELD not in json.loads(d.calls[-1].body)


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_the_other_ranks_of_a_dead_replica_are_not_asked(role):
    """All ranks end with their replica; calls to them would use up the attempts."""
    good = well if role == "prefill" else OK
    ranks = [good, dies, dies, dies]
    router, p, d = fleet(ranks, [OK]) if role == "prefill" else fleet([well], ranks)
    dying = (p if role == "prefill" else d).replicas[1:]
    for rank, replica in enumerate(dying):
        replica.name = f"dead-dp{rank}"
    p.in_order = d.in_order = True
    answer, body = await ask(router, request(stream=False))
    await at_rest(p, d)
    assert (answer.route, json.loads(body)) == ("remote", WHOLE)
    assert [len(replica.calls) for replica in dying] == [0, 0, 1]


async def test_a_prefill_leg_that_finds_the_request_bad_is_not_tried_again():
    """The client receives decode's answer."""
    router, p, d = fleet([answers(400, {}), answers(400, {})], [answers(400, {"error": "no"})])
    answer, body = await ask(router, request(stream=False))
    await at_rest(p, d)
    assert (answer.start.status, json.loads(body)) == (400, {"error": "no"})
    assert len(p.calls) == 1


@pytest.mark.parametrize(
    ("fault", "stream"),
    [(dies, False), (dies, True), (cut_off, False), (engine(1, [1], 0), True)],
    ids=["before an answer", "before a stream", "within an answer", "at a stream's first token"],
)
async def test_decode_that_dies_before_anything_was_sent_is_replaced(fault, stream):
    """The client's whole request, with a new transfer; the failed engine is not called again."""
    router, p, d = fleet([well], [fault, engine(2, [3]) if stream else OK])
    for _ in range(3):
        _, body = await ask(router, request(stream=stream))
        assert said(body)["text"].endswith("<39>") if stream else json.loads(body) == WHOLE
    await at_rest(p, d)
    assert len(set(transfers(d))) == len(d.calls) == 3 + len(d.replicas[0].calls)
    assert 0 < len(d.replicas[0].calls) < 3


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_replica_that_left_after_it_was_chosen_is_replaced(role):
    """Serve reports the death at dispatch, and again when the call is closed."""
    router, p, d = fleet([well, well], [engine(1, [1]), engine(2, [3])])
    handle = p if role == "prefill" else d
    handle.replicas[0].left = True
    for _ in range(3):
        _, body = await ask(router, request())
        assert said(body)["text"].endswith("<39>")
    await at_rest(p, d)


@pytest.mark.parametrize(("attempts", "failed"), [(1, 1), (3, 2)])
async def test_the_log_names_the_replica_and_the_cause_of_each_failure(attempts, failed, caplog):
    """The log names the engine, the client's message does not; the router logs every failure."""
    router, p, d = fleet([dies], [dies, dies])
    router.limits = LIMITS.model_copy(update={"attempts": attempts})
    with pytest.raises(UnavailableError) as raised:
        await ask(router, request())
    await at_rest(p, d)
    assert str(raised.value) == "the decode engine is not available; try again"
    failures = [record.message for record in caplog.records if "failed" in record.message]
    assert all(message.endswith(": dead") for message in failures)
    decode = {message.split()[2] for message in failures if message.startswith("decode replica ")}
    assert len(decode) == failed
    assert decode <= {"d0", "d1"}
    assert len(failures) == failed + len(p.calls)


@pytest.mark.parametrize(("replicas", "asked"), [(1, 1), (2, 2), (5, 3)])
async def test_decode_that_keeps_dying_is_an_error(replicas, asked):
    """The client receives the engine's error, not the timeout of the wait for another engine."""
    router, p, d = fleet([well], [dies] * replicas)
    with pytest.raises(UnavailableError, match="decode engine is not available"):
        await ask(router, request())
    await at_rest(p, d)
    assert len(d.calls) == asked


@pytest.mark.parametrize("status", [400, 500, 503])
async def test_what_an_engine_answers_is_the_answer(status):
    """The router does not retry: another engine would give the same answer."""
    router, p, d = fleet([well], [answers(status, {}), answers(status, {})])
    answer, _ = await ask(router, request())
    await at_rest(p, d)
    assert (answer.start.status, len(d.calls)) == (status, 1)


async def test_no_engine_is_not_a_queue():
    """A request fails at once while engines start, or after the last one has stopped."""
    router, p, d = fleet([well], [])
    with pytest.raises(UnavailableError, match="no decode engine is running"):
        await ask(router, request())
    await at_rest(p, d)


async def test_a_stopping_router_without_engines_refuses_at_once():
    """It does not wait for an engine to start: it will have closed by then."""
    router, p, d = fleet([well], [])
    d.leaving = True
    with pytest.raises(UnavailableError, match="this router is stopping and has no decode engine"):
        await ask(router, request())
    await at_rest(p, d)


async def test_a_deadline_is_not_tried_again():
    """The request's timeout also limits the wait for engines."""
    router, p, d = fleet([well], [hangs, hangs])
    router.limits = LIMITS.model_copy(update={"first_token_timeout_s": 0.2})
    with pytest.raises(DeadlineError):
        await ask(router, request())
    await at_rest(p, d)
    assert len(d.calls) == 1


@pytest.mark.parametrize("half", [False, True], ids=["between events", "within an event"])
@pytest.mark.parametrize("cut", range(TOKENS + 1))
async def test_a_stream_outlives_its_engine(cut, half):
    """Death at any token: no token is lost or repeated; usage, finish reason and `created` are
    unchanged.
    """
    router, p, d = fleet([well], [engine(1, [2, 1, 1], cut, half), engine(2, [1, 3])])
    uninterrupted = said(
        b"".join([b.body if isinstance(b, StreamChunk) else b async for b in engine(3, [5])(Call("", ""), 1)][1:])
    )
    for _ in range(2):
        _, body = await ask(router, request())
        assert said(body) == uninterrupted
    await at_rest(p, d)
    # Before the first token there is no stream to continue: that is another attempt.
    begun = cut >= 2 or half
    assert counted(router, "tandem_resumed_streams_total", outcome="resumed") == (begun and cut < TOKENS)


async def test_a_stream_outlives_many_engines():
    """The router tries further engines as long as each one sends new tokens."""
    router, p, d = fleet([well], [engine(n, [1, 2, 3], 1 + 4 * n) for n in range(9)] + [engine(10, [4])])
    router.limits = LIMITS.model_copy(update={"attempts": 2})
    d.replicas.reverse()
    d.in_order = True
    _, body = await ask(router, request())
    assert said(body)["text"] == "".join(f"<{token}>" for token in range(TOKENS))
    await at_rest(p, d)


async def test_a_stream_that_kills_every_engine_at_one_token_ends():
    """The stream ends with an error after `attempts` engines, before all engines have died."""
    router, p, d = fleet([well], [engine(n, [1], 7) for n in range(6)])
    sent = []

    async def read() -> None:
        async with router.answer(request()) as answer:
            async for some in body_of(answer):
                sent.append(some)

    with pytest.raises(UnavailableError):
        await read()
    await at_rest(p, d)
    assert b"<6>" in b"".join(sent)
    assert b"<7>" not in b"".join(sent)
    assert len(d.calls) == LIMITS.attempts
    assert counted(router, "tandem_resumed_streams_total", outcome="failed") == 1


@pytest.mark.parametrize(
    ("body", "why"),
    [({"n": 2}, "n > 1"), ({"prompt": ["a", "b"], "echo": True}, "multiple prompts")],
)
async def test_a_stream_that_cannot_go_on_exactly_says_so(body, why):
    """An error event ends the stream, and no other output is added."""
    router, p, d = fleet([well], [engine(n, [1], 7) for n in range(2)])
    with pytest.raises(CannotResumeError, match=why):
        await ask(router, request(**body))
    await at_rest(p, d)
    assert len(d.calls) == 1
    assert counted(router, "tandem_resumed_streams_total", outcome="refused") == 1


@pytest.mark.parametrize(("multiple", "legs"), [(16, 1), (0, 0)])
async def test_choices_that_cannot_share_a_received_prompt_are_served_by_decode(multiple, legs):
    """Models with states or drafts have no `first_token_multiple`; all choices count as sequences
    of decode.
    """
    router, p, d = fleet([well], [engine(1, [1], None)])
    p.metadata = {"producer": METADATA["producer"] | {"first_token_multiple": multiple}}
    answer, _ = await ask(router, request(n=3))
    await at_rest(p, d)
    assert (len(p.calls), answer.local_reason) == (legs, None if legs else "n")
    assert [call.sequences for call in (*p.calls, *d.calls)] == [1] * legs + [3]


async def test_an_engine_that_cannot_repeat_says_so():
    """The client's error event states the reason."""

    async def cannot(call: Call, _: int) -> AsyncGenerator[Any, None]:
        if call.replay_log:
            raise CannotResumeError("speculative decoding")
        async for item in engine(1, [1], 7)(call, 1):
            yield item

    router, p, d = fleet([well], [cannot, cannot])
    with pytest.raises(CannotResumeError, match="speculative decoding"):
        await ask(router, request())
    await at_rest(p, d)


async def test_an_engine_that_answers_otherwise_than_with_the_stream():
    """An engine of another release may refuse the request, so the stream cannot resume."""
    first = engine(1, [1], 7)
    router, p, d = fleet([], [first, answers(400, {})])
    d.replicas.reverse()
    d.in_order = True
    with pytest.raises(CannotResumeError, match="HTTP 400"):
        await ask(router, request())
    await at_rest(p, d)


@pytest.mark.parametrize("status", [429, 500])
async def test_a_busy_or_broken_engine_does_not_end_a_stream(status):
    """The router asks the next engine to continue the stream."""
    router, p, d = fleet([], [engine(1, [1], 7), answers(status, {}), engine(1, [1])])
    d.replicas.reverse()
    d.in_order = True
    _, body = await ask(router, request())
    await at_rest(p, d)
    assert (len(d.calls), body.count(b"<39>"), body.count(b"data: [DONE]")) == (3, 1, 1)


@pytest.mark.parametrize("status", [400, 429, 503])
async def test_a_stream_that_died_before_its_first_event_hides_no_status(status):
    """The client has received nothing: the next engine's status and body are the answer."""
    router, p, d = fleet([], [engine(1, [1], 0), answers(status, {"error": "no"})])
    d.replicas.reverse()
    d.in_order = True
    answer, body = await ask(router, request())
    await at_rest(p, d)
    assert len(d.calls) == 2
    assert (answer.start.status, json.loads(body)) == (status, {"error": "no"})


async def test_an_engine_that_dies_after_the_end_mark():
    """The answer is complete, so no other engine is called."""

    async def ends_and_dies(call: Call, _: int) -> AsyncGenerator[Any, None]:
        async for item in engine(1, [1])(call, 1):
            yield item
        raise EngineDownError("killed")

    router, p, d = fleet([well], [ends_and_dies, ends_and_dies])
    _, body = await ask(router, request())
    await at_rest(p, d)
    assert said(body)["finish_reason"] == "length"
    assert len(d.calls) == 1


async def test_a_stream_that_ends_early_is_not_taken_for_whole():
    """A generator that Serve closes just ends."""

    async def stops(call: Call, _: int) -> AsyncGenerator[Any, None]:
        yield ResponseStart(200, EVENTS)
        yield TokenChunk(event(1, index=0, text="<0>"), ((0,),), source=SOURCE)

    router, p, d = fleet([well], [stops, stops])
    with pytest.raises(UnavailableError, match="before its end"):
        await ask(router, request())
    await at_rest(p, d)


@pytest.mark.parametrize(("second", "equal"), [(b"one", True), (b"other", False), (None, False)])
async def test_a_stream_is_resumed_only_with_the_same_prompt(second: bytes | None, equal: bool):
    """The second engine fetches the image of a URL again."""
    router, p, d = fleet([well], [engine(2, [1], prompt=second), engine(1, [1], dies_after=5, prompt=b"one")])
    d.in_order = True  # the last replica is called first
    if equal:
        _, body = await ask(router, request())
        assert said(body)["finish_reason"] == "length"
    else:
        with pytest.raises(CannotResumeError, match="an image URL returned different content"):
            await ask(router, request())
    await at_rest(p, d)
    assert len(d.calls) == 2
    assert counted(router, "tandem_resumed_streams_total", outcome="refused") == (not equal)


@pytest.mark.parametrize(
    ("first", "second", "says"),
    [
        (TokenSource("model", "a"), TokenSource("model", "a"), None),
        (TokenSource("model", "a"), TokenSource("model", "b"), "another model or adapter"),
        (SOURCE, TokenSource("other"), "another model or adapter"),
        (SOURCE, None, "cannot verify which"),
        (None, SOURCE, "has not reported which model"),
    ],
)
async def test_a_stream_is_resumed_only_by_the_same_model_and_adapter(first: Any, second: Any, says: str | None):
    """The chunks decide, whatever Serve's metadata of the engines is."""
    router, p, d = fleet([well], [engine(2, [1], source=second), engine(1, [1], dies_after=5, source=first)])
    d.in_order = True  # the last replica is called first
    if says is None:
        assert said((await ask(router, request()))[1])["finish_reason"] == "length"
    else:
        with pytest.raises(CannotResumeError, match=says):
            await ask(router, request())
    await at_rest(p, d)
    assert counted(router, "tandem_resumed_streams_total", outcome="refused") == (says is not None)


async def test_a_stream_is_resumed_whose_adapter_was_reported_after_its_first_token():
    async def reports_late(call: Call, turn: int) -> AsyncGenerator[Any, None]:
        async for item in engine(1, [1], dies_after=5, source=None)(call, turn):
            late = isinstance(item, TokenChunk) and item.groups == ((1,),)
            yield msgspec.structs.replace(item, source=SOURCE) if late else item

    router, p, d = fleet([well], [engine(2, [1]), reports_late])
    d.in_order = True  # the last replica is called first
    assert said((await ask(router, request()))[1])["finish_reason"] == "length"
    assert len(d.calls) == 2
    await at_rest(p, d)


@pytest.mark.parametrize("equal", [True, False])
async def test_a_stream_is_resumed_only_on_engines_of_its_identity(equal: bool):
    """The weights at the model's path were replaced, and the other replicas have restarted."""
    router, p, d = fleet([well], [engine(3, [1])] * 3 + [engine(1, [1], dies_after=5)])
    d.in_order = True
    for replica in d.replicas[equal:3]:
        replica.identity = "other"
    if equal:
        assert said((await ask(router, request()))[1])["finish_reason"] == "length"
    else:
        with pytest.raises(CannotResumeError, match="the others run another model"):
            await ask(router, request())
    await at_rest(p, d)
    assert [len(replica.calls) for replica in d.replicas] == [int(equal), 0, 0, 1]


@pytest.mark.parametrize(("prefill", "reason"), [("m", None), ("mo", None), ("oo", "other_identity")])
async def test_only_engines_of_one_identity_are_paired(prefill: str, reason: str | None):
    """Also for the first request, before the router knows the engines."""
    router, p, d = fleet([well] * len(prefill), [OK])
    for replica, identity in zip(p.replicas, prefill, strict=True):
        replica.identity = SOURCE.engine if identity == "m" else "other"
    for _ in range(4):
        assert (await ask(router, request(stream=False)))[0].local_reason == reason
    await at_rest(p, d)
    assert [bool(replica.calls) for replica in p.replicas] == [identity == "m" for identity in prefill]


async def test_a_decode_engine_of_an_earlier_release_serves_alone():
    """Its routers called prefill, so it would ignore the order."""
    router, p, d = fleet([well], [OK])
    d.replicas[0].version = 1
    answer, _ = await ask(router, request(stream=False))
    assert (answer.local_reason, p.calls) == ("older_engine", [])
    assert TRANSFER_FIELD not in json.loads(d.calls[0].body)
    await at_rest(p, d)


async def test_a_failed_prefill_engine_is_no_match(caplog: pytest.LogCaptureFixture):
    """The request does not wait for a slot that no engine can have."""
    router, p, d = fleet([dies, well], [OK, OK])
    p.replicas[1].identity = d.replicas[0].identity = "other"
    d.in_order = True  # the last replica is chosen, although the policy prefers the other one
    answer, _ = await ask(router, request(stream=False))
    assert answer.local_reason == "prefill_failed"
    assert "waiting for a free prefill replica" not in caplog.text
    await at_rest(p, d)


async def test_an_answer_that_replaces_a_stream_may_have_another_prompt():
    """The client has received nothing of the first engine's answer."""

    async def begun(call: Call, _: int) -> AsyncGenerator[Any, None]:
        yield ResponseStart(200, EVENTS)
        yield TokenChunk(b"data: half of an eve", ((0,),), None, b"one")
        raise EngineDownError("killed")

    router, p, d = fleet([well], [engine(2, [1], prompt=b"other"), begun])
    d.in_order = True
    _, body = await ask(router, request())
    await at_rest(p, d)
    assert said(body)["finish_reason"] == "length"
    assert len(d.calls) == 2


async def test_a_stream_that_begins_before_its_kv_is_there():
    """Events without a token do not show the handover: the prefill leg continues until the first
    token.
    """
    computing = asyncio.Event()
    ended_early = False

    async def slow_prefill(call: Call, turn: int) -> AsyncGenerator[Any, None]:
        nonlocal ended_early
        try:
            await computing.wait()
        except BaseException:
            ended_early = True
            raise
        async for item in prefills(lambda: p)(call, turn):
            yield item

    async def eager(call: Call, _: int) -> AsyncGenerator[Any, None]:
        yield ResponseStart(200, EVENTS)
        yield b"event: response.created\ndata: {}\n\n"
        asyncio.get_running_loop().call_later(0.05, computing.set)
        await p.delivered[transfers(d)[0]].wait()
        yield TokenChunk(b"event: response.output_text.delta\ndata: {}\n\n", ((7,),))
        yield b"event: response.completed\ndata: {}\n\n"

    p, d = Handle([Replica("p0", slow_prefill)]), Handle([Replica("d0", eager)])
    router = router_of(LIMITS, p, d)
    wanted = request()
    wanted = replace(wanted, endpoint="/v1/responses", body={**wanted.body, "input": "x"})
    answer, body = await ask(router, wanted)
    await at_rest(p, d)
    assert (answer.route, body.count(b"event: "), ended_early) == ("remote", 3, False)
    assert counted(router, "tandem_prefill_legs_total", outcome="done") == 1
    assert counted(router, "tandem_resumed_streams_total", outcome="refused") == 0


class Answering:
    """A decode engine that samples the first token of an answer, then generates until `finish`."""

    def __init__(self) -> None:
        self.finish = asyncio.Event()

    async def serve(self, call: Call, turn: int) -> AsyncGenerator[Any, None]:
        yield Heartbeat(tokens=True)
        await self.finish.wait()
        async for item in OK(call, turn):
            yield item


async def test_an_answer_does_not_hold_its_prefill_slot_while_decode_generates():
    """Decode's first token shows that the KV has arrived."""
    decode = Answering()
    router, p, d = fleet([well], [decode.serve])
    asking = asyncio.create_task(ask(router, request(False)))
    async with asyncio.timeout(30):
        while not d.calls or p.taken:
            assert not asking.done()
            await asyncio.sleep(0.001)
    assert (d.taken, p.running, p.discarded) == (1, 0, [])
    decode.finish.set()
    answer, body = await asking
    assert (answer.route, json.loads(body), len(p.calls), len(d.calls)) == ("remote", WHOLE, 1, 1)
    assert p.discarded == []
    await at_rest(p, d)


@pytest.mark.parametrize("dies", [False, True])
async def test_what_prefill_does_after_decodes_first_token(dies):
    """The token count of a late answer is read; a death causes no second attempt."""
    decode, go_on = Answering(), asyncio.Event()

    async def prefill(call: Call, _: int) -> AsyncGenerator[Any, None]:
        p.delivered[json.loads(call.body)[TRANSFER_FIELD]["transfer_id"]].set()
        await go_on.wait()
        if dies:
            raise EngineDownError("killed")
        yield ResponseStart(200, JSON)
        yield b'{"usage": {"prompt_tokens": 17}}'
        await asyncio.sleep(60)

    p = Handle([Replica("p0", prefill)])
    d = Handle([Replica("d0", fed(decode.serve, p))])
    router = router_of(LIMITS, p, d)
    asking = asyncio.create_task(ask(router, request(False)))
    async with asyncio.timeout(30):
        while not d.calls or router.models[0].planner._prefill["p0"].calls:  # noqa: ASYNC110, SLF001
            await asyncio.sleep(0.001)  # until the router has read the first token
        go_on.set()
        while p.taken:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    decode.finish.set()
    answer, body = await asking
    assert (answer.route, json.loads(body), len(p.calls), len(d.calls)) == ("remote", WHOLE, 1, 1)
    assert answer.prompt_tokens == (None if dies else 17)
    await at_rest(p, d)


@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_does_not_wait_for_prefills_report(stream: bool):
    """The report may follow the end of a short answer: it updates the routing policy later."""
    ended = asyncio.Event()

    async def prefill(call: Call, _: int) -> AsyncGenerator[Any, None]:
        p.delivered[json.loads(call.body)[TRANSFER_FIELD]["transfer_id"]].set()
        await ended.wait()
        yield ResponseStart(200, JSON)
        yield b'{"usage": {"prompt_tokens": 17}}'
        await asyncio.sleep(60)

    async def one_body(call: Call, turn: int) -> AsyncGenerator[Any, None]:
        yield ResponseStart(200, (*JSON, (b"content-length", str(len(body)).encode())))
        yield body

    body = json.dumps(WHOLE).encode()
    p = Handle([Replica("p0", prefill)])
    d = Handle([Replica("d0", fed(engine(1, [1]) if stream else one_body, p))])
    router = router_of(LIMITS, p, d)
    answer, _ = await ask(router, request(stream))
    assert (answer.route, answer.prompt_tokens) == ("remote", None)
    assert (d.taken, d.running) == (0, 1), "the client's next request needs the slot"
    ended.set()
    await at_rest(p, d)
    assert (answer.prompt_tokens, counted(router, "tandem_prefill_legs_total", outcome="done")) == (17, 1)
    assert p.discarded == []
