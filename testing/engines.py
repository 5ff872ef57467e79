"""Real vLLM engines for tests: one prefill engine, one decode engine, and requests through both.

An engine costs tens of seconds and 1.5 GB, so tests share engines through session fixtures.
"""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from PIL.Image import Image
from vllm import SamplingParams, TokensPrompt
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.lora.request import LoRARequest
from vllm.v1.engine.async_llm import AsyncLLM

from testing.environment import ENVIRONMENT
from testing.sequential_proxy import PRODUCE

SHUTDOWN_S = 60.0
"""Time in seconds for an engine's processes to end.

On two busy cores they need more than vLLM's 5 s. vLLM kills them after that time, and fails if one
of them ends just before (`actors/upstream/vllm_processes/kill_process_tree.py`).
"""

MODULES = {
    "TandemConnector": "connectors.vllm_hma.connector",
    "TandemStoreConnector": "connectors.vllm_hma.store_connector",
    "SlowDiskConnector": "benchmarks.slow_disk",
}
"""Modules of connectors that are not vLLM's."""

SUPERVISOR = "the engines' supervisor"
"""Token of tests for the connector's ``supervisor``."""


@dataclass(frozen=True)
class Answer:
    """Answer of an engine: token ids, and for each the top logprobs (token, logprob), best
    first.

    ``token_at``  monotonic time of each token
    ``metrics``   vLLM's own times of the request
    ``prefill``   the prefill engine's answer, if a pair has answered
    """

    tokens: tuple[int, ...]
    logprobs: tuple[tuple[tuple[int, float], ...], ...]
    transfer: dict[str, Any] | None
    cached_tokens: int | None
    token_at: tuple[float, ...] = ()
    metrics: Any = None
    prefill: Any = None


class Engine(AsyncLLM):
    """Engine that gives its processes SHUTDOWN_S to end."""

    def shutdown(self, timeout: float | None = SHUTDOWN_S) -> None:
        super().shutdown(timeout)


def start_engine(
    model: str, tp_size: int, role: str | None, connector: str = "TandemConnector", **overrides: Any
) -> AsyncLLM:
    """Start an engine with a connector in ``role``, for example ``kv_producer``.

    ``role``       None: without a connector
    ``overrides``  engine arguments; ``transfer`` is the connector's extra configuration
    """
    os.environ.update(ENVIRONMENT)
    extra = overrides.pop("transfer", {})
    transfer = (
        KVTransferConfig(
            kv_connector=connector,
            kv_connector_module_path=MODULES.get(connector),
            kv_role=role,
            kv_load_failure_policy="recompute",
            kv_connector_extra_config=extra,
        )
        if role
        else None
    )
    arguments: dict[str, Any] = {
        "model": model,
        "tensor_parallel_size": tp_size,
        "kv_transfer_config": transfer,
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "block_size": 32,
        "max_model_len": 4096,
        "max_num_batched_tokens": 256,
        "max_num_seqs": 16,
        "disable_log_stats": False,
    }
    return Engine.from_engine_args(AsyncEngineArgs(**(arguments | overrides)))


async def generate(
    engine: AsyncLLM,
    prompt: Sequence[int],
    max_tokens: int,
    transfer: dict[str, Any] | None = None,
    logprobs: int | None = 2,
    request_id: str | None = None,
    lora: LoRARequest | None = None,
    rank: int | None = None,
    images: Sequence[Image] = (),
    **sampling: Any,
) -> Answer:
    """Run one request to its end, on data-parallel ``rank`` of the engine if it is given; greedy
    unless ``sampling`` has other parameters.

    ``images``  one for each ``IMAGE_TOKEN`` of the prompt
    """
    params = SamplingParams(
        max_tokens=max_tokens,
        ignore_eos=True,
        logprobs=logprobs,
        detokenize=False,
        extra_args={"kv_transfer_params": transfer} if transfer else None,
        **{"temperature": 0.0} | sampling,
    )
    token_at: list[float] = []
    final = None
    given = TokensPrompt(prompt_token_ids=list(prompt))
    if images:
        given["multi_modal_data"] = {"image": list(images)}
    async for output in engine.generate(
        given, params, request_id or uuid.uuid4().hex, lora_request=lora, data_parallel_rank=rank
    ):
        token_at += [time.monotonic()] * (len(output.outputs[0].token_ids) - len(token_at))
        final = output
    assert final is not None
    completion = final.outputs[0]
    best = tuple(
        tuple(sorted(((token, value.logprob) for token, value in position.items()), key=lambda item: -item[1]))
        for position in completion.logprobs or ()
    )
    tokens, transfer = tuple(completion.token_ids), final.kv_transfer_params
    return Answer(tokens, best, transfer, final.num_cached_tokens, tuple(token_at), final.metrics)


async def run_or_move(
    engine: AsyncLLM,
    prompt: Sequence[int],
    extra: dict[str, Any],
    max_tokens: int,
    moves_at: int | None = None,
    **sampling: Any,
) -> tuple[list[int], dict[str, Any] | None]:
    """Run a request to its end, or move it once it has this many tokens.

    Return its tokens, and the parameters of its KV if it has moved. The engine has SUPERVISOR.
    """
    options = {"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True, "detokenize": False}
    params = SamplingParams(**options | sampling, extra_args=extra)
    request_id, final = uuid.uuid4().hex, None
    async for output in engine.generate(TokensPrompt(prompt_token_ids=list(prompt)), params, request_id):
        final = output
        if moves_at is not None and len(output.outputs[0].token_ids) >= moves_at:
            moves_at = None
            (inner,) = engine.output_processor.external_req_ids.get(request_id) or [request_id]
            move = {"do_remote_decode": True, "transfer_id": uuid.uuid4().hex, "move": inner}
            await engine.notify_kv_transfer_request_rejected("move", move | {"supervisor": SUPERVISOR})
    assert final is not None
    return list(final.outputs[0].token_ids), final.kv_transfer_params


@dataclass
class Pair:
    """A prefill and a decode engine, and the prefill engine's address from its ``describe``
    answer.

    ``prefill_rank`` and ``decode_rank`` are the data-parallel ranks of the requests.
    """

    prefill: AsyncLLM
    decode: AsyncLLM
    address: dict[str, Any]
    prefill_rank: int | None = None
    decode_rank: int | None = None

    async def together(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        prefill: Mapping[str, Any] | None = None,
        decode: Mapping[str, Any] | None = None,
        **produce: Any,
    ) -> Answer:
        """Send both legs at once.

        ``prefill`` and ``decode`` are further arguments of ``generate`` for one leg, ``produce``
        parameters of the prefill leg.
        """
        transfer_id = uuid.uuid4().hex
        leg = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer_id, **produce}
        address = self.address | {"transfer_id": transfer_id}
        first, answer = await asyncio.gather(
            self._prefilled(prompt, leg, prefill),
            generate(self.decode, prompt, max_tokens, address, rank=self.decode_rank, **(decode or {})),
        )
        return replace(answer, prefill=first)

    async def in_turn(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        prefill: Mapping[str, Any] | None = None,
        decode: Mapping[str, Any] | None = None,
    ) -> Answer:
        """Send the prefill leg, then the decode leg with its parameters, as public proxies do."""
        first = await self._prefilled(prompt, PRODUCE, prefill)
        assert first.transfer is not None
        answer = await generate(
            self.decode, prompt, max_tokens, dict(first.transfer), rank=self.decode_rank, **(decode or {})
        )
        return replace(answer, prefill=first)

    async def _prefilled(self, prompt: Sequence[int], leg: dict[str, Any], more: Mapping[str, Any] | None) -> Answer:
        own = {"logprobs": None, **(more or {})}
        return await generate(self.prefill, prompt, 1, leg, rank=self.prefill_rank, **own)


async def describe(engine: AsyncLLM, rank: int | None = None) -> dict[str, Any]:
    """Return the address with which an engine, or its data-parallel ``rank``, answers
    ``describe``.
    """
    params = {"do_remote_decode": True, "describe": True}
    answer = await generate(engine, [1, 2, 3], 1, params, logprobs=None, rank=rank)
    assert answer.transfer is not None
    return answer.transfer
