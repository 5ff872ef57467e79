"""A sample of ``make grids``: plans proved and a request transferred byte for byte between two grids."""

import random

import pytest

from connectors.planning.grid import Grid
from tests.transport.grids import EngineShape, cases, check_pair


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_a_sample_of_grid_pairs(kv_heads: int) -> None:
    """Ten pairs of PP x PCP x TP x DCP grids, of all pairs of the campaign."""
    for number, (producer, consumer) in random.Random(kv_heads).sample(list(enumerate(cases(kv_heads))), 10):
        written, compared = check_pair(producer, consumer, seed=number)
        assert 0 < written < compared, (producer, consumer)


@pytest.mark.parametrize(
    ("producer", "consumer"),
    [
        (Grid(2, 2), Grid(4)),
        (Grid(1, 4), Grid(1, 3)),
        (Grid(4, dcp_size=4), Grid(2, 2)),
        (Grid(1, 2), Grid(4, dcp_size=2, interleave_tokens=8)),
        (Grid(2, pcp_size=2, dcp_size=4, interleave_tokens=4), Grid(4, dcp_size=4)),
    ],
)
def test_grids_that_people_run(producer: Grid, consumer: Grid) -> None:
    """MLA between pipelines, context-parallel shards and tensor parallelism."""
    check_pair(EngineShape(producer, 1), EngineShape(consumer, 1, block_tokens=16), seed=1)
