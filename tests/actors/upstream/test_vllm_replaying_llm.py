"""Answers that vLLM's frontend must not give: of changed adapters, and of engines that stop."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import pytest
from vllm.exceptions import QueueOverflowError
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreRequest, FinishReason
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector

from actors.errors import EngineDownError
from actors.replay_log import SERVED_CALL, KvArrivals, ServedCall
from actors.request import TokenChunk, TokenSource
from actors.upstream.vllm_output_processor import SharedRequestOutputs
from actors.upstream.vllm_replaying_llm import ReplayingLLM
from connectors.vllm_hma.metrics import TandemStats


@pytest.mark.parametrize(
    ("rank", "lora", "source"),
    [
        (0, None, TokenSource("one")),
        (1, None, TokenSource("two")),
        (2, None, None),
        (0, LoRARequest("x", 1, "/x"), TokenSource("one", "content")),
        (1, LoRARequest("x", 1, "/x"), None),
        (0, LoRARequest("y", 2, "/y"), None),
        (0, LoRARequest("z", 3, "/z"), None),
    ],
)
async def test_a_stream_names_what_computes_it(
    rank: int, lora: LoRARequest | None, source: TokenSource | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine, and the content of the adapter as the workers of its rank have reported it."""

    async def samples(*_: Any, **__: Any) -> AsyncGenerator[RequestOutput, None]:
        for token in (5, 6):
            yield RequestOutput("r", None, [0], None, [CompletionOutput(0, "a", [token], None, None)], False)

    monkeypatch.setattr(AsyncLLM, "generate", samples)
    llm = object.__new__(ReplayingLLM)
    llm.arrivals, llm.identities = KvArrivals(), ["one", "two", ""]
    for adapters in ({"1 /x": "content", "2 /y": "content"}, {"2 /y": ""}):
        stats = TandemStats()
        for adapter, identity in adapters.items():
            stats.adapter(adapter, identity)
        llm.arrivals.observe(stats.data, rank=0)
    served = ServedCall(data_parallel_rank=rank)
    token = SERVED_CALL.set(served)
    try:
        params = SamplingParams(output_kind=RequestOutputKind.DELTA)
        chunks = [served.chunk(b"") async for _ in llm.generate("x", params, "r", lora_request=lora)]
    finally:
        SERVED_CALL.reset(token)
    assert chunks == [TokenChunk(b"", ((5,),), source=source), TokenChunk(b"", ((6,),))]


async def test_an_adapter_that_is_reported_after_its_first_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM records the statistics of a step after it has passed on the tokens."""

    async def samples(*_: Any, **__: Any) -> AsyncGenerator[RequestOutput, None]:
        for token in (5, 6, 7):
            yield RequestOutput("r", None, [0], None, [CompletionOutput(0, "a", [token], None, None)], False)

    monkeypatch.setattr(AsyncLLM, "generate", samples)
    llm = object.__new__(ReplayingLLM)
    llm.arrivals, llm.identities = KvArrivals(), ["one"]
    served, lora, chunks, moves = ServedCall(), LoRARequest("x", 1, "/x"), [], list[bool]()
    token = SERVED_CALL.set(served)
    try:
        params = SamplingParams(output_kind=RequestOutputKind.DELTA)
        async for output in llm.generate("x", params, "r", lora_request=lora):
            served.movable = True
            chunks.append(served.chunk(b""))
            moves.append(served.may_move)
            if output.outputs[0].token_ids == [5]:
                stats = TandemStats()
                stats.adapter("1 /x", "content")
                llm.arrivals.observe(stats.data)
    finally:
        SERVED_CALL.reset(token)
    source = TokenSource("one", "content")
    assert chunks == [TokenChunk(b"", ((5,),)), TokenChunk(b"", ((6,),), source=source), TokenChunk(b"", ((7,),))]
    assert moves == [False, True, True]  # the router could not resume a stream of unknown source


@pytest.mark.parametrize("n", [1, 2])
async def test_an_answer_that_a_stopping_engine_aborts_is_no_answer(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's serving layer would answer 200 with the text so far (`finish_reason` is `abort`)."""

    async def stops(*_: Any, **__: Any) -> AsyncGenerator[RequestOutput, None]:
        for reason in (None, str(FinishReason.ABORT)):
            completions = [CompletionOutput(0, "a", [5], None, None, finish_reason=reason)]
            yield RequestOutput("r", None, [0], None, completions, reason is not None)

    monkeypatch.setattr(AsyncLLM, "generate", stops)
    llm = object.__new__(ReplayingLLM)
    llm.arrivals = KvArrivals()
    served = ServedCall()
    token = SERVED_CALL.set(served)
    params = SamplingParams(output_kind=RequestOutputKind.DELTA, n=n)
    try:
        outputs = llm.generate("x", params, "r")
        assert (await anext(outputs)).outputs[0].token_ids == [5]
        # The router waits for a chunk with tokens, also of several choices, which are not recorded.
        assert served.chunk(b"x") == TokenChunk(b"x", ((5,),) if n == 1 else ())
        assert served.chunk(b"y") == b"y"
        with pytest.raises(EngineDownError, match="stopped and aborted"):
            await anext(outputs)
    finally:
        SERVED_CALL.reset(token)
    with pytest.raises(EngineDownError):
        served.check()


def engine_request(tokens: list[int] | None, *images: tuple[str, int]) -> EngineCoreRequest:
    """Return a request with images of these (identifier, offset)."""
    features = [MultiModalFeatureSpec(None, "image", name, PlaceholderRange(at, 2)) for name, at in images]
    params = SamplingParams(output_kind=RequestOutputKind.DELTA)
    return EngineCoreRequest("r", tokens, features, params, None, 0.0, None, None, None)


async def chunk_of(request: EngineCoreRequest, monkeypatch: pytest.MonkeyPatch) -> TokenChunk:
    """Return the first chunk of a stream of this request."""

    async def adds(*_: Any) -> None:
        pass

    monkeypatch.setattr(AsyncLLM, "_add_request", adds)
    llm: Any = object.__new__(ReplayingLLM)
    served = ServedCall(split_first=True)
    token = SERVED_CALL.set(served)
    try:
        queue = RequestOutputCollector(RequestOutputKind.DELTA, request_id="r")
        await llm._add_request(request, None, None, 0, queue)  # noqa: SLF001
    finally:
        SERVED_CALL.reset(token)
    served.sampled()
    early = served.chunk(b"no token")
    assert isinstance(early, TokenChunk)
    assert early.prompt_digest is None
    served.record([1])
    chunk = served.chunk(b"first")
    served.record([2])
    later = served.chunk(b"second")
    assert isinstance(chunk, TokenChunk)
    assert isinstance(later, TokenChunk)
    assert later.prompt_digest is None
    return chunk


async def test_the_digest_of_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Token ids, images and their offsets change it; the first chunk with a token has it."""
    requests = [
        engine_request([1, 2, 3, 4]),
        engine_request([1, 2, 3, 5]),
        engine_request([1, 2, 3, 4], ("a", 0)),
        engine_request([1, 2, 3, 4], ("b", 0)),
        engine_request([1, 2, 3, 4], ("a", 1)),
        engine_request([1, 2, 3, 4], ("a", 0), ("b", 2)),
    ]
    found = [(await chunk_of(one, monkeypatch)).prompt_digest for one in requests]
    assert None not in found
    assert len({*found}) == len(found)
    assert (await chunk_of(requests[2], monkeypatch)).prompt_digest == found[2]
    assert (await chunk_of(engine_request(None), monkeypatch)).prompt_digest is None


async def test_a_refused_request_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM raises QueueOverflowError before the output processor registers the request."""

    async def refuses(*_: Any) -> None:
        raise QueueOverflowError

    monkeypatch.setattr(AsyncLLM, "_add_request", refuses)
    llm: Any = object.__new__(ReplayingLLM)
    llm.output_processor = OutputProcessor(None, log_stats=False)
    SharedRequestOutputs.take_over(llm.output_processor, None)
    token = SERVED_CALL.set(ServedCall(split_first=True, unfinished=True))
    queue = RequestOutputCollector(RequestOutputKind.DELTA, request_id="r")
    try:
        with pytest.raises(QueueOverflowError):
            await llm._add_request(engine_request([1]), None, None, 0, queue)  # noqa: SLF001
    finally:
        SERVED_CALL.reset(token)
    assert not llm.output_processor.unfinished
