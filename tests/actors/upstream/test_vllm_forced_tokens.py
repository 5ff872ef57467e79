"""Forced rows and their tokens as requests arrive, move and leave in vLLM's batches."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, MoveDirectionality
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


def test_a_request_gets_its_tokens_one_after_the_other_and_is_then_free() -> None:
    """The output list is vLLM's own, which grows with each step."""
    processor = ForcedTokens(None, torch.device("cpu"), False)
    output: list[int] = []
    processor.update_state(update(2, added=((0, params(5, 3), [1], output), (1, params(), [1], []))))
    seen = []
    for _ in range(3):
        processor.update_state(None)
        seen.append(rows(processor, 2))
        output.append(-1)  # a placeholder, as with asynchronous scheduling
    assert seen == [[5, None], [3, None], [None, None]]


def test_rows_move_and_are_taken_over() -> None:
    """A row's next request does not inherit the former one's tokens."""
    processor = ForcedTokens(None, torch.device("cpu"), False)
    one: tuple[Any, ...] = (params(1), [0], [])
    two: tuple[Any, ...] = (params(2), [0], [])
    processor.update_state(update(3, added=((0, *one), (1, params(), [0], []), (2, *two))))
    assert rows(processor, 3) == [1, None, 2]
    processor.update_state(update(3, moved=((0, 2, MoveDirectionality.SWAP),)))
    assert rows(processor, 3) == [2, None, 1]
    processor.update_state(update(2, removed=(0,), moved=((2, 0, MoveDirectionality.UNIDIRECTIONAL),)))
    assert rows(processor, 2) == [1, None]
    processor.update_state(update(2, removed=(0,), added=((0, params(), [0], []),)))
    assert rows(processor, 2) == [None, None]


def test_a_preempted_request_goes_on_where_it_was() -> None:
    """A preempted request returns with its output, and continues after it."""
    processor = ForcedTokens(None, torch.device("cpu"), False)
    processor.update_state(update(1, added=((0, params(4, 5, 6), [0], [4, 5]),)))
    assert rows(processor, 1) == [6]


def test_tokens_after_emitted_ones_are_forced() -> None:
    processor = ForcedTokens(None, torch.device("cpu"), False)
    processor.update_state(update(1, added=((0, params(6, emitted=(4, 5)), [0], output := [4, 5]),)))
    assert rows(processor, 1) == [6]
    output.append(6)
    assert rows(processor, 1) == [None]


def test_what_is_forced_changes_greedy_answers() -> None:
    """vLLM must not skip the processor in a greedy batch."""
    assert ForcedTokens(None, torch.device("cpu"), False).is_argmax_invariant() is False


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
