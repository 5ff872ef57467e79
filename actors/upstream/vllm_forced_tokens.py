"""Logits processors that make a request emit given tokens first, for both of vLLM's model runners.

State that depends on the order of steps advances as if the tokens had been sampled: a seeded
generator advances once per step, penalties and grammars include the tokens, raw logprobs are the
model's.
"""

from typing import Any

import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates
from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext, LogitsProcRequestState
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as LogitsProcessorV2

from connectors.protocol.params import EMITTED_TOKENS

FORCED_TOKENS = "tandem_forced_tokens"
"""Key of SamplingParams.extra_args with the ids of the tokens to emit first."""


def forced_tokens(params: SamplingParams) -> list[int]:
    """Return the tokens by their position in the output, of which the first may be emitted."""
    extra = params.extra_args or {}
    forced: list[int] = extra.get(FORCED_TOKENS) or []
    return [*(extra.get(EMITTED_TOKENS) or ()), *forced] if forced else []


def force(logits: torch.Tensor, row: int, token: int) -> None:
    logits[row] = -torch.inf
    logits[row, token] = 0.0


class ForcedTokens(LogitsProcessor):
    """Processor for vLLM's V1 model runner, which moves requests between rows."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._rows: dict[int, tuple[list[int], list[int]]] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        def entry(params: SamplingParams, _: list[int] | None, output: list[int]) -> Any:
            forced = forced_tokens(params)
            return (forced, output) if forced else None

        process_dict_updates(self._rows, batch_update, entry)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for row, (forced, output) in self._rows.items():
            if len(output) < len(forced):
                force(logits, row, forced[len(output)])
        return logits


class ForcedTokensV2(LogitsProcessorV2):
    """Processor for vLLM's V2 model runner, in which a request keeps its state index (`req_idx`).

    The runner passes the length of each sequence, which includes the prompt.
    """

    def __init__(self, vllm_config: Any, req_states: LogitsProcRequestState) -> None:
        self._prompt_len = req_states.prompt_len
        self._slots: dict[int, list[int]] = {}

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        self._slots.pop(req_idx, None)
        if forced := forced_tokens(sampling_params):
            self._slots[req_idx] = forced
        return bool(forced)

    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        # A row is a request: vLLM refuses custom processors together with speculative decoding.
        for row, slot in enumerate(ctx.idx_mapping_np.tolist() if self._slots else ()):
            forced = self._slots.get(slot, ())
            position = int(ctx.seq_lens_upper_bound_np[row]) - int(self._prompt_len.np[slot])
            if 0 <= position < len(forced):
                force(logits, row, forced[position])
        return logits
