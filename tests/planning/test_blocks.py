"""Tokens to blocks: tables worked out by hand around window and block boundaries. Blocks have 4 tokens."""

import numpy as np
import pytest

from connectors.errors import PlanError
from connectors.planning.blocks import (
    BlockSet,
    UnitShape,
    complete_units,
    empty_blocks,
    first_needed_token,
    wanted_blocks,
)
from connectors.planning.layout import Group, GroupKind

FULL = Group(0, GroupKind.FULL, 4, None, ())


def sliding(window_tokens: int) -> Group:
    return Group(1, GroupKind.SLIDING, 4, window_tokens, ())


TABLE = list(range(101, 111))
"""Block 100 + p + 1 at position p, for up to 40 tokens."""


@pytest.mark.parametrize(
    ("start", "end", "positions"),
    [
        (0, 0, []),
        (0, 1, [0]),
        (0, 3, [0]),
        (0, 4, [0]),
        (0, 5, [0, 1]),
        (0, 16, [0, 1, 2, 3]),
        (4, 16, [1, 2, 3]),
        (8, 9, [2]),
        (16, 16, []),
    ],
)
def test_full_attention_wants_all_blocks(start: int, end: int, positions: list[int]) -> None:
    """Every block with a token in [start, end), the last one even if it is not full."""
    blocks = wanted_blocks(FULL, TABLE, start, end)
    assert blocks.positions.tolist() == positions
    assert blocks.ids.tolist() == [TABLE[p] for p in positions]


@pytest.mark.parametrize(
    ("window", "start", "end", "positions"),
    [
        # resuming at token e looks at tokens e-W+1 .. e; those below e come from the producer
        (4, 0, 3, [0]),
        (4, 0, 4, [0]),  # tokens 1..4: 1, 2, 3 are wanted, block 1 is the consumer's own
        (4, 0, 5, [0, 1]),  # tokens 2..5
        (4, 0, 7, [1]),  # tokens 4..7
        (4, 0, 8, [1]),  # tokens 5..8
        (4, 0, 11, [2]),
        (5, 0, 7, [0, 1]),  # tokens 3..7
        (5, 0, 8, [1]),  # tokens 4..8
        (8, 0, 40, [8, 9]),  # tokens 33..40
        (8, 0, 39, [8, 9]),  # tokens 32..39
        (8, 0, 38, [7, 8, 9]),  # tokens 31..38
        (100, 0, 10, [0, 1, 2]),  # the window is longer than the prompt
        (8, 36, 39, [9]),  # a prefix hit inside the window
        (8, 8, 39, [8, 9]),  # a prefix hit before the window
        (1, 0, 8, []),  # a window of one token: the next token looks at itself only
        (1, 0, 9, []),  # even where that token does not begin a block
    ],
)
def test_sliding_window_wants_its_window(window: int, start: int, end: int, positions: list[int]) -> None:
    """Blocks that resuming at ``end`` looks at, and none before them."""
    blocks = wanted_blocks(sliding(window), TABLE, start, end)
    assert blocks.positions.tolist() == positions
    assert blocks.ids.tolist() == [TABLE[p] for p in positions]


@pytest.mark.parametrize(("window", "resume", "first"), [(4, 0, 0), (4, 3, 0), (4, 4, 1), (4, 10, 7), (1, 10, 10)])
def test_first_needed_token(window: int, resume: int, first: int) -> None:
    """A window of W tokens ends with the token that is computed."""
    assert first_needed_token(sliding(window), resume) == first
    assert first_needed_token(FULL, resume) == 0


def test_null_blocks_before_the_window_are_ignored() -> None:
    """The allocator's null block stands where the window has passed."""
    assert wanted_blocks(sliding(4), [0, 0, 7], 0, 12).ids.tolist() == [7]


def test_a_null_block_that_is_needed_is_refused() -> None:
    """What is needed and not allocated is computed by the consumer itself; the error names the position."""
    with pytest.raises(PlanError, match="group 1: no block is allocated at position 2"):
        wanted_blocks(sliding(8), [0, 6, 0, 7], 0, 15)


def test_a_short_table_is_refused() -> None:
    """A table that ends before the tokens do cannot be filled."""
    with pytest.raises(PlanError, match="group 0: the block table has 2 blocks, tokens up to 9 need 3"):
        wanted_blocks(FULL, [1, 2], 0, 9)


@pytest.mark.parametrize(("start", "end"), [(-1, 3), (5, 4)])
def test_a_backward_range_is_refused(start: int, end: int) -> None:
    """start <= end, both from 0."""
    with pytest.raises(PlanError, match="not a range"):
        wanted_blocks(FULL, TABLE, start, end)


@pytest.mark.parametrize(
    ("computed", "end", "complete"),
    [
        (0, 10, [False, False, False]),
        (3, 10, [False, False, False]),
        (4, 10, [True, False, False]),
        (7, 10, [True, False, False]),
        (8, 10, [True, True, False]),
        (9, 10, [True, True, False]),
        (10, 10, [True, True, True]),  # the last block is complete with the prompt
        (11, 10, [True, True, True]),
        (12, 12, [True, True, True]),
        (11, 12, [True, True, False]),
    ],
)
def test_complete_units(computed: int, end: int, complete: list[bool]) -> None:
    """A block is complete when all its tokens below the end are computed."""
    assert complete_units(FULL, np.arange(3), UnitShape(4, 1, 1), computed, end).tolist() == complete


def test_block_sets_are_two_vectors_of_one_length() -> None:
    """Smell 1: the pair cannot come apart."""
    assert len(empty_blocks()) == 0
    with pytest.raises(PlanError, match="two vectors of one length"):
        BlockSet(np.arange(2), np.arange(3))
    with pytest.raises(PlanError, match="two vectors of one length"):
        BlockSet(np.zeros((1, 2), np.int64), np.zeros((1, 2), np.int64))
