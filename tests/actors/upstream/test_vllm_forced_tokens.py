"""Forced rows and their tokens as requests arrive, move and leave in vLLM's batches."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate
from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext

from actors.upstream.vllm_forced_tokens import FORCED_TOKENS, ForcedTokens, ForcedTokensV2
from connectors.protocol.params import EMITTED_TOKENS

VOCABULARY = 8


def params(*forced: int, emitted: tuple[int, ...] = ()) -> SamplingParams:
    extra = {FORCED_TOKENS: list(forced), EMITTED_TOKENS: list(emitted)}
    return SamplingParams(extra_args=extra if forced else None)


def only(logits: torch.Tensor) -> list[int | None]:
    """Return for each row the only token that can be sampled, or None if all can."""
    finite = torch.isfinite(logits)
    return [int(row.nonzero()) if row.sum() == 1 else None for row in finite]


def update(size: int, *, removed: tuple = (), added: tuple = (), moved: tuple = ()) -> BatchUpdate:
    return BatchUpdate(batch_size=size, removed=removed, added=added, moved=moved)


def rows(processor: ForcedTokens, count: int) -> list[int | None]:
    return only(processor.apply(torch.rand(count, VOCABULARY)))


def test_a_preempted_request_goes_on_where_it_was() -> None:
    processor = ForcedTokens(None, torch.device("cpu"), False)
    processor.update_state(update(1, added=((0, params(4, 5, 6), [0], [4, 5]),)))
    assert rows(processor, 1) == [6]


@pytest.mark.parametrize(
    ("visible", "forced"),
    [(2, None), (4, 6), (5, 7), (6, None)],
    ids=["within the prompt", "first", "second", "after"],
)
def test_in_slots(visible: int, forced: int | None) -> None:
    """The V2 runner: the prompt has 4 tokens in slot 3; slot 1 is another request's."""
    state = SimpleNamespace(prompt_len=SimpleNamespace(np=np.array([0, 2, 0, 4], dtype=np.int32)))
    processor = ForcedTokensV2(None, state)
    assert processor.add_request(3, params(6, 7))
    assert not processor.add_request(1, params())
    nothing = torch.empty(0)
    context = LogitsContext(
        expanded_idx_mapping=torch.tensor([1, 3]),
        idx_mapping=torch.tensor([1, 3]),
        idx_mapping_np=np.array([1, 3]),
        expanded_local_pos=nothing,
        input_ids=nothing,
        pos=nothing,
        seq_lens_upper_bound_np=np.array([2, visible]),
    )
    assert only(processor.apply(torch.rand(2, VOCABULARY), context)) == [None, forced]
    assert not processor.add_request(3, params())
    assert only(processor.apply(torch.rand(2, VOCABULARY), context)) == [None, None], "the slot's next request"
