"""Engines that fail, are silent or late, and the router's reaction: over in-process handles."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from actors.errors import CannotResumeError, DeadlineError, EngineDownError, UnavailableError
from actors.request import TRANSFER_FIELD, Call, Heartbeat, ResponseStart, StreamChunk, TokenChunk, TokenSource
from testing.sse import said
from tests.actors.behaviours import (
    ALL,
    EVENTS,
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
    fleet,
    hangs,
    prefills,
    request,
    transfers,
    well,
)
from tests.actors.fleet import METADATA, SOURCE, at_rest

pytestmark = pytest.mark.usefixtures("virtual_time")

STREAM = "whole stream"
NO = {"error": "no"}
SHORT = {"first_token_timeout_s": 0.3, "idle_timeout_s": 0.3, "request_timeout_s": 0.3}
LONG = dict.fromkeys(SHORT, 20.0)
SILENCE = {"silence_timeout_s": 0.5}


async def cannot(call: Call, _: int) -> AsyncGenerator[Any, None]:
    if call.replay_log:
        raise CannotResumeError("speculative decoding")
    async for item in engine(1, [1], 7)(call, 1):
        yield item


async def ends_and_dies(call: Call, _: int) -> AsyncGenerator[Any, None]:
    async for item in engine(1, [1])(call, 1):
        yield item
    raise EngineDownError("killed")


async def stops(call: Call, _: int) -> AsyncGenerator[Any, None]:
    """Just end, as a generator that Serve closes."""
    yield ResponseStart(200, EVENTS)
    yield TokenChunk(event(1, index=0, text="<0>"), ((0,),), source=SOURCE)


async def begun(call: Call, _: int) -> AsyncGenerator[Any, None]:
    """Die within the first event, of which the client has received nothing."""
    yield ResponseStart(200, EVENTS)
    yield TokenChunk(b"data: half of an eve", ((0,),), None, b"one")
    raise EngineDownError("killed")


async def reports_late(call: Call, turn: int) -> AsyncGenerator[Any, None]:
    """Report the adapter after the first token."""
    async for item in engine(1, [1], dies_after=5, source=None)(call, turn):
        late = isinstance(item, TokenChunk) and item.groups == ((1,),)
        yield msgspec.structs.replace(item, source=SOURCE) if late else item


def frozen(after: int) -> Any:
    """Return a decode engine that sends nothing after some tokens, as a stopped process does."""

    async def serve(call: Call, turn: int) -> AsyncGenerator[Any, None]:
        if after:
            with suppress(EngineDownError):
                async for item in engine(1, [2], after)(call, turn):
                    yield item
        await asyncio.sleep(60)

    return serve


async def silent_after_its_first_token(call: Call, _: int) -> AsyncGenerator[Any, None]:
    yield Heartbeat(tokens=True)
    await asyncio.sleep(60)


async def blocked(call: Call, turn: int) -> AsyncGenerator[Any, None]:
    """Hang in each transfer."""
    if TRANSFER_FIELD.encode() in call.body:
        await asyncio.sleep(60)
    async for item in engine(1, [3])(call, turn):
        yield item


def queued(serve: Any, at: int = 0) -> Any:
    """Return an engine that delays its item `at` by four seconds and sends heartbeats meanwhile."""

    async def wait(call: Call, turn: int) -> AsyncGenerator[Any, None]:
        number = 0
        async for item in serve(call, turn):
            if number == at:
                for _ in range(40):
                    await asyncio.sleep(0.1)
                    yield Heartbeat()
            number += 1
            yield item

    return wait


async def paced(call: Call, turn: int) -> AsyncGenerator[Any, None]:
    """Forty tokens in 0.8 s."""
    async for item in engine(1, [1])(call, turn):
        await asyncio.sleep(0.02)
        yield item


async def dies_late(call: Call, turn: int) -> AsyncGenerator[Any, None]:
    """Die after the deadline of the first token."""
    begins = True
    async for item in engine(1, [1], dies_after=25)(call, turn):
        yield item
        if begins and isinstance(item, StreamChunk):
            begins = False
            await asyncio.sleep(1.1)


async def alive_but_idle(call: Call, turn: int) -> AsyncGenerator[Any, None]:
    """One token, then heartbeats only: the engine runs, but no longer schedules this request."""
    async for item in engine(1, [1])(call, turn):
        yield item
        if not isinstance(item, ResponseStart | bytes):
            break
    while True:
        await asyncio.sleep(0.05)
        yield Heartbeat()


async def comments(call: Call, _: int) -> AsyncGenerator[Any, None]:
    yield ResponseStart(200, EVENTS)
    while True:
        await asyncio.sleep(0.05)
        yield b": ping\n\n"


@dataclass
class Case:
    """A request, the replicas' behaviours (decode's in the order of their calls), and its end.

    ``end``      whole stream, JSON body, (status, body), or (error, a word of it)
    ``asked``    calls of each decode replica
    ``legs``     calls of all prefill replicas
    ``reason``   why decode serves alone
    ``resumed``  outcome that is counted for the stream
    """

    name: str
    decode: list[Any]
    end: Any
    asked: list[int] | None = None
    prefill: list[Any] = field(default_factory=lambda: [well])
    legs: int | None = None
    stream: bool = True
    body: dict[str, Any] = field(default_factory=dict)
    limits: dict[str, Any] = field(default_factory=dict)
    reason: str | None = None
    resumed: str | None = None


UNAVAILABLE = (UnavailableError, "decode engine is not available")
OTHER = (CannotResumeError, "another model or adapter")

CASES = [
    # Prefill engines fail: decode serves alone after `attempts` calls, or if none is left.
    *(
        Case(f"{n} dead prefill engines", [OK], WHOLE, [1], [dies] * n, legs, stream=False, reason="prefill_failed")
        for n, legs in ((1, 1), (2, 2), (5, 3))
    ),
    Case("prefill rejects", [answers(400, NO)], (400, NO), [2], [answers(400, {})] * 2, 1, reason="prefill_failed"),
    # Decode engines fail before anything was sent: another one gets the whole request.
    Case("dead, answer", [dies, OK], WHOLE, [1, 1], stream=False),
    Case("dead, stream", [dies, engine(2, [3])], STREAM, [1, 1]),
    Case("dies within an answer", [cut_off, OK], WHOLE, [1, 1], stream=False),
    Case("dies at the first token", [engine(1, [1], 0), engine(2, [3])], STREAM, [1, 1]),
    Case("dies within the first event", [begun, engine(2, [1], prompt=b"other")], STREAM, [1, 1]),
    *(Case(f"{len(asked)} dead", [dies] * len(asked), UNAVAILABLE, asked) for asked in ([1], [1, 1], [1, 1, 1, 0, 0])),
    Case("no engine", [], (UnavailableError, "no decode engine is running")),
    # An engine's answer is the answer, also of the second engine if the first sent nothing.
    *(Case(f"HTTP {status}", [answers(status, {})] * 2, (status, {}), [1, 0]) for status in (400, 500, 503)),
    *(
        Case(f"HTTP {status} after a death", [engine(1, [1], 0), answers(status, NO)], (status, NO), [1, 1], [])
        for status in (400, 429, 503)
    ),
    # Streams that cannot resume say so.
    Case("n", [engine(1, [1], 7)] * 2, (CannotResumeError, "n > 1"), [1, 0], body={"n": 2}, resumed="refused"),
    Case(
        "several prompts",
        [engine(1, [1], 7)] * 2,
        (CannotResumeError, "multiple prompts"),
        [1, 0],
        legs=0,
        body={"prompt": ["a", "b"], "echo": True},
        reason="several_prompts",
        resumed="refused",
    ),
    Case("no replay", [cannot] * 2, (CannotResumeError, "speculative"), [1, 1]),
    Case("refused replay", [engine(1, [1], 7), answers(400, {})], (CannotResumeError, "HTTP 400"), [1, 1], []),
    *(
        Case(f"HTTP {status} within", [engine(1, [1], 7), answers(status, {}), engine(1, [1])], STREAM, [1, 1, 1], [])
        for status in (429, 500)
    ),
    Case("dies after the end", [ends_and_dies] * 2, STREAM, [1, 0]),
    # Further engines are tried while each sends new tokens; not if one token ends them all.
    Case(
        "nine deaths",
        [*(engine(n, [1, 2, 3], 1 + 4 * n) for n in range(9)), engine(10, [4])],
        STREAM,
        [1] * 10,
        limits={"attempts": 2},
    ),
    Case(
        "deaths at one token",
        [engine(n, [1], 7) for n in range(6)],
        (UnavailableError, None),
        [1] * LIMITS.attempts + [0] * (6 - LIMITS.attempts),
        resumed="failed",
    ),
    Case("ends early", [stops] * 2, (UnavailableError, "before its end")),
    # Only with the same prompt (an image URL is fetched again), model and adapter.
    *(
        Case(
            f"prompt {second!r} after b'one'",
            [engine(1, [1], 5, prompt=b"one"), engine(2, [1], prompt=second)],
            STREAM if second == b"one" else (CannotResumeError, "image URL"),
            [1, 1],
            resumed="resumed" if second == b"one" else "refused",
        )
        for second in (b"one", b"other", None)
    ),
    *(
        Case(
            f"{second} after {first}",
            [engine(1, [1], 5, source=first), engine(2, [1], source=second)],
            end,
            resumed="resumed" if end == STREAM else "refused",
        )
        for first, second, end in (
            (TokenSource("model", "a"), TokenSource("model", "a"), STREAM),
            (TokenSource("model", "a"), TokenSource("model", "b"), OTHER),
            (SOURCE, TokenSource("other"), OTHER),
            (SOURCE, None, (CannotResumeError, "cannot verify which")),
            (None, SOURCE, (CannotResumeError, "has not reported which model")),
        )
    ),
    Case("late adapter", [reports_late, engine(2, [1])], STREAM, [1, 1]),
    # Silent engines are left; slow ones send heartbeats and are waited for.
    Case("silent at first", [frozen(0), engine(2, [3])], STREAM, [1, 1], [well] * 2, limits=SILENCE),
    Case("silent in mid-stream", [frozen(10), engine(2, [3])], STREAM, [1, 1], limits=SILENCE),
    Case("silent, answer", [frozen(0), OK], WHOLE, [1, 1], [well] * 2, stream=False, limits=SILENCE),
    Case("silent, answer, alone", [frozen(0), OK], WHOLE, [1, 1], [], stream=False, limits=SILENCE),
    Case("silent with KV", [silent_after_its_first_token, OK], WHOLE, [1, 1], [well], 2, stream=False, limits=SILENCE),
    *(
        Case(
            f"transfers hang, {n}",
            [blocked] * 2,
            STREAM,
            None,
            [well] * n,
            legs,
            limits=SILENCE,
            reason="prefill_failed",
        )
        for n, legs in ((2, 2), (5, 3))
    ),
    *(
        Case(name, [serve] * 2, end, [1, 0], prefill, stream=end == STREAM, limits={"silence_timeout_s": 3.0})
        for prefill in ([well], [])
        for name, serve, end in (
            ("slow start", queued(OK), WHOLE),
            ("slow body", queued(OK, at=1), WHOLE),
            ("slow stream", queued(engine(1, [2])), STREAM),
            ("slow token", queued(engine(1, [2]), at=10), STREAM),
        )
    ),
    # Deadlines: to the first token, between tokens, of a whole answer. A deadline is not retried.
    Case("a stream with tokens", [paced], STREAM, limits=SHORT),
    Case("a resumed stream", [dies_late, engine(2, [1])], STREAM, [1, 1], limits={"first_token_timeout_s": 1.0}),
    *(
        Case(limit, [serve] * 2, (DeadlineError, None), [1, 0], stream=stream, body=body, limits=LONG | {limit: 0.3})
        for limit, serve, stream, body in (
            ("first_token_timeout_s", hangs, True, {}),
            ("first_token_timeout_s", comments, True, {"echo": True}),
            ("idle_timeout_s", alive_but_idle, True, {}),
            ("request_timeout_s", answers(200, {}, delay_s=60), False, {}),
        )
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
async def test_an_end_of_a_request(case: Case) -> None:
    """Each attempt has its own transfer, and nothing is left of any."""
    router, p, d = fleet(case.prefill, case.decode[::-1])
    d.in_order = True
    router.limits = LIMITS.model_copy(update=case.limits)
    if isinstance(case.end, tuple) and isinstance(case.end[0], type):
        with pytest.raises(case.end[0], match=case.end[1]):
            await ask(router, request(case.stream, **case.body))
    else:
        answer, body = await ask(router, request(case.stream, **case.body))
        if case.end == STREAM:
            assert (said(body)["text"], said(body)["finish_reason"]) == (ALL, "length")
        else:
            end = (200, case.end) if isinstance(case.end, dict) else case.end
            assert (answer.start.status, json.loads(body)) == end
        assert answer.local_reason == (case.reason if case.prefill else "no_prefill")
        alone = [call for call in d.calls if TRANSFER_FIELD not in json.loads(call.body)]
        assert bool(alone) == (answer.local_reason is not None)
    await at_rest(p, d)
    assert case.asked in (None, [len(replica.calls) for replica in d.replicas[::-1]])
    assert case.legs in (None, len(p.calls))
    assert len(set(transfers(p))) == len(transfers(p))
    assert set(transfers(d)) <= set(transfers(p))
    assert len(set(transfers(d))) == len(transfers(d))
    if case.resumed:
        assert counted(router, "tandem_resumed_streams_total", outcome=case.resumed) == 1


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
        assert said((await ask(router, request()))[1]) == uninterrupted
    await at_rest(p, d)
    # Before the first token there is no stream to continue: that is another attempt.
    begun = cut >= 2 or half
    assert counted(router, "tandem_resumed_streams_total", outcome="resumed") == (begun and cut < TOKENS)


@pytest.mark.parametrize("fault", [dies, answers(503, {}), hangs], ids=["dies", "refuses", "is late"])
async def test_a_broken_prefill_leg_goes_to_another_replica(fault):
    """Once per request, in its turn."""
    router, p, d = fleet([fault, well], [OK])
    if fault is hangs:
        router.limits = LIMITS.model_copy(update={"prefill_timeout_s": 1})
    for _ in range(4):
        answer, body = await ask(router, request(stream=False))
        assert (answer.route, json.loads(body)) == ("remote", WHOLE)
    await at_rest(p, d)
    assert 0 < len(p.replicas[0].calls) < 4
    assert len(set(transfers(p))) == len(p.calls) == 4 + len(p.replicas[0].calls)
    late = "late" if fault is hangs else "failed"
    assert counted(router, "tandem_retries_total", leg="prefill", reason=late) == len(p.replicas[0].calls)


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_hung_engine_gets_no_more_requests(role: str, stream: bool):
    """It seems idle; the requests after the first silence go to other engines at once."""
    good = engine(2, [3]) if stream else OK
    router, p, d = fleet([hangs, well], [good]) if role == "prefill" else fleet([well], [hangs, good])
    router.limits = LIMITS.model_copy(update={"silence_timeout_s": 0.3})
    for _ in range(6):
        answer, _ = await ask(router, request(stream))
        assert (
            answer.pair.decode == "d1" if role == "decode" else (answer.route, answer.pair.prefill) == ("remote", "p1")
        )
    await at_rest(p, d)
    assert len((p if role == "prefill" else d).replicas[0].calls) == 1


async def test_a_long_prompt_is_not_taken_for_a_silent_engine():
    """Prefill sends heartbeats while it computes, and nothing after its answer until the KV has
    moved.
    """

    def beats(serve: Any) -> Any:
        async def wait(call: Call, turn: int) -> AsyncGenerator[Any, None]:
            for _ in range(10):
                await asyncio.sleep(0.3)
                yield Heartbeat()
            async for item in serve(call, turn):
                yield item

        return wait

    router, p, d = fleet([beats(prefills(lambda: p))], [beats(OK)])
    router.limits = LIMITS.model_copy(update={"silence_timeout_s": 2.0})
    answer, _ = await ask(router, request(False))
    assert (answer.route, len(p.calls), len(d.calls)) == ("remote", 1, 1)
    await at_rest(p, d)


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_the_other_ranks_of_a_dead_replica_are_not_asked(role):
    """All ranks end with their replica; calls to them would use up the attempts."""
    ranks = [well if role == "prefill" else OK, dies, dies, dies]
    router, p, d = fleet(ranks, [OK]) if role == "prefill" else fleet([well], ranks)
    dying = (p if role == "prefill" else d).replicas[1:]
    for rank, replica in enumerate(dying):
        replica.name = f"dead-dp{rank}"
    p.in_order = d.in_order = True
    answer, body = await ask(router, request(stream=False))
    await at_rest(p, d)
    assert (answer.route, json.loads(body)) == ("remote", WHOLE)
    assert [len(replica.calls) for replica in dying] == [0, 0, 1]


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_replica_that_left_after_it_was_chosen_is_replaced(role):
    """Serve reports the death at dispatch, and again when the call is closed."""
    router, p, d = fleet([well, well], [engine(1, [1]), engine(2, [3])])
    (p if role == "prefill" else d).replicas[0].left = True
    for _ in range(3):
        assert said((await ask(router, request()))[1])["text"] == ALL
    await at_rest(p, d)


@pytest.mark.parametrize(("attempts", "failed"), [(1, 1), (3, 2)])
async def test_the_log_names_the_replica_and_the_cause_of_each_failure(attempts, failed, caplog):
    """The client's message names no engine."""
    router, p, d = fleet([dies], [dies, dies])
    router.limits = LIMITS.model_copy(update={"attempts": attempts})
    with pytest.raises(UnavailableError) as raised:
        await ask(router, request())
    await at_rest(p, d)
    assert not {"d0", "d1"} & set(str(raised.value).split())
    failures = [record.message for record in caplog.records if "failed" in record.message]
    assert all(message.endswith(": dead") for message in failures)
    decode = {message.split()[2] for message in failures if message.startswith("decode replica ")}
    assert (len(decode), len(failures)) == (failed, failed + len(p.calls))
    assert decode <= {"d0", "d1"}


async def test_a_stopping_router_without_engines_refuses_at_once():
    """It does not wait for an engine to start: it will have closed by then."""
    router, p, d = fleet([well], [])
    d.stopping = True
    with pytest.raises(UnavailableError, match="stopping"):
        await ask(router, request())
    await at_rest(p, d)


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
