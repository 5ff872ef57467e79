"""Properties of plans over random layouts: the oracle's bytes, exact cover, refusal when
modified.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from connectors.errors import CoverError
from connectors.planning.descriptors import Runs
from connectors.planning.layout import GroupKind, Region, unique_regions
from connectors.planning.verify import prove_plans, verify_cover
from tests.planning.builders import (
    HOST,
    STYLES,
    Shape,
    all_plans,
    draw_moves,
    execute,
    fill_distinct,
    make_engine,
    oracle_copy,
    runs_of,
    wanted_ids,
)


@st.composite
def shape_pairs(draw: st.DrawFn) -> tuple[Shape, Shape]:
    """Two compatible engines that differ in everything that may differ."""
    group = st.one_of(
        st.tuples(st.just(GroupKind.FULL), st.none(), st.integers(1, 3)),
        st.tuples(st.just(GroupKind.SLIDING), st.integers(1, 20), st.integers(1, 3)),
    )
    packed = draw(st.booleans())
    common: dict[str, Any] = {
        "kv_heads": draw(st.integers(1, 8)),
        "rows": (rows := draw(st.integers(1, 4))),
        "block_tokens": rows,
        "row_bytes": 8 * draw(st.integers(1, 3)),
        "groups": tuple(draw(st.lists(group, min_size=1, max_size=3))),
    }
    styles = st.just("packed") if packed else st.sampled_from([style for style in STYLES if style != "packed"])
    own: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
        {
            "style": styles,
            "num_blocks": st.integers(4, 14),
            "pad_bytes": st.sampled_from([0, 8, 56]),
            "shared": st.booleans(),
        }
    )
    return Shape(**common, **draw(own)), Shape(**common, **draw(own))


@settings(max_examples=120)
@given(shape_pairs(), st.integers(1, 5), st.integers(1, 5), st.integers(0, 2**32 - 1))
def test_any_transfer_equals_the_oracle(
    shapes: tuple[Shape, Shape], producer_tp: int, consumer_tp: int, seed: int
) -> None:
    """For all layouts and sizes, the bytes of the plan are the oracle's, and the cover is exact."""
    producer, consumer = shapes
    producers = make_engine(producer, producer_tp)
    planned, expected = make_engine(consumer, consumer_tp), make_engine(consumer, consumer_tp)
    fill_distinct(producers, producer)
    moves = draw_moves(np.random.default_rng(seed), producer, consumer)
    oracle_copy(producers, expected, moves)
    for rank, reference, plans in zip(planned, expected, all_plans(producers, planned), strict=True):
        prove_plans(rank.layout, plans)
        runs = runs_of(plans, moves)
        verify_cover(rank.layout, wanted_ids(moves), runs)
        for part in runs:
            execute(part)
        assert rank.region_bytes() == reference.region_bytes()


@settings(max_examples=80)
@given(shape_pairs(), st.integers(1, 4), st.integers(1, 4), st.data())
def test_any_damage_is_refused(
    shapes: tuple[Shape, Shape], producer_tp: int, consumer_tp: int, data: st.DataObject
) -> None:
    """One run of one rank removed, repeated, cut or shifted: the proof over the whole transfer
    fails.
    """
    consumers = make_engine(shapes[1], consumer_tp)
    rank = data.draw(st.integers(0, consumer_tp - 1))
    plans = all_plans(make_engine(shapes[0], producer_tp), consumers)[rank]
    seed = data.draw(st.integers(0, 1000))
    moves = draw_moves(np.random.default_rng(seed), *shapes)
    runs = runs_of(plans, moves)
    senders = [at for at, part in enumerate(runs) if len(part)]
    if not senders:
        return
    sender = data.draw(st.sampled_from(senders))
    part = runs[sender]
    victim = data.draw(st.integers(0, len(part) - 1))
    only = np.arange(len(part)) == victim
    by = data.draw(st.sampled_from([-8, -1, 1, 8]))
    damage = {
        "drop": Runs(part.src[~only], part.dst[~only], part.length[~only]),
        "double": Runs(*(np.r_[column, column[only]] for column in (part.src, part.dst, part.length))),
        "cut": Runs(part.src, part.dst, part.length - only),
        "grow": Runs(part.src, part.dst, part.length + only),
        "shift": Runs(part.src, part.dst + by * only, part.length),
    }
    runs[sender] = damage[data.draw(st.sampled_from(sorted(damage)))]
    with pytest.raises(CoverError):
        verify_cover(consumers[rank].layout, wanted_ids(moves), runs)


@settings(max_examples=200)
@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20)), max_size=12))
def test_regions_hold_each_byte_once(spans: list[tuple[int, int]]) -> None:
    """Merged regions cover exactly the bytes of the spans, do not overlap, and contain every
    span completely.
    """
    regions = unique_regions(Region(address, length, HOST) for address, length in spans)
    covered = [byte for region in regions for byte in range(region.address, region.end)]
    assert sorted(covered) == sorted({byte for address, length in spans for byte in range(address, address + length)})
    assert all(any(r.address <= a and a + n <= r.end for r in regions) for a, n in spans)
    assert len({region.address for region in regions}) == len(regions)


@settings(max_examples=60)
@given(shape_pairs(), st.integers(1, 4), st.integers(1, 4))
def test_plans_do_not_depend_on_pool_sizes(shapes: tuple[Shape, Shape], producer_tp: int, consumer_tp: int) -> None:
    """Bytes per block of all pairs of ranks sum to the consumer rank's bytes, in every group."""
    for consumer in (shapes[1], replace(shapes[1], num_blocks=2)):
        ranks = make_engine(consumer, consumer_tp)
        for rank, plans in zip(ranks, all_plans(make_engine(shapes[0], producer_tp), ranks), strict=True):
            for index, group in enumerate(rank.layout.groups):
                assert sum(plan.groups[index].unit_bytes for plan in plans) == group.block_bytes
