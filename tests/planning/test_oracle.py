"""The whole planning path against an independent oracle: all TP sizes, head counts and block sizes.

Each case has five groups of two layers, one of each kind of cache: full attention, sliding window,
chunked local attention, one replicated latent (MLA), and a state of four parts with different head
counts. The case's number determines the storage of either side (order of dimensions, packed rows,
kernel blocks, padding, shared tensors), the prompt, its chunks and the block tables, so a case is
the same in every run. ``make test`` checks three pairs of block sizes for each pair of TP sizes
and each head count, ``make plans`` all nine.
"""

import os
from collections import Counter
from collections.abc import Iterator
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.planning.oracle import check_case, first_needed, held, unit_tokens
from tests.planning.oracle_cases import KINDS, Case, Sizes, make_case

TP_SIZES = range(1, 9)
KV_HEADS = (1, 2, 3, 4, 8, 12)
BLOCK_SIZES = [(producer, consumer) for producer in (16, 32, 64) for consumer in (16, 32, 64)]
WHOLE = "TANDEM_PLANS" in os.environ


def grid(producer_tp: int, kv_heads: int, whole: bool = WHOLE) -> Iterator[Case]:
    """Yield cases for all consumer TP sizes and pairs of block sizes that fit every kind of group.

    Unless ``whole``, three pairs of block sizes for each consumer TP size. A third of the cases is
    thorough.
    """
    for consumer_tp in TP_SIZES:
        for number in range(len(BLOCK_SIZES)):
            if not whole and (number - producer_tp + consumer_tp + kv_heads) % 3:
                continue
            random = Random(f"{producer_tp}/{consumer_tp}/{kv_heads}/{number}")
            kinds = random.sample(KINDS, len(KINDS))
            sizes = [BLOCK_SIZES[(number + KINDS.index(kind)) % len(BLOCK_SIZES)] for kind in kinds]
            thorough = (number + producer_tp + consumer_tp) % 3 == 0
            yield make_case(random.choice, (producer_tp, consumer_tp), kv_heads, sizes, kinds, thorough)


@pytest.mark.parametrize("kv_heads", KV_HEADS)
@pytest.mark.parametrize("producer_tp", TP_SIZES)
def test_every_wanted_byte_is_written_once(producer_tp: int, kv_heads: int) -> None:
    """Every requested word is written once, with the right content, by the right rank; no other
    word is written.
    """
    words = 0
    for case in grid(producer_tp, kv_heads):
        try:
            words += check_case(case)
        except Exception as error:
            error.add_note(f"in {case}")
            raise
    assert words > (50_000 if WHOLE else 15_000)


@pytest.mark.parametrize("kind", KINDS)
def test_one_group_alone(kind: str) -> None:
    """Two layers do not use all of eight replicas: some producer ranks send nothing, and still
    have a partner.
    """
    for number, (producer_tp, consumer_tp) in enumerate((p, c) for p in TP_SIZES for c in TP_SIZES):
        random = Random(f"{kind}/{number}")
        sizes = [BLOCK_SIZES[number % len(BLOCK_SIZES)]]
        check_case(make_case(random.choice, (producer_tp, consumer_tp), KV_HEADS[number % 3], sizes, [kind]))


def test_the_grid_has_all_that_may_differ() -> None:
    """Each (kind, producer's and consumer's block size) occurs, and every storage option is
    frequent.
    """
    seen: Counter[object] = Counter()
    cases = [
        case for producer_tp in (1, 3, 8) for kv_heads in (2, 8) for case in grid(producer_tp, kv_heads, whole=True)
    ]
    for case in cases:
        for group, kind in enumerate(case.kinds):
            ours, theirs = case.producer.groups[group], case.consumer.groups[group]
            first = first_needed(kind, case.windows[group], case.end)
            packed = case.parts[group][0].row_tokens == 16
            seen["units", case.end % unit_tokens(case, group) > 0] += 1
            seen["null blocks", first >= ours.block_tokens] += 1
            seen["a window begins inside a unit", first % unit_tokens(case, group) > 0] += 1
            seen["packed rows, other block size", packed and ours.block_tokens != theirs.block_tokens] += 1
            seen["kernel blocks", ours.kernel_blocks > 1, theirs.kernel_blocks > 1] += 1
            seen[case.thorough, kind, ours.block_tokens, theirs.block_tokens] += 1
            seen["order differs", ours.orders != theirs.orders] += 1
            seen["layers differ", len(set(ours.orders)) > 1] += 1
            seen["padded", any(map(any, ours.gaps)), any(map(any, theirs.gaps))] += 1
        seen["shared", case.producer.shared, case.consumer.shared] += 1
        seen["prefix hit", case.start > 0] += 1
        seen["layerwise", case.layerwise] += 1
        seen["prompt ends", case.prompt - case.end] += 1
    assert {(True, kind, *sizes) for kind in KINDS for sizes in BLOCK_SIZES} <= seen.keys()
    assert all(count >= 10 for count in seen.values()), seen
    assert {key for key in seen if isinstance(key, tuple) and key[0] == "kernel blocks"} == {
        ("kernel blocks", ours, theirs) for ours in (False, True) for theirs in (False, True)
    }


# ---- random layouts ----------------------------------------------------------------------------


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any groups of any block sizes; kinds may repeat or be absent."""
    kinds = draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=4))
    tokens = st.sampled_from((16, 8, 24, 32, 48, 64, 80, 256))
    sizes: Sizes = [(draw(tokens), draw(tokens)) for _ in kinds]
    tp = draw(st.integers(1, 8)), draw(st.integers(1, 8))
    return make_case(lambda options: draw(st.sampled_from(options)), tp, draw(st.integers(1, 12)), sizes, kinds)


@settings(max_examples=150)
@given(cases())
def test_any_layout_equals_the_oracle(case: Case) -> None:
    """Plans equal the oracle's over random layouts."""
    check_case(case)


# ---- the oracle itself -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tp", "kv_heads", "heads_by_rank"),
    [
        (1, 3, [(0, 1, 2)]),
        (2, 3, [(0,), (1, 2)]),
        (3, 8, [(0, 1), (2, 3, 4), (5, 6, 7)]),
        (4, 2, [(0,), (0,), (1,), (1,)]),
        (5, 12, [(0, 1), (2, 3), (4, 5, 6), (7, 8), (9, 10, 11)]),
        (8, 3, [(0,), (0,), (0,), (1,), (1,), (1,), (2,), (2,)]),
    ],
)
def test_the_oracle_deals_heads(tp: int, kv_heads: int, heads_by_rank: list[tuple[int, ...]]) -> None:
    """The oracle's distribution of heads equals one computed by hand."""
    assert [held(rank, tp, kv_heads) for rank in range(tp)] == heads_by_rank
