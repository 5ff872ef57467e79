"""Cancellation of requests between real engines in each state of the connector's machines.

The campaign `explore` covers every interleaving of a cancellation with other events, tests/actors
and tests/app every wait of the router. Here vLLM aborts, with schedulers, workers and block pools.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid

import pytest

from testing.identity import random_prompt
from testing.sequential_proxy import PRODUCE
from tests.e2e.pair.conftest import BOUND_S, Engines, answers, until

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="package")]

PROMPT_TOKENS, ANSWER_TOKENS = 1300, 16
STATES = ("asked", "receive", "offer", "chunk", "write", "written", "received")
"""Last trace event before the cancellation; `asked`: none, the requests are on their way.

receive   decode has its blocks: CONNECTING, or OFFERED if the engines are connected
offer     prefill has decode's offer: EARLY or LIVE, the delivery OPEN
"""
STILL_OPEN = ("offer", "chunk", "write")
"""States in which most of the prompt is not computed, so a cancellation finds an open delivery.

Exception: this process was descheduled until the whole transfer had ended ("received").
"""


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("leg", ["prefill", "decode", "both"])
async def test_cancelled_in_each_state(engines: Engines, leg: str, n: int) -> None:
    """The other leg's answers are right, and both pools return to their baseline.

    With n of 2, vLLM copies the parameters to two requests on each engine, and the transfer id is
    valid for one of them.
    """
    pair, prompt = engines.one_to_two, random_prompt(PROMPT_TOKENS, seed=50)
    reference = await answers(pair.decode, prompt, ANSWER_TOKENS, 1, None)
    for state in STATES:
        assert await engines.idle()
        start, transfer_id = len(engines.events()), uuid.uuid4().hex
        produce, fetch = PRODUCE | {"transfer_id": transfer_id}, pair.address | {"transfer_id": transfer_id}
        tasks = {
            "prefill": asyncio.ensure_future(answers(pair.prefill, prompt, 1, n, produce)),
            "decode": asyncio.ensure_future(answers(pair.decode, prompt, ANSWER_TOKENS, n, fetch)),
        }
        if state != "asked":
            await until(lambda: engines.events(start, state) or tasks["decode"].done())  # noqa: B023
        for name, task in tasks.items():
            if leg in (name, "both"):
                task.cancel()
        for task in tasks.values():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait_for(task, BOUND_S)
        if leg == "prefill":
            assert tasks["decode"].result() == reference * n, f"wrong after {state}"
        assert await engines.idle(), f"blocks are held after {state}"
        ends = [event["event"] for event in engines.events(start) if event.get("transfer") == transfer_id]
        whole = any(event["failure"] is None for event in engines.events(start, "received"))
        # Without an event of the transfer, prefill was a chunk ahead of decode.
        if leg == "decode" and state in STILL_OPEN and ends and not whole:
            assert "cancel" in ends, f"decode has not cancelled its transfer at {state}"
