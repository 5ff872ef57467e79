"""Answers that vLLM's frontend must not give: of changed adapters, and of engines that stop."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import pytest
from vllm.lora.request import LoRARequest
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import FinishReason
from vllm.v1.engine.async_llm import AsyncLLM

from actors.errors import CannotResumeError, EngineDownError
from actors.replay_log import SERVED_CALL, ServedCall
from actors.request import StreamChunk
from actors.telemetry.timestamps import KvArrivals
from actors.upstream.vllm_replaying_llm import ReplayingLLM


async def test_a_stream_of_an_adapter_that_may_have_changed_is_not_resumed() -> None:
    """The stream is not resumed: its first tokens would be from other weights than the rest."""
    llm = object.__new__(ReplayingLLM)
    llm.adapters_change = True
    served = ServedCall(replay=((5,),))
    token = SERVED_CALL.set(served)
    params = SamplingParams(output_kind=RequestOutputKind.DELTA)
    try:
        with pytest.raises(CannotResumeError, match="adapter may have changed"):
            await anext(llm.generate("x", params, "r", lora_request=LoRARequest("x", 1, "/x")))
    finally:
        SERVED_CALL.reset(token)
    with pytest.raises(CannotResumeError):
        served.check()


@pytest.mark.parametrize("n", [1, 2])
async def test_an_answer_that_a_stopping_engine_aborts_is_no_answer(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's serving layer would answer 200 with the text so far (`finish_reason` is `abort`)."""

    async def stops(*_: Any, **__: Any) -> AsyncGenerator[RequestOutput, None]:
        for reason in (None, str(FinishReason.ABORT)):
            completions = [CompletionOutput(0, "a", [5], None, None, finish_reason=reason)]
            yield RequestOutput("r", None, [0], None, completions, reason is not None)

    monkeypatch.setattr(AsyncLLM, "generate", stops)
    llm = object.__new__(ReplayingLLM)
    llm.adapters_change = False
    llm.arrivals = KvArrivals()
    served = ServedCall()
    token = SERVED_CALL.set(served)
    params = SamplingParams(output_kind=RequestOutputKind.DELTA, n=n)
    try:
        outputs = llm.generate("x", params, "r")
        assert (await anext(outputs)).outputs[0].token_ids == [5]
        # The router waits for a chunk with tokens, also of several choices, which are not recorded.
        assert served.chunk(b"x") == StreamChunk(b"x", ((5,),) if n == 1 else ())
        assert served.chunk(b"y") == b"y"
        with pytest.raises(EngineDownError, match="stopped and aborted"):
            await anext(outputs)
    finally:
        SERVED_CALL.reset(token)
    with pytest.raises(EngineDownError):
        served.check()
