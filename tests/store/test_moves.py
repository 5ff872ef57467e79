"""Bytes from ranks to objects and back: equal to an oracle's, proved, at any TP and block sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from connectors.errors import ConfigurationError, CoverError, PlanError
from connectors.planning.descriptors import build_runs
from connectors.planning.layout import GroupKind
from connectors.store.planning.chunks import StorePlan, plan_store
from connectors.store.planning.layout import object_bytes, plan_rank, prove_store
from connectors.store.planning.moves import load_moves, object_in_blocks, store_moves
from connectors.store.planning.prefix import ObjectRef, completed_objects, needed_objects
from tests.planning.builders import CANARY, STYLES, GroupShape, Rank, Shape, execute, make_engine, with_field

FULL: GroupShape = (GroupKind.FULL, None, 2)
STATE: GroupShape = (GroupKind.STATE, None, 1)


def content(group: int, layer: int, head: int, token: int, row_bytes: int) -> np.ndarray:
    """Return the content of one token of one head of one layer."""
    seed = ((group * 31 + layer) * 31 + head) * 100_003 + token
    return np.frombuffer(np.array([seed, seed ^ 0x5A5A5A5A], "<u4").tobytes() * (row_bytes // 8), np.uint8)


def tables(engine: Sequence[Rank], rng: np.random.Generator, tokens: int) -> list[list[int]]:
    """Return a block table for each group from one pool of ids, like one request's."""
    layout = engine[0].layout
    ids = rng.permutation(np.arange(1, layout.num_blocks)).tolist()
    found = []
    for group in layout.groups:
        count = -(-tokens // group.block_tokens)
        passed = count - 1 if group.kind is GroupKind.STATE else 0
        found.append([0] * passed + [ids.pop() for _ in range(count - passed)])
    return found


def fill(engine: Sequence[Rank], table: Sequence[Sequence[int]], tokens: int, row_bytes: int) -> None:
    """Write a request's KV into its blocks on all ranks."""
    for rank in engine:
        for group, views in zip(rank.layout.groups, rank.views, strict=True):
            for layer, view in enumerate(views):
                for at, head in enumerate(rank.heads):
                    if group.kind is GroupKind.STATE:
                        for row in range(view.shape[2]):
                            where = content(group.index, layer, head, tokens * 1000 + row, row_bytes)
                            view[table[group.index][-1], at, row] = where
                        continue
                    for token in range(tokens):
                        block = table[group.index][token // group.block_tokens]
                        where = content(group.index, layer, head, token, row_bytes)
                        view[block, at, token % group.block_tokens] = where


class Objects:
    """Memory for the objects of one prefix."""

    def __init__(self, plan: StorePlan, sizes: Sequence[int], refs: Sequence[ObjectRef]) -> None:
        numbers = {stored.index: number for number, stored in enumerate(plan.stored)}
        self.buffers = {ref: np.full(sizes[numbers[ref.group]], CANARY, np.uint8) for ref in refs}
        self.addresses = {ref: buffer.ctypes.data for ref, buffer in self.buffers.items()}


def store_all(plan: StorePlan, engine: Sequence[Rank], table: list[list[int]], refs: list[ObjectRef]) -> Objects:
    layout = prove_store(plan, [rank.layout for rank in engine])
    objects = Objects(plan, object_bytes(layout), refs)
    for rank in engine:
        pair = plan_rank(plan, rank.layout).store
        execute(build_runs(pair, store_moves(plan, pair, table, objects.addresses)))
    return objects


def load_all(
    plan: StorePlan, engine: Sequence[Rank], table: list[list[int]], start: int, end: int, objects: Objects
) -> None:
    for rank in engine:
        pair = plan_rank(plan, rank.layout).load
        execute(build_runs(pair, load_moves(plan, pair, table, start, end, objects.addresses)))


def check_filled(
    plan: StorePlan, engine: Sequence[Rank], table: list[list[int]], start: int, end: int, row_bytes: int
) -> None:
    """Check that tokens needed at ``end`` are present; blocks before ``start`` and foreign
    blocks are unchanged.
    """
    for rank in engine:
        for group, views in zip(rank.layout.groups, rank.views, strict=True):
            own = set(table[group.index])
            for layer, view in enumerate(views):
                for block in range(view.shape[0]):
                    if not any(block in ids for ids in table):
                        assert (view[block] == CANARY).all()
                for at, head in enumerate(rank.heads):
                    if group.kind is GroupKind.STATE:
                        for row in range(view.shape[2]):
                            where = content(group.index, layer, head, end * 1000 + row, row_bytes)
                            assert (view[table[group.index][-1], at, row] == where).all()
                        continue
                    window = end if group.window_tokens is None else group.window_tokens - 1
                    for token in range(max(start, end - window), end):
                        block = table[group.index][token // group.block_tokens]
                        assert block in own
                        where = content(group.index, layer, head, token, row_bytes)
                        assert (view[block, at, token % group.block_tokens] == where).all()
                    for token in range(start // group.block_tokens * group.block_tokens):
                        block = table[group.index][token // group.block_tokens]
                        assert (view[block, at, token % group.block_tokens] == CANARY).all()


@st.composite
def engines(draw: st.DrawFn) -> tuple[Shape, Shape]:
    """Writer and reader: all differences that two engines of one model may have."""
    group = st.one_of(
        st.just(FULL), st.just(STATE), st.tuples(st.just(GroupKind.SLIDING), st.integers(2, 40), st.just(1))
    )
    groups = (FULL, *draw(st.lists(group, max_size=2)))
    common: dict[str, Any] = {"kv_heads": draw(st.integers(1, 6)), "row_bytes": 8, "groups": groups, "num_blocks": 90}
    styles = [style for style in STYLES if style != "packed"]

    def own() -> dict[str, Any]:
        tokens = draw(st.sampled_from([2, 4, 8, 16]))
        return {
            "style": draw(st.sampled_from(styles)),
            "pad_bytes": draw(st.sampled_from([0, 8])),
            "shared": draw(st.booleans()),
            "rows": tokens,
            "block_tokens": tokens,
        }

    writer, reader = own(), own()
    if STATE in groups:
        # A state's page depends on the model, not on the block size; rows of a state stand for its
        # parts here.
        reader |= {"rows": writer["rows"], "block_tokens": writer["block_tokens"]}
    return Shape(**common, **writer), Shape(**common, **reader)


@settings(max_examples=40, deadline=None)
@given(engines(), st.integers(1, 4), st.integers(1, 4), st.sampled_from([8, 16, 24]), st.integers(0, 2**32 - 1))
def test_what_any_engine_stores_any_other_loads(
    shapes: tuple[Shape, Shape], writer_tp: int, reader_tp: int, chunk_tokens: int, seed: int
) -> None:
    """Two chunks stored by one engine fill the blocks of another with the same tokens, at every
    resume point.
    """
    rng = np.random.default_rng(seed)
    writer, reader = make_engine(shapes[0], writer_tp), make_engine(shapes[1], reader_tp)
    tokens = 2 * chunk_tokens
    try:
        plans = [plan_store(engine[0].layout.groups, chunk_tokens, 4096) for engine in (writer, reader)]
    except ConfigurationError:
        # Block sizes that do not fit the kept tokens of a window are refused: test_spans.py.
        reject()
    stores = [
        prove_store(plan, [rank.layout for rank in engine])
        for plan, engine in zip(plans, (writer, reader), strict=True)
    ]
    assert stores[0] == stores[1], "one model has one store, whatever engine looks at it"
    table = tables(writer, rng, tokens)
    fill(writer, table, tokens, 8)
    objects = store_all(plans[0], writer, table, completed_objects(plans[0], 0, tokens))
    assert set(needed_objects(plans[1], 0, tokens)) <= set(objects.addresses)
    loaded = tables(reader, rng, tokens)
    start = int(rng.choice([0, chunk_tokens])) // shapes[1].block_tokens * shapes[1].block_tokens
    load_all(plans[1], reader, loaded, start, tokens, objects)
    check_filled(plans[1], reader, loaded, start, tokens, 8)


def test_a_window_that_has_passed_cannot_be_stored() -> None:
    """Positions of a passed window have the allocator's null block."""
    window: GroupShape = (GroupKind.SLIDING, 8, 1)
    shape = Shape(style="head_major", rows=4, block_tokens=4, row_bytes=8, groups=(window,), num_blocks=12)
    engine = make_engine(shape, 1)
    plan = plan_store(engine[0].layout.groups, 8, 4096)
    stored, ref = plan.groups[0], ObjectRef(8, 0)
    assert object_in_blocks(stored, [3, 4], ref)
    assert not object_in_blocks(stored, [0, 4], ref)
    assert not object_in_blocks(stored, [3], ref)
    pair = plan_rank(plan, engine[0].layout).store
    with pytest.raises(PlanError, match="blocks before token 8 are no longer allocated"):
        store_moves(plan, pair, [[0, 4]], {ref: 64})


def test_an_object_has_the_stripes_of_a_page() -> None:
    """Two stripes of rows, one after the other, of two layers of four heads."""
    shape = Shape(kv_heads=4, style="head_major", rows=4, block_tokens=4, row_bytes=8, groups=(FULL,))
    layout = make_engine(shape, 1)[0].layout
    halves = [replace(each, rows=2, stripes=2, stripe_stride_bytes=16) for each in layout.groups[0].layers]
    layout = with_field(layout, 0, layers=tuple(halves))
    plan = plan_store(layout.groups, 8, 4096)
    (pages, _) = prove_store(plan, [layout]).groups[0].layers
    assert (pages.rows, pages.stripes, pages.stripe_stride_bytes, pages.head_stride_bytes) == (4, 2, 32, 64)


def test_a_missing_object_is_refused() -> None:
    shape = Shape(style="head_major", rows=4, block_tokens=4, row_bytes=8, groups=(FULL,), num_blocks=12)
    engine = make_engine(shape, 1)
    plan = plan_store(engine[0].layout.groups, 8, 4096)
    pair = plan_rank(plan, engine[0].layout).load
    with pytest.raises(PlanError, match="the object that ends at token 16 is missing"):
        load_moves(plan, pair, [[1, 2, 3, 4]], 0, 16, {ObjectRef(8, 0): 64})


def test_ranks_that_do_not_write_all_of_one_object_are_refused() -> None:
    """Two of three ranks leave heads of each object unwritten; others have other objects."""
    shape = Shape(kv_heads=6, style="token_major", rows=4, block_tokens=4, row_bytes=8, groups=(FULL,))
    ranks = [rank.layout for rank in make_engine(shape, 3)]
    other = make_engine(replace(shape, row_bytes=16), 3)[2].layout
    plan = plan_store(ranks[0].groups, 8, 4096)
    with pytest.raises(CoverError):
        prove_store(plan, ranks[:2])
    with pytest.raises(PlanError, match="different layouts"):
        prove_store(plan, [*ranks[:2], other])
