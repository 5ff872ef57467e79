"""Cancellation of requests between real engines in each state of the connector's machines.

Requests have one answer or several. `make explore` covers every interleaving of a
cancellation with other events, and tests/actors and tests/app cover every wait of the router. Here
vLLM aborts, with its schedulers, workers and block pools.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from typing import Any

import pytest

from testing.identity import random_prompt
from testing.sequential_proxy import PRODUCE
from tests.e2e.pair.conftest import Engines, answers

pytestmark = pytest.mark.engine

PROMPT_TOKENS, ANSWER_TOKENS = 1300, 16
BOUND_S = 60.0

STATES = ("asked", "receive", "offer", "chunk", "write", "written", "received")
"""Last trace event before the cancellation.

asked     none yet: the requests are on their way
receive   decode has its blocks: CONNECTING, or OFFERED if the engines are connected
offer     prefill has decode's offer: EARLY or LIVE, the delivery OPEN
chunk     between two chunks of the prompt
write     a write is in flight
written   a write has ended, others follow
received  decode has all KV and generates
"""
STILL_OPEN = ("offer", "chunk", "write")
"""States in which most of the prompt is not computed, so a cancellation finds an open delivery.

Exception: this process was descheduled until the whole transfer had ended ("received").
"""


async def traced(engines: Engines, start: int, name: str, unless: asyncio.Future[Any]) -> None:
    """Wait until the trace has such an event after the first `start` events, or it can no longer
    come.
    """
    give_up_at = asyncio.get_running_loop().time() + BOUND_S
    while all(event["event"] != name for event in engines.events()[start:]) and not unless.done():
        assert asyncio.get_running_loop().time() < give_up_at, f"no {name!r} in {BOUND_S:g} s"
        await asyncio.sleep(0.002)


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("leg", ["prefill", "decode", "both"])
def test_cancelled_in_each_state(engines: Engines, leg: str, n: int) -> None:
    """The other leg's answers are right, and both pools return to their baseline.

    With n of 2, vLLM copies the parameters to two requests on each engine. The
    transfer id is valid for one request per engine.
    """
    pair = engines.one_to_two
    prompt = random_prompt(PROMPT_TOKENS, seed=50)

    async def run() -> None:
        assert await engines.idle()
        reference = await answers(pair.decode, prompt, ANSWER_TOKENS, 1, None)
        for state in STATES:
            assert await engines.idle(), f"blocks are held before {state}"
            start, transfer_id = len(engines.events()), uuid.uuid4().hex
            legs = {
                "prefill": (pair.prefill, 1, PRODUCE | {"transfer_id": transfer_id}),
                "decode": (pair.decode, ANSWER_TOKENS, pair.address | {"transfer_id": transfer_id}),
            }
            tasks = {
                name: asyncio.ensure_future(answers(engine, prompt, tokens, n, params))
                for name, (engine, tokens, params) in legs.items()
            }
            if state != "asked":
                await traced(engines, start, state, unless=tasks["decode"])
            for name, task in tasks.items():
                if leg in (name, "both"):
                    task.cancel()
            for task in tasks.values():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait_for(task, BOUND_S)
            if leg == "prefill":
                assert tasks["decode"].result() == reference * n, f"wrong after {state}"
            assert await engines.idle(), f"blocks are held after {state}"
            events = engines.events()[start:]
            ends = [event["event"] for event in events if event.get("transfer") == transfer_id]
            whole = any(event["event"] == "received" and event["failure"] is None for event in events)
            # Without an event of the transfer, prefill was a chunk ahead and decode had not begun
            # to receive.
            if leg == "decode" and state in STILL_OPEN and ends and not whole:
                assert "cancel" in ends, f"decode has not cancelled its transfer at {state}"

    engines.runner.run(run())
