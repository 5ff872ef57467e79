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
        # resuming at token e attends to tokens e-W+1 .. e; tokens below e come from the producer
        (4, 0, 3, [0]),
        (4, 0, 4, [0]),  # tokens 1..4: 1, 2, 3 are needed, block 1 is the consumer's own
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
        (1, 0, 8, []),  # a window of one token: the next token attends to itself only
        (1, 0, 9, []),  # even if that token does not begin a block
    ],
)
def test_sliding_window_wants_its_window(window: int, start: int, end: int, positions: list[int]) -> None:
    """Blocks that a resume at ``end`` attends to, and none before them."""
    blocks = wanted_blocks(sliding(window), TABLE, start, end)
    assert blocks.positions.tolist() == positions
    assert blocks.ids.tolist() == [TABLE[p] for p in positions]


@pytest.mark.parametrize(("window", "resume", "first"), [(4, 0, 0), (4, 3, 0), (4, 4, 1), (4, 10, 7), (1, 10, 10)])
def test_first_needed_token(window: int, resume: int, first: int) -> None:
    """A window of W tokens ends with the computed token."""
    assert first_needed_token(sliding(window), resume) == first
    assert first_needed_token(FULL, resume) == 0


def test_null_blocks_before_the_window_are_ignored() -> None:
    """Positions of a passed window have the allocator's null block."""
    assert wanted_blocks(sliding(4), [0, 0, 7], 0, 12).ids.tolist() == [7]


def test_a_null_block_that_is_needed_is_refused() -> None:
    """The consumer computes needed tokens without blocks itself; the error names the position."""
    with pytest.raises(PlanError, match="group 1: the needed block at position 2 is not allocated"):
        wanted_blocks(sliding(8), [0, 6, 0, 7], 0, 15)


def test_a_short_table_is_refused() -> None:
    """A table shorter than the tokens is refused."""
    with pytest.raises(PlanError, match="group 0: the block table has 2 blocks, but 9 tokens need 3"):
        wanted_blocks(FULL, [1, 2], 0, 9)


@pytest.mark.parametrize(("start", "end"), [(-1, 3), (5, 4)])
def test_a_backward_range_is_refused(start: int, end: int) -> None:
    """A range must have 0 <= start <= end."""
    with pytest.raises(PlanError, match="must be between 0 and end_token"):
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
    """Positions and ids have equal lengths."""
    assert len(empty_blocks()) == 0
    with pytest.raises(PlanError, match="vectors of equal length"):
        BlockSet(np.arange(2), np.arange(3))
    with pytest.raises(PlanError, match="vectors of equal length"):
        BlockSet(np.zeros((1, 2), np.int64), np.zeros((1, 2), np.int64))


# ---- chunked attention and states --------------------------------------------------------------


@pytest.mark.parametrize(
    ("chunk", "resume", "first"),
    [(8, 0, 0), (8, 7, 0), (8, 8, 8), (8, 9, 8), (8, 15, 8), (8, 16, 16), (6, 11, 6), (6, 12, 12), (100, 40, 0)],
)
def test_a_chunk_begins_at_its_multiples(chunk: int, resume: int, first: int) -> None:
    """Chunked attention reaches back to the beginning of the computed token's chunk."""
    assert first_needed_token(chunked(chunk), resume) == first


@pytest.mark.parametrize(
    ("chunk", "start", "end", "positions"),
    [
        (8, 0, 7, [0, 1]),
        (8, 0, 8, []),  # token 8 begins a chunk: it attends to nothing before it
        (8, 0, 9, [2]),  # token 8
        (8, 0, 15, [2, 3]),
        (8, 0, 16, []),
        (6, 0, 11, [1, 2]),  # tokens 6..10: the chunk begins inside block 1
        (6, 0, 13, [3]),  # token 12
        (6, 0, 14, [3]),
        (100, 0, 10, [0, 1, 2]),
        (100, 8, 10, [2]),  # a prefix hit inside the chunk
        (8, 4, 15, [2, 3]),  # and one before it
        (8, 12, 15, [3]),
    ],
)
def test_chunked_attention_wants_its_chunk(chunk: int, start: int, end: int, positions: list[int]) -> None:
    """Blocks from the beginning of the current chunk, and none if a chunk begins at the resume
    point.
    """
    assert wanted_blocks(chunked(chunk), TABLE, start, end).positions.tolist() == positions


def test_a_state_is_the_tables_last_block() -> None:
    """One state per request, whatever its length; an older state is not usable."""
    for table, end in (([7], 3), ([0, 0, 9], 11), ([5, 6, 9], 11)):
        blocks = wanted_blocks(STATE, table, 0, end)
        assert (blocks.positions.tolist(), blocks.ids.tolist()) == ([0], [table[-1]])
    assert len(wanted_blocks(STATE, [5, 6], 8, 8)) == 0


@pytest.mark.parametrize("table", [[], [0], [4, 0]])
def test_a_state_without_a_block_is_refused(table: list[int]) -> None:
    """The allocator has given the state no block."""
    with pytest.raises(PlanError, match="group 2: the block of the state after 5 tokens is not allocated"):
        wanted_blocks(STATE, table, 0, 5)


@pytest.mark.parametrize(("computed", "complete"), [(0, False), (9, False), (10, True), (11, False), (12, False)])
def test_a_state_is_complete_at_its_token_only(computed: int, complete: bool) -> None:
    """A state changes with every token: it is the prompt's after exactly the prompt's tokens."""
    assert complete_units(STATE, np.zeros(1, np.int64), UnitShape(1, 1, 1), computed, 10).tolist() == [complete]


def test_no_block_for_a_needed_token_is_refused_in_any_group() -> None:
    """A usable prefix has blocks for all tokens that the next one attends to, in every group;
    else it is not used.
    """
    for group, table, lacks in (
        (FULL, [0, 6, 7], 0),
        (sliding(6), [5, 0, 7], 1),
        (chunked(8), [5, 6, 0], 2),
    ):
        with pytest.raises(PlanError, match=f"group {group.index}: the needed block at position {lacks}"):
            wanted_blocks(group, table, 0, 11)
        with pytest.raises(PlanError, match=f"group {group.index}: the block table has 2 blocks"):
            wanted_blocks(group, table[:2], 0, 11)


def test_block_counts_of_groups_that_differ() -> None:
    """4,096 tokens in five groups of blocks of 256, 64, 64, 4 and 8 tokens."""
    counts = []
    for index, tokens in enumerate((256, 64, 64, 4, 8)):
        group = Group(index, GroupKind.FULL, tokens, None, ())
        counts.append(len(wanted_blocks(group, list(range(1, 4096 // tokens + 1)), 0, 4096)))
    assert counts == [16, 64, 64, 1024, 512]


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


@pytest.mark.parametrize(
    ("computed", "end", "complete"),
    [
        (1, 9, [False, False, False, False, False]),
        (2, 9, [True, False, False, False, False]),
        (7, 9, [True, True, True, False, False]),
        (8, 9, [True, True, True, True, False]),
        (9, 9, [True, True, True, True, True]),  # unit 4 has one token of the prompt
        (9, 10, [True, True, True, True, False]),
    ],
)
def test_units_are_complete_before_their_block(computed: int, end: int, complete: list[bool]) -> None:
    """Units of 2 tokens in blocks of 4: half a block moves as soon as it is computed."""
    assert complete_units(FULL, np.arange(5), UnitShape(2, 2, 1), computed, end).tolist() == complete


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
    with pytest.raises(PlanError, match="blocks of 16 and 24 tokens have units of 8 tokens, but the kernel packs 16"):
        unit_shape(full(16, 16), full(24, 24))
    with pytest.raises(
        PlanError, match="layer 'a': blocks of 24 and 16 tokens have units of 8 tokens, but the kernel packs 24"
    ):
        unit_shape(full(24, 24), full(16, 16))


def test_a_state_is_one_unit() -> None:
    """A state is one unit at any block sizes: they count states, not bytes."""
    assert unit_shape(Group(0, GroupKind.STATE, 16, None, ()), Group(0, GroupKind.STATE, 24, None, ())) == (
        UnitShape(1, 1, 1)
    )
