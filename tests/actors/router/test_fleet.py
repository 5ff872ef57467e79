"""The router's destinations: its real planner over in-process handles."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from actors.errors import DeadlineError
from actors.request import TRANSFER_FIELD, Call, ResponseStart, TokenChunk
from actors.router.client_request import ClientRequest
from actors.router.prompt_lists import COUNTS
from configs.settings.router import RouterLimits, RoutingSettings
from testing.answers import whole_body
from tests.actors.behaviours import EVENTS, JSON, counted
from tests.actors.fleet import Handle, Replica, at_rest, router_of

pytestmark = pytest.mark.usefixtures("virtual_time")


def limits(**routing: Any) -> RouterLimits:
    return RouterLimits(routing=RoutingSettings(**routing))


class Engines:
    """Prefill and decode replicas by name; `token_s` is the time per token of either."""

    def __init__(self, rules: RouterLimits, prefill: str = "p", decode: str = "d", token_s: float = 0.0) -> None:
        self.token_s = token_s
        self.streaming = asyncio.Event()
        self.p = Handle([Replica(name, self.compute) for name in prefill])
        self.d = Handle([Replica(name, self.generate) for name in decode])
        self.router = router_of(rules, self.p, self.d)

    async def compute(self, call: Call, _: int) -> AsyncGenerator[Any, None]:
        body = json.loads(call.body)
        await asyncio.sleep(self.token_s * len(body["prompt"]))
        self.p.delivered[body[TRANSFER_FIELD]["transfer_id"]].set()
        yield ResponseStart(200, JSON)
        yield json.dumps({"usage": {"prompt_tokens": len(body["prompt"])}}).encode()
        await asyncio.sleep(60)

    async def generate(self, call: Call, _: int) -> AsyncGenerator[Any, None]:
        body = json.loads(call.body)
        if TRANSFER_FIELD in body:
            await self.p.delivered[body[TRANSFER_FIELD]["transfer_id"]].wait()
        elif self.token_s:
            await asyncio.sleep(self.token_s * len(body["prompt"]))
        yield ResponseStart(200, EVENTS if body["stream"] else JSON)
        if not body["stream"]:
            yield json.dumps({"choices": [], "usage": dict.fromkeys(COUNTS, 1)}).encode()
            return
        for token in range(body["max_tokens"]):
            yield TokenChunk(b'data: {"created": 1, "choices": [{"index": 0, "text": "x"}]}\n\n', ((token,),))
        if body.get("waits"):
            await self.streaming.wait()
        yield b"data: [DONE]\n\n"

    async def ask(self, prompt: Any, session: str | None = None, **more: Any) -> Any:
        """Send one request to its end; return the decision and the replicas."""
        body = {"prompt": prompt, "stream": True, "max_tokens": 3, **more}
        now = time.monotonic()
        wanted = ClientRequest(
            "/v1/completions", (), json.dumps(body).encode(), body, session, True, arrived_at=now, read_at=now
        )
        before = self.calls()
        async with self.router.answer(wanted) as answer:
            whole = await whole_body(answer)
            assert whole.count(b'"x"') == (body["max_tokens"] if answer.start.streams else 0)
            assert answer.explanation is not None
            told = json.loads(answer.explanation)
            assert (answer.route, answer.local_reason) == (
                told["route"],
                told["reason"] if told["route"] == "local" else None,
            )
        took = [name for name, count in self.calls().items() if count > before[name]]
        return told, took

    def calls(self) -> dict[str, int]:
        return {replica.name: len(replica.calls) for replica in (*self.p.replicas, *self.d.replicas)}


def ids(count: int, first: int = 0) -> list[int]:
    return list(range(first, first + count))


async def test_the_first_request_finds_out_who_there_is():
    """Serve chooses replicas for the first request; the router estimates costs for the next."""
    engines = Engines(limits())
    assert (await engines.ask(ids(1000)))[0]["reason"] == "unseen"
    told, took = await engines.ask(ids(20, 5000))
    assert (told["route"], told["reason"], took) == ("local", "short_uncached", ["d"])
    await at_rest(engines.p, engines.d)


async def test_a_session_stays_with_its_decode_replica():
    """Once the router knows the replicas, other load does not move a session."""
    engines = Engines(limits(policy="round_robin"), decode="defg")
    await engines.ask(ids(10))
    took = [(await engines.ask(ids(100, 100 * n), session=str(n % 5)))[1] for n in range(20)]
    for session in range(5):
        assert len({tuple(set("defg") & set(one)) for one in took[session::5]}) == 1
    await at_rest(engines.p, engines.d)


async def test_routing_changes_while_requests_run():
    """Serve passes the new settings as a plain dictionary. No call goes to the engines."""
    engines = Engines(limits(policy="always_remote"))
    await engines.ask(ids(1000))
    engines.router.reconfigure(limits(policy="never_remote").model_dump())
    assert (await engines.ask(ids(1000, 5000)))[0]["reason"] == "policy"
    engines.router.reconfigure(limits(local_below_tokens=2000).model_dump())
    told, _ = await engines.ask(ids(1999, 9000))
    assert (told["route"], told["reason"]) == ("local", "short_uncached")
    await at_rest(engines.p, engines.d)


async def test_decisions_are_counted_and_logged(caplog):
    engines = Engines(limits(policy="never_remote"))
    with caplog.at_level(logging.DEBUG, logger="actors.router.model_router"):
        await engines.ask(ids(100))
        await engines.ask(ids(100), echo=True)
    assert counted(engines.router, "tandem_decisions_total", route="local", reason="policy") == 1
    assert counted(engines.router, "tandem_decisions_total", route="local", reason="echo") == 1
    lines = [json.loads(record.message.removeprefix("decision ")) for record in caplog.records]
    assert [line["reason"] for line in lines] == ["policy", "echo"]
    await at_rest(engines.p, engines.d)


async def test_an_answer_of_prefill_without_a_body():
    """The start of prefill's answer shows that the prompt is computed, and its cost is learnt."""
    engines = Engines(limits(policy="always_remote").model_copy(update={"prefill_timeout_s": 0.2}), token_s=1e-3)

    async def bare(call: Call, turn: int) -> AsyncGenerator[Any, None]:
        body = json.loads(call.body)
        await asyncio.sleep(0.001 * len(body["prompt"]))
        yield ResponseStart(200, JSON)
        await asyncio.sleep(0.3)
        engines.p.delivered[body[TRANSFER_FIELD]["transfer_id"]].set()
        await asyncio.sleep(60)

    engines.p.replicas[0].serve = bare
    for n in range(3):
        told, took = await engines.ask(ids(100, 1000 * n))
        assert (told["route"], sorted(took)) == ("remote", ["d", "p"])
    assert told["chosen"]["compute_s"] > 0.09, "assumed: 0.03"
    await at_rest(engines.p, engines.d)


async def test_requests_that_come_at_the_same_time_know_of_each_other():
    """Slots are taken later than decisions, and Serve's counts change last; eight prompts spread
    over four replicas.
    """
    engines = Engines(limits(policy="least_load"), prefill="pqrs")
    await engines.ask(ids(10))
    before, gate = engines.calls(), asyncio.Event()

    async def waits(call: Call, turn: int) -> AsyncGenerator[Any, None]:
        await gate.wait()
        async for item in engines.compute(call, turn):
            yield item

    for replica in engines.p.replicas:
        replica.serve = waits
    asking = [asyncio.create_task(engines.ask(ids(2000, 3000 * n))) for n in range(1, 9)]
    async with asyncio.timeout(20):
        while True:
            if sum(engines.calls().values()) == sum(before.values()) + 16:
                break
            await asyncio.sleep(0.001)
    gate.set()
    await asyncio.gather(*asking)
    assert [engines.calls()[name] - before[name] for name in "pqrs"] == [2, 2, 2, 2]
    await at_rest(engines.p, engines.d)


async def test_usage_of_the_prefill_leg_is_learnt():
    """These engines count one token per byte of text: four times as many as assumed."""
    engines = Engines(limits(policy="always_remote"))
    for n in range(12):
        told, _ = await engines.ask(f"{n:06}" + "a" * 5994)
    assert told["prompt_tokens"] == pytest.approx(6000, rel=0.05)
    await at_rest(engines.p, engines.d)


async def test_an_engine_that_does_not_answer_is_left_out(caplog: pytest.LogCaptureFixture):
    class Told(Handle):
        async def tell_all(self, method: str, timeout_s: float) -> dict[str, Any]:
            return {"a": {"answers": method}, "b": DeadlineError(f"no answer within {timeout_s:g} s")}

    router = router_of(limits(), Told([]), Told([]))
    assert await router.engine_status() == [{"answers": "status"}] * 2
    assert caplog.text.count("method status of replica b failed") == 2
