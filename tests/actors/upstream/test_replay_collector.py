"""A replayed answer has the groups of its record, independently of the engine's output timing."""

from __future__ import annotations

import asyncio

import pytest
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.output_processor import RequestOutputCollector

from actors.errors import CannotResumeError
from actors.replay_log import ServedCall
from actors.upstream.vllm_replaying_llm import ReplayCollector


def output(*tokens: int, finished: bool = False) -> RequestOutput:
    text = "".join(f"<{token}>" for token in tokens)
    completion = CompletionOutput(0, text, list(tokens), None, None, "length" if finished else None)
    return RequestOutput("r", None, [0], None, [completion], finished)


def aborted() -> RequestOutput:
    last = output(finished=True)
    last.outputs[0].finish_reason = "abort"
    return last


@pytest.mark.parametrize(
    "outputs",
    [
        [output(0), output(9)],
        [output(0, 1, 2)],
        [output(0, finished=True)],
        [output(0), output(1, finished=True)],
    ],
    ids=["another token", "a step across a border", "an end within a group", "an end before the last group"],
)
async def test_an_engine_that_does_not_repeat_is_an_error(outputs: list[RequestOutput]) -> None:
    """The client receives no other tokens instead of the recorded ones."""
    served = ServedCall(replay=((0, 1), (2,)))
    collector = RequestOutputCollector(RequestOutputKind.DELTA, "r")
    replaying = ReplayCollector(collector, served)

    async def read() -> None:
        for one in outputs:
            replaying.put(one)
        while True:
            await collector.get()
            replaying.release()

    with pytest.raises(CannotResumeError, match="did not repeat"):
        await asyncio.wait_for(read(), 1)
    with pytest.raises(CannotResumeError, match="did not repeat"):
        served.check()


async def test_an_end_of_the_engine_overtakes_outputs_that_wait() -> None:
    """An engine that stops while it repeats has not diverged: another one may continue."""
    served = ServedCall(replay=((0, 1, 2),))
    collector = RequestOutputCollector(RequestOutputKind.DELTA, "r")
    replaying = ReplayCollector(collector, served)
    replaying.put(output(0))
    replaying.put(aborted())
    assert (await collector.get()).outputs[0].finish_reason == "abort"
    replaying.put(ConnectionError("gone"))
    with pytest.raises(ConnectionError):
        await asyncio.wait_for(collector.get(), 1)
    assert served.problem is None
