"""Start a request after tokens that another engine has emitted, as if it had been preempted there.

Penalties, `min_tokens`, bad words and the V2 runner's generators follow the output. The V2 runner
takes it from the scheduler; the V1 runner begins every request without, so `prepare_v1_runner`
replaces its record. Sources: request.py, structured_output/request.py, worker/gpu_model_runner.py
in https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/v1
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import TYPE_CHECKING

from connectors.protocol.params import EMITTED_TOKENS

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.v1.request import Request
    from vllm.v1.structured_output.backend_types import StructuredOutputGrammar


def emitted_tokens(params: SamplingParams | None) -> list[int]:
    extra = {} if params is None else params.extra_args or {}
    return extra.get(EMITTED_TOKENS) or []


def restore_output(request: Request) -> None:
    """Append the emitted tokens to a request that vLLM's scheduler has just received.

    Its grammar, which vLLM may still be compiling, accepts them too. A second call, from another
    connector of the engine, has no effect.
    """
    tokens = emitted_tokens(request.sampling_params)
    if not tokens or request.num_output_tokens:
        return
    request.append_output_token_ids(tokens)
    # vLLM asserts that a new request has no KV beyond its prompt.
    request.prefill_stats = None
    if (structured := request.structured_output_request) is not None:
        compiled = structured._grammar  # noqa: SLF001 - see the module's sources
        assert isinstance(compiled, Future), "vLLM compiles no grammar in a thread (external_launcher)"
        structured.grammar = _advanced(compiled, request.request_id, tokens)


def _advanced(
    compiled: Future[StructuredOutputGrammar], request_id: str, tokens: list[int]
) -> Future[StructuredOutputGrammar]:
    advanced: Future[StructuredOutputGrammar] = Future()

    def advance(_: Future[StructuredOutputGrammar]) -> None:
        try:
            grammar = compiled.result()
            if not grammar.accept_tokens(request_id, tokens):
                raise ValueError(f"the grammar of request {request_id} rejects tokens that another engine emitted")
        except Exception as error:  # vLLM fails the request with it
            advanced.set_exception(error)
        else:
            advanced.set_result(grammar)

    compiled.add_done_callback(advance)
    return advanced


def prepare_v1_runner() -> None:
    from vllm.v1.worker import gpu_model_runner
    from vllm.v1.worker.gpu_input_batch import CachedRequestState

    class RestoredRequestState(CachedRequestState):
        def __post_init__(self) -> None:
            super().__post_init__()
            if not self.output_token_ids:
                self.output_token_ids.extend(emitted_tokens(self.sampling_params))

    gpu_model_runner.CachedRequestState = RestoredRequestState
