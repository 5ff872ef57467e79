"""Requests that vLLM's scheduler starts after tokens that another engine has emitted."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.v1.request import Request

from connectors.protocol.params import EMITTED_TOKENS
from connectors.vllm_hma.upstream.vllm_emitted_tokens import restore_output
from tests.campaigns.schedules.scheduling import Engine

PROMPT = list(range(10, 30))
ANSWER = list(range(100, 160))


def resumed(name: str, engine: Engine | None = None) -> Request:
    params = SamplingParams(max_tokens=100, extra_args={EMITTED_TOKENS: ANSWER})
    return Request(name, PROMPT, params, None, block_hasher=engine.hasher if engine else None)


def test_a_resumed_request_may_have_cached_kv_beyond_its_prompt() -> None:
    """vLLM asserts that a new request has none: a second copy of a stream would end the engine."""
    engine = Engine(0)
    computed = {}
    for name in ("first", "second"):
        engine.scheduler.add_request(resumed(name, engine))
        computed[name] = 0
        while engine.scheduler.requests[name].num_output_tokens == len(ANSWER):
            output = engine.scheduler.schedule()
            computed[name] += output.num_scheduled_tokens.get(name, 0)
            engine.scheduler.update_from_output(output, engine.execute(output))
    assert computed["first"] >= len(PROMPT + ANSWER)
    assert 0 < computed["second"] < len(ANSWER)


def test_the_output_is_restored_once() -> None:
    """Each connector of an engine with several calls `restore_output`."""
    request = resumed("r")
    for _ in range(2):
        restore_output(request)
    assert list(request.output_token_ids) == ANSWER
    assert list(request.all_token_ids) == PROMPT + ANSWER


@pytest.mark.parametrize("accepts", [True, False])
def test_a_grammar_accepts_the_tokens_when_it_is_compiled(accepts: bool) -> None:
    accepted: list[tuple[str, list[int]]] = []

    def accept(request_id: str, tokens: list[int]) -> bool:
        accepted.append((request_id, tokens))
        return accepts

    request, compiled = resumed("r"), Future[Any]()
    structured: Any = SimpleNamespace(_grammar=compiled)
    request.structured_output_request = structured
    restore_output(request)
    assert not accepted
    compiled.set_result(grammar := SimpleNamespace(accept_tokens=accept))
    assert accepted == [("r", ANSWER)]
    if accepts:
        assert structured.grammar.result() is grammar
    else:
        with pytest.raises(ValueError, match="rejects"):
            structured.grammar.result()
