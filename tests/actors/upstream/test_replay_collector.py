"""A replayed answer has the groups of its record, independently of the engine's output timing."""

from __future__ import annotations

import asyncio
from random import Random

import pytest
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.output_processor import RequestOutputCollector

from actors.errors import CannotResumeError
from actors.replay_log import ServedCall
from actors.upstream.vllm_replaying_llm import ReplayCollector

TOKENS = tuple(range(20))


def output(*tokens: int, finished: bool = False) -> RequestOutput:
    text = "".join(f"<{token}>" for token in tokens)
    completion = CompletionOutput(0, text, list(tokens), None, None, "length" if finished else None)
    return RequestOutput("r", None, [0], None, [completion], finished)


def aborted() -> RequestOutput:
    last = output(finished=True)
    last.outputs[0].finish_reason = "abort"
    return last


def cut(rng: Random, tokens: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Return `tokens` in groups of one to four."""
    groups = []
    while tokens:
        size = rng.randint(1, 4)
        groups.append(tokens[:size])
        tokens = tokens[size:]
    return tuple(groups)


@pytest.mark.parametrize("seed", range(40))
async def test_groups_come_back_as_they_were(seed: int) -> None:
    """Groups are the same for slow and fast readers; output after the record keeps its own
    groups.
    """
    rng = Random(seed)
    replay_log = cut(rng, TOKENS[: rng.randint(1, len(TOKENS))])
    served = ServedCall(replay=replay_log)
    collector = RequestOutputCollector(RequestOutputKind.DELTA, "r")
    replaying = ReplayCollector(collector, served)

    async def produce() -> None:
        for token in TOKENS:
            replaying.put(output(token, finished=token == TOKENS[-1]))
            for _ in range(rng.choice((0, 0, 1, 3))):
                await asyncio.sleep(0)

    producing = asyncio.create_task(produce())
    read: list[RequestOutput] = []
    while not read or not read[-1].finished:
        read.append(await collector.get())
        for _ in range(rng.choice((0, 0, 2))):
            await asyncio.sleep(0)
        replaying.release()
    await producing
    groups = [tuple(one.outputs[0].token_ids) for one in read]
    assert tuple(groups[: len(replay_log)]) == replay_log
    assert sum(groups, ()) == TOKENS
    assert [one.outputs[0].text for one in read] == ["".join(f"<{token}>" for token in group) for group in groups]


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


async def test_an_error_of_the_engine_passes_at_once() -> None:
    """The error overtakes outputs that wait for their group."""
    collector = RequestOutputCollector(RequestOutputKind.DELTA, "r")
    replaying = ReplayCollector(collector, ServedCall(replay=((0, 1, 2),)))
    replaying.put(output(0))
    replaying.put(ConnectionError("gone"))
    with pytest.raises(ConnectionError):
        await asyncio.wait_for(collector.get(), 1)


async def test_an_engine_that_stops_while_it_repeats_has_not_diverged() -> None:
    """Another engine may still continue the stream."""
    served = ServedCall(replay=((0, 1), (2,)))
    collector = RequestOutputCollector(RequestOutputKind.DELTA, "r")
    replaying = ReplayCollector(collector, served)
    replaying.put(output(0))
    replaying.put(aborted())
    assert (await collector.get()).outputs[0].finish_reason == "abort"
    assert served.problem is None
