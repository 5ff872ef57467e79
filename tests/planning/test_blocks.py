"""Tokens to blocks: tables computed by hand around window and block boundaries.

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
    wanted_units,
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
    ("group", "start", "end", "positions"),
    [
        (FULL, 0, 0, []),
        (FULL, 0, 1, [0]),
        (FULL, 0, 4, [0]),
        (FULL, 0, 5, [0, 1]),
        (FULL, 4, 16, [1, 2, 3]),
        (FULL, 8, 9, [2]),
        (FULL, 16, 16, []),
        # resuming at token e attends to tokens e-W+1 .. e; tokens below e come from the producer
        (sliding(4), 0, 3, [0]),
        (sliding(4), 0, 4, [0]),  # tokens 1..4: 1, 2, 3 are needed, block 1 is the consumer's own
        (sliding(4), 0, 5, [0, 1]),  # tokens 2..5
        (sliding(4), 0, 7, [1]),  # tokens 4..7
        (sliding(4), 0, 8, [1]),  # tokens 5..8
        (sliding(4), 0, 11, [2]),
        (sliding(5), 0, 7, [0, 1]),  # tokens 3..7
        (sliding(5), 0, 8, [1]),  # tokens 4..8
        (sliding(8), 0, 40, [8, 9]),  # tokens 33..40
        (sliding(8), 0, 38, [7, 8, 9]),  # tokens 31..38
        (sliding(100), 0, 10, [0, 1, 2]),  # the window is longer than the prompt
        (sliding(8), 36, 39, [9]),  # a prefix hit inside the window
        (sliding(8), 8, 39, [8, 9]),  # a prefix hit before the window
        (sliding(1), 0, 8, []),  # the next token attends to itself only
        (sliding(1), 0, 9, []),  # even if that token does not begin a block
        (chunked(8), 0, 7, [0, 1]),
        (chunked(8), 0, 8, []),  # token 8 begins a chunk: it attends to nothing before it
        (chunked(8), 0, 9, [2]),  # token 8
        (chunked(8), 0, 15, [2, 3]),
        (chunked(6), 0, 11, [1, 2]),  # tokens 6..10: the chunk begins inside block 1
        (chunked(6), 0, 13, [3]),  # token 12
        (chunked(100), 8, 10, [2]),  # a prefix hit inside the chunk
        (chunked(8), 4, 15, [2, 3]),  # and one before it
        (chunked(8), 12, 15, [3]),
        (STATE, 8, 8, []),
    ],
)
def test_wanted_blocks(group: Group, start: int, end: int, positions: list[int]) -> None:
    """Blocks with a token in ``[start, end)`` to which a resume at ``end`` attends."""
    blocks = wanted_blocks(group, TABLE, start, end)
    assert blocks.positions.tolist() == positions
    assert blocks.ids.tolist() == [TABLE[p] for p in positions]


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
    for table, end in (([7], 3), ([0, 0, 9], 11), ([5, 6, 9], 11)):
        blocks = wanted_blocks(STATE, table, 0, end)
        assert (blocks.positions.tolist(), blocks.ids.tolist()) == ([0], [table[-1]])


@pytest.mark.parametrize(
    ("group", "tokens", "computed", "end", "complete"),
    [
        (FULL, 4, 3, 10, [False, False, False]),
        (FULL, 4, 4, 10, [True, False, False]),
        (FULL, 4, 9, 10, [True, True, False]),
        (FULL, 4, 10, 10, [True, True, True]),  # the last block is complete with the prompt
        (FULL, 4, 11, 12, [True, True, False]),
        (FULL, 2, 2, 9, [True, False, False, False, False]),  # half a block moves once it is computed
        (FULL, 2, 8, 9, [True, True, True, True, False]),
        (FULL, 2, 9, 9, [True, True, True, True, True]),  # unit 4 has one token of the prompt
        (STATE, 1, 9, 10, [False]),  # a state changes with every token
        (STATE, 1, 10, 10, [True]),
        (STATE, 1, 11, 10, [False]),
    ],
)
def test_complete_units(group: Group, tokens: int, computed: int, end: int, complete: list[bool]) -> None:
    """All tokens of the unit below ``end`` are computed."""
    units, shape = np.arange(len(complete)), UnitShape(tokens, 1, 1)
    assert complete_units(group, units, shape, computed, end).tolist() == complete


def test_block_sets_are_two_vectors_of_one_length() -> None:
    """Positions and ids have equal lengths."""
    assert len(empty_blocks()) == 0
    with pytest.raises(PlanError, match="vectors of equal length"):
        BlockSet(np.arange(2), np.arange(3))
    with pytest.raises(PlanError, match="vectors of equal length"):
        BlockSet(np.zeros((1, 2), np.int64), np.zeros((1, 2), np.int64))


# ---- units -------------------------------------------------------------------------------------


def units_of(group: Group, shape: UnitShape, positions: list[int], end: int) -> list[tuple[int, int, int]]:
    """Return (unit, block id, part of the block); block ids are positions plus 100."""
    blocks = BlockSet(np.asarray(positions, np.int64), np.asarray(positions, np.int64) + 100)
    units = wanted_units(group, blocks, shape, end)
    assert len(units) == len(units.units)
    return list(zip(units.units.tolist(), units.dst_ids.tolist(), units.dst_parts.tolist(), strict=True))


@pytest.mark.parametrize(
    ("group", "shape", "positions", "end", "units"),
    [
        # blocks that are units on both sides
        (FULL, UnitShape(4, 1, 1), [0, 1, 2], 10, [(0, 100, 0), (1, 101, 0), (2, 102, 0)]),
        # a consumer's block is two units: the prompt ends in the first unit of block 2
        (FULL, UnitShape(2, 1, 2), [1, 2], 10, [(2, 101, 0), (3, 101, 1), (4, 102, 0)]),
        (FULL, UnitShape(2, 1, 2), [2], 11, [(4, 102, 0), (5, 102, 1)]),
        # the producer's blocks are larger: the consumer's are whole units
        (FULL, UnitShape(4, 2, 1), [0, 2], 10, [(0, 100, 0), (2, 102, 0)]),
        # both have smaller units: a unit of 2 tokens, blocks of 6 and 4
        (FULL, UnitShape(2, 3, 2), [1], 100, [(2, 101, 0), (3, 101, 1)]),
        # resuming at 10 with a window of 4 attends to tokens 7..9: the producer's block of tokens
        # 4, 5 is not needed
        (sliding(4), UnitShape(2, 1, 2), [1, 2], 10, [(3, 101, 1), (4, 102, 0)]),
        (sliding(5), UnitShape(2, 1, 2), [1, 2], 10, [(3, 101, 1), (4, 102, 0)]),  # from 6
        (sliding(6), UnitShape(2, 1, 2), [1, 2], 10, [(2, 101, 0), (3, 101, 1), (4, 102, 0)]),  # from 5
        (sliding(3), UnitShape(2, 1, 2), [2], 10, [(4, 102, 0)]),  # from 8
        (sliding(1), UnitShape(2, 1, 2), [], 10, []),
        # the producer's blocks of 4 hold all of the consumer's: block 1 is filled completely, for a
        # prefix cache
        (sliding(4), UnitShape(2, 2, 2), [1, 2], 10, [(2, 101, 0), (3, 101, 1), (4, 102, 0)]),
        (sliding(3), UnitShape(2, 2, 2), [2], 10, [(4, 102, 0)]),
        (sliding(4), UnitShape(2, 4, 2), [1, 2], 10, [(2, 101, 0), (3, 101, 1), (4, 102, 0)]),
        # chunks of 6 tokens: 6..9 are needed
        (chunked(6), UnitShape(2, 1, 2), [1, 2], 10, [(3, 101, 1), (4, 102, 0)]),
        (chunked(5), UnitShape(2, 1, 2), [1, 2], 9, [(2, 101, 0), (3, 101, 1), (4, 102, 0)]),  # from 5
        # a state is one unit
        (STATE, UnitShape(1, 1, 1), [0], 10, [(0, 100, 0)]),
        (STATE, UnitShape(1, 1, 1), [], 10, []),
    ],
)
def test_wanted_units(
    group: Group, shape: UnitShape, positions: list[int], end: int, units: list[tuple[int, int, int]]
) -> None:
    """The units with a needed token, and their indices in the consumer's blocks."""
    assert units_of(group, shape, positions, end) == units


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


def test_a_state_is_one_unit() -> None:
    """A state is one unit at any block sizes: they count states, not bytes."""
    assert unit_shape(Group(0, GroupKind.STATE, 16, None, ()), Group(0, GroupKind.STATE, 24, None, ())) == (
        UnitShape(1, 1, 1)
    )
