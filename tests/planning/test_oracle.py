"""The whole planning path against an independent oracle: TP sizes, head counts and block sizes.

A case of the grid has five groups of two layers, one of each kind of cache: full attention, sliding
window, chunked local attention, one replicated latent (MLA), and a state of four parts with
different head counts. The case's number determines the storage of either side (order of dimensions,
packed rows, kernel blocks, padding, shared tensors), the prompt, its chunks and the block tables.
``make test`` checks a sample; the campaign ``plans`` all cases (``TANDEM_PLANS=1``).
"""

import os
from collections.abc import Iterator
from itertools import product
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.planning.oracle import check_case
from tests.planning.oracle_cases import KINDS, Case, Sizes, make_case

TP_SIZES = range(1, 9)
KV_HEADS = (1, 2, 3, 4, 8, 12)
BLOCK_SIZES = list(product((16, 32, 64), (16, 32, 64)))
WHOLE = "TANDEM_PLANS" in os.environ
EVERY = 1 if WHOLE else 61
"""Every so many cases; a prime, so that a sample has all sizes."""


def grid(every: int = EVERY) -> Iterator[Case]:
    """Yield cases over all TP sizes, head counts and pairs of block sizes; a third are thorough."""
    sizes = product(TP_SIZES, TP_SIZES, KV_HEADS, range(len(BLOCK_SIZES)))
    for producer_tp, consumer_tp, kv_heads, number in list(sizes)[::every]:
        random = Random(f"{producer_tp}/{consumer_tp}/{kv_heads}/{number}")
        kinds = random.sample(KINDS, len(KINDS))
        blocks = [BLOCK_SIZES[(number + KINDS.index(kind)) % len(BLOCK_SIZES)] for kind in kinds]
        thorough = (number + producer_tp + consumer_tp) % 3 == 0
        yield make_case(random.choice, (producer_tp, consumer_tp), kv_heads, blocks, kinds, thorough)


def test_every_wanted_word_is_written_once() -> None:
    """With the right content, by the right rank; no other word is written."""
    words = 0
    for case in grid():
        try:
            words += check_case(case)
        except Exception as error:
            error.add_note(f"in {case}")
            raise
    assert words > 5_000_000 / EVERY


@pytest.mark.parametrize("kind", KINDS)
def test_one_group_alone(kind: str) -> None:
    """Two layers do not use all of eight replicas: ranks that send nothing still have a partner."""
    for number, tp in list(enumerate(product(TP_SIZES, TP_SIZES)))[:: 1 if WHOLE else 7]:
        random = Random(f"{kind}/{number}")
        sizes = [BLOCK_SIZES[number % len(BLOCK_SIZES)]]
        check_case(make_case(random.choice, tp, KV_HEADS[number % 3], sizes, [kind]))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any groups of any block sizes; kinds may repeat or be absent."""
    kinds = draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=4))
    tokens = st.sampled_from((16, 8, 24, 32, 48, 64, 80, 256))
    sizes: Sizes = [(draw(tokens), draw(tokens)) for _ in kinds]
    tp = draw(st.integers(1, 8)), draw(st.integers(1, 8))
    return make_case(lambda options: draw(st.sampled_from(options)), tp, draw(st.integers(1, 12)), sizes, kinds)


@settings(max_examples=1000 if WHOLE else 40)
@given(cases())
def test_any_layout_equals_the_oracle(case: Case) -> None:
    check_case(case)


# ---- the oracle itself -------------------------------------------------------------------------
