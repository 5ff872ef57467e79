"""A campaign is a function of its seed."""

from __future__ import annotations

import itertools
from collections import Counter

from tests.campaigns.faults.schedule import PHASES, REFERENCES, Fault, schedule


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


def test_a_campaign_of_two_hundred_kills_stops_cancels_and_forges() -> None:
    """Every family is frequent, and every phase and reference occurs."""
    faults = first(200)
    families = Counter(fault.family for fault in faults)
    assert min(families[family] for family in ("kill", "stop", "cancel", "reference")) >= 25
    assert {fault.phase for fault in faults if fault.family == "kill"} == set(PHASES)
    assert {fault.variant for fault in first(600) if fault.family == "reference"} == set(REFERENCES)
