"""Damage to cached KV, and the measurement's prompts; no test loads weights."""

from random import Random

import pytest
import torch

from benchmarks.demo_model.sensitivity import FULL, LENGTHS, SLIDING, Fault, damaged, draw_batch, kv_groups


def test_groups_are_those_of_vllm() -> None:
    assert kv_groups([SLIDING, SLIDING, FULL] * 2) == ((0, 3), (1, 4), (2, 5))
    assert kv_groups([SLIDING, FULL]) == ((0,), (1,))


def test_zeroed_and_exchanged_states() -> None:
    states = torch.arange(1, 25).view(3, 1, 4, 2)
    assert not damaged(states, Fault.ZEROED).any()
    assert damaged(states, Fault.OTHER).equal(states[[2, 0, 1]])


@pytest.mark.parametrize("last", [1, 3, 4, 9])
def test_damage_is_restricted_to_the_last_tokens(last: int) -> None:
    states = torch.arange(1, 25).view(3, 1, 4, 2)
    kept = max(4 - last, 0)
    result = damaged(states, Fault.ZEROED, last)
    assert result[:, :, :kept].equal(states[:, :, :kept])
    assert not result[:, :, kept:].any()


@pytest.mark.parametrize("chat", [False, True])
def test_batches_are_of_one_length_and_ask_for_distinct_names(chat: bool) -> None:
    for length in LENGTHS:
        prompts = draw_batch(Random(1), length, chat, 5)
        assert len({prompt.question_name for prompt in prompts}) == 5
        assert len({len(prompt.facts) for prompt in prompts}) == 1
