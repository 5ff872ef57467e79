"""Resumed streams that vLLM's frontend refuses."""

from __future__ import annotations

import pytest
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind, SamplingParams

from actors.errors import CannotResumeError
from actors.replay_log import SERVED_CALL, ServedCall
from actors.upstream.vllm_replaying_llm import ReplayingLLM


async def test_a_stream_of_an_adapter_that_may_have_changed_is_not_resumed() -> None:
    """Its first tokens would be from other weights than the rest."""
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
