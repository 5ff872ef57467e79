"""A sample of ``make grids``: plans proved, and a request transferred byte for byte."""

import random
from dataclasses import replace
from typing import Any

import pytest

from connectors.errors import WireError
from connectors.planning.blocks import UnitShape
from connectors.planning.grid import Grid, Shard
from connectors.protocol.agent_metadata import (
    AgentMetadata,
    decode_agent_metadata,
    encode_agent_metadata,
    engine_metadata,
)
from tests.transport.engines import IDENTITY
from tests.transport.grids import EngineShape, cases, check_pair, make_engine


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


@pytest.mark.parametrize(
    ("method", "wrong"),
    [
        ("local", lambda _, tokens: tokens // 2),
        ("stores", lambda self, tokens: tokens % self.size == self.rank),
    ],
)
def test_another_division_is_seen(monkeypatch: pytest.MonkeyPatch, method: str, wrong: Any) -> None:
    """Tokens assigned or placed by another rule than the oracle's are found."""
    monkeypatch.setattr(Shard, method, wrong)
    with pytest.raises(Exception):  # noqa: B017, PT011 - the proof or the comparison fails, depending on the rule
        check_pair(
            EngineShape(Grid(2, dcp_size=2, interleave_tokens=4), 1), EngineShape(Grid(4, dcp_size=4), 1), seed=1
        )


def test_units_of_other_ranks_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """If each pair exchanged all units, ranks would write each other's tokens; no proof holds."""
    monkeypatch.setattr(UnitShape, "on_both", lambda _, units: units >= 0)
    with pytest.raises(Exception, match="more than once"):
        check_pair(EngineShape(Grid(2, dcp_size=2), 1), EngineShape(Grid(1), 1), seed=1)


def test_metadata_of_one_engine_describes_one_grid() -> None:
    """Six ranks of three stages are an engine; with a missing or different rank they are not."""
    workers = {
        rank.layout.rank: AgentMetadata("e", IDENTITY, rank.layout, "memory", b"")
        for rank in make_engine(EngineShape(Grid(2, 3, dcp_size=2), 1), 4)
    }
    workers = {rank: decode_agent_metadata(encode_agent_metadata(worker)) for rank, worker in workers.items()}
    assert [worker.rank for worker in engine_metadata(workers).workers] == [0, 1, 2, 3, 4, 5]
    with pytest.raises(WireError, match="describes rank 0 of 6"):
        engine_metadata({0: workers[0]})
    other = make_engine(EngineShape(Grid(1, 3, pcp_size=2, dcp_size=2), 1), 4)[5].layout
    with pytest.raises(WireError, match="agent metadata of rank 5 describes other parallel sizes"):
        engine_metadata(workers | {5: replace(workers[5], layout=other)})


@pytest.mark.parametrize(
    ("axes", "says"),
    [
        ({"pp_size": 5000}, "the limit is 4096"),
        ({"pp_size": 100, "tp_size": 100}, "the limit is 4096"),
        ({"dcp_size": 2, "interleave_tokens": 4096 * 16}, "limit"),
    ],
)
def test_huge_grids_are_refused(axes: dict[str, int], says: str) -> None:
    """A peer's metadata cannot make this process loop over a million ranks or tokens."""
    layout = make_engine(EngineShape(Grid(2), 1), 4)[0].layout
    payload = encode_agent_metadata(AgentMetadata("e", IDENTITY, layout, "memory", b""))
    for key, value in axes.items():
        payload = payload.replace(f'"{key}":{getattr(layout, key)}'.encode(), f'"{key}":{value}'.encode())
    with pytest.raises(WireError, match=says):
        decode_agent_metadata(payload)
