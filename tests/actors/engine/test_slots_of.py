"""Slots of an engine, from its limits."""

import pytest

from actors.engine.vllm_engine import slots_of


@pytest.mark.parametrize(
    ("max_num_seqs", "kv_blocks", "slots"),
    [
        (16, 1000, 32),
        (256, 300, 300),  # a sequence needs at least a block
        (1, 1000, 2),
        (256, 0, 512),  # models without KV cache groups
        (16, 1, 1),
    ],
)
def test_twice_the_sequences_of_a_step_that_have_a_block(max_num_seqs: int, kv_blocks: int, slots: int) -> None:
    """The engine accepts as many waiting requests as running ones."""
    assert slots_of(max_num_seqs, kv_blocks) == slots
