"""A campaign is a function of its seed."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from tests.campaigns.faults.schedule import PHASES, REFERENCES, Fault, cells, schedule


def first(count: int, seed: int = 1, tp_sizes: tuple[int, int] = (1, 2), pattern: str = "") -> list[Fault]:
    return list(itertools.islice(schedule(seed, tp_sizes, pattern), count))


def test_a_seed_gives_the_same_faults_and_another_seed_others() -> None:
    """The seed also determines the times of the faults."""
    assert first(300) == first(300)
    assert first(300) != first(300, seed=2)


def test_a_fault_keeps_its_number_and_its_moment_when_others_are_left_out() -> None:
    """Fixed numbers and times make it possible to replay one case of a campaign."""
    kills = first(20, pattern="^kill")
    assert {fault.family for fault in kills} == {"kill"}
    everything = first(kills[-1].index + 1)
    assert all(everything[fault.index] == fault for fault in kills)


@pytest.mark.parametrize("tp_sizes", [(1, 1), (1, 2), (2, 1)])
def test_a_round_meets_every_phase_with_every_signal_on_either_engine(tp_sizes: tuple[int, int]) -> None:
    """Every phase, signal, engine and reference occurs; ranks only if an engine has several."""
    faults = first(sum(weight for _, weight in cells(tp_sizes)), tp_sizes=tp_sizes)
    met = Counter((fault.family, fault.target, fault.phase) for fault in faults if fault.part == "tree")
    for family in ("kill", "stop"):
        for target in ("prefill", "decode"):
            assert all(met[family, target, phase] >= 3 for phase in PHASES)
    assert {fault.variant for fault in faults if fault.family == "reference"} == set(REFERENCES)
    ranks = {(fault.target, fault.part) for fault in faults if fault.part.startswith("rank")}
    several = [target for target, size in zip(("prefill", "decode"), tp_sizes, strict=True) if size > 1]
    assert ranks == {(target, f"rank{rank}") for target in several for rank in range(2)}


def test_a_campaign_of_two_hundred_kills_stops_cancels_and_forges() -> None:
    """Every family is frequent."""
    families = Counter(fault.family for fault in first(200))
    assert min(families[family] for family in ("kill", "stop", "cancel", "reference")) >= 25
