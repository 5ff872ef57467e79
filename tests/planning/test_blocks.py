"""Tokens to blocks: refusals, and boundaries that the oracle's sample leaves out.

Blocks have 4 tokens.
"""

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
from connectors.planning.layout import Group, GroupKind, LayerPages
from connectors.planning.plan import unit_shape

FULL = Group(0, GroupKind.FULL, 4, None, ())
STATE = Group(2, GroupKind.STATE, 4, None, ())


def sliding(window_tokens: int) -> Group:
    return Group(1, GroupKind.SLIDING, 4, window_tokens, ())


def chunked(window_tokens: int) -> Group:
    return Group(3, GroupKind.CHUNKED, 4, window_tokens, ())


TABLE = list(range(101, 111))
"""Block table with block 100 + p + 1 at position p, for up to 40 tokens."""


@pytest.mark.parametrize(
    ("group", "resume", "first"),
    [
        *(
            (FULL, 10, 0),
            (STATE, 10, 0),
            (sliding(4), 0, 0),
            (sliding(4), 3, 0),
            (sliding(4), 4, 1),
            (sliding(1), 10, 10),
        ),
        *((chunked(8), 7, 0), (chunked(8), 8, 8), (chunked(8), 15, 8), (chunked(6), 11, 6), (chunked(100), 40, 0)),
    ],
)
def test_first_needed_token(group: Group, resume: int, first: int) -> None:
    assert first_needed_token(group, resume) == first


@pytest.mark.parametrize(
    ("group", "table", "start", "end", "says"),
    [
        (FULL, [0, 6, 7], 0, 11, "group 0: .* position 0"),
        (sliding(6), [5, 0, 7], 0, 11, "group 1: .* position 1"),
        (sliding(8), [0, 6, 0, 7], 0, 15, "group 1: .* position 2"),
        (chunked(8), [5, 6, 0], 0, 11, "group 3: .* position 2"),
        (FULL, [1, 2], 0, 9, "group 0: .* 2 blocks, .* need 3"),
        (STATE, [], 0, 5, "group 2: .* 5 tokens"),
        (STATE, [0], 0, 5, "group 2"),
        (STATE, [4, 0], 0, 5, "group 2"),
        (FULL, TABLE, -1, 3, "start_token -1"),
        (FULL, TABLE, 5, 4, "start_token 5"),
    ],
)
def test_needed_blocks_are_allocated(group: Group, table: list[int], start: int, end: int, says: str) -> None:
    """The consumer computes a prompt itself if it lacks a block for a needed token."""
    with pytest.raises(PlanError, match=says):
        wanted_blocks(group, table, start, end)


def test_null_blocks_before_the_window_and_old_states_are_ignored() -> None:
    assert wanted_blocks(sliding(4), [0, 0, 7], 0, 12).ids.tolist() == [7]
    for table, end, block in (([7], 3, 7), ([0, 0, 9], 11, 9), ([5, 6, 9], 11, 9), ([5, 6, 9], 7, 6)):
        blocks = wanted_blocks(STATE, table, 0, end)
        assert (blocks.positions.tolist(), blocks.ids.tolist()) == ([0], [block])


@pytest.mark.parametrize(("computed", "complete"), [(9, False), (10, True), (11, False)])
def test_a_state_is_complete_after_its_last_token_only(computed: int, complete: bool) -> None:
    """Every later token changes it."""
    assert complete_units(STATE, np.arange(1), UnitShape(1, 1, 1), computed, 10).tolist() == [complete]


def test_block_sets_are_two_vectors_of_one_length() -> None:
    """Positions and ids have equal lengths."""
    assert len(empty_blocks()) == 0
    with pytest.raises(PlanError, match="vectors of equal length"):
        BlockSet(np.arange(2), np.arange(3))
    with pytest.raises(PlanError, match="vectors of equal length"):
        BlockSet(np.zeros((1, 2), np.int64), np.zeros((1, 2), np.int64))


# ---- units -------------------------------------------------------------------------------------


def full(block_tokens: int, row_tokens: int = 1, kernel_blocks: int = 1) -> Group:
    """Return one layer with rows of this number of tokens."""
    rows = block_tokens // kernel_blocks // row_tokens
    stride = rows * 8 if kernel_blocks > 1 else 0
    pages = LayerPages("a", 0, 8 * block_tokens, 1, 1, 8 * block_tokens, rows, 8, 8, "rows", kernel_blocks, stride)
    return Group(0, GroupKind.FULL, block_tokens, None, (pages,))


@pytest.mark.parametrize(
    ("src", "dst", "shape"),
    [
        (full(16), full(16), (16, 1, 1)),
        (full(16), full(64), (16, 1, 4)),
        (full(64), full(16), (16, 4, 1)),
        (full(16), full(24), (8, 2, 3)),  # neither divides the other
        (full(16, 16), full(64, 16), (16, 1, 4)),
        (full(32, 16), full(48, 16), (16, 2, 3)),
        (full(16, 8), full(24, 8), (8, 2, 3)),
        (full(64, 1, 4), full(64), (16, 4, 4)),  # a unit lies in one kernel block
        (full(64), full(64, 1, 2), (32, 2, 2)),
        (full(64, 1, 4), full(96, 1, 2), (16, 4, 6)),
        (full(64, 1, 8), full(24, 1, 2), (4, 16, 6)),  # kernel blocks of 8 and 12 tokens
    ],
)
def test_unit_shapes(src: Group, dst: Group, shape: tuple[int, int, int]) -> None:
    """The largest unit that divides the blocks and kernel blocks of both sides."""
    assert unit_shape(src, dst) == UnitShape(*shape)
    assert unit_shape(dst, src) == UnitShape(shape[0], shape[2], shape[1])


def test_a_row_of_tokens_is_not_cut() -> None:
    """The common unit of blocks of 16 and 24 tokens has 8 tokens, fewer than the 16 of a packed
    row.
    """
    with pytest.raises(PlanError, match=r"units of 8 tokens, .* packs 16"):
        unit_shape(full(16, 16), full(24, 24))
    with pytest.raises(PlanError, match=r"units of 8 tokens, .* packs 24"):
        unit_shape(full(24, 24), full(16, 16))
