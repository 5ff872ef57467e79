"""Pairs of faults are a function of their seed, and difficult ones are frequent."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from tests.campaigns.faults.pairs import WITHIN_S, FaultPair, cells, kinds, pairs
from tests.campaigns.faults.schedule import PHASES


def first(count: int, seed: int = 1, tp_sizes: tuple[int, int] = (2, 1), link: bool = True) -> list[FaultPair]:
    return list(itertools.islice(pairs(seed, tp_sizes, link), count))


def test_a_seed_gives_the_same_pairs_and_another_seed_others() -> None:
    """The seed also determines the times of the faults."""
    assert first(300) == first(300)
    assert first(300) != first(300, seed=2)
    assert [pair.index for pair in first(300)] == list(range(300))


@pytest.mark.parametrize("tp_sizes", [(1, 1), (2, 1), (1, 2)])
def test_a_round_pairs_every_kind_with_every_other(tp_sizes: tuple[int, int]) -> None:
    """A round has both orders, except for two faults of one family with one victim."""
    every, met = kinds(tp_sizes, link=True), Counter(cells(tp_sizes, link=True))
    for one, other in itertools.permutations(every, 2):
        same = (one.family, one.target, one.part) == (other.family, other.target, other.part)
        assert bool(met[one, other]) != same
    assert {fault.family for fault in every} == {"kill", "stop", "cancel", "cut"}


def test_two_hundred_pairs_have_many_hard_ones() -> None:
    """Both hard pairs are frequent: a stopped rank and its killed core, a cut link and a cancel."""
    whats = [pair.what for pair in first(200)]
    assert len(set(whats)) > 100
    stopped = [what for what in whats if "SIGSTOP prefill's rank1" in what and "SIGKILL prefill's core" in what]
    cut = [what for what in whats if "link cut" in what and "cancel" in what]
    assert len(stopped) >= 5
    assert len(cut) >= 10


def test_the_second_fault_follows_soon() -> None:
    """Half of the second faults follow at once; all phases occur."""
    drawn = first(400)
    assert all(0 <= pair.delay_s <= WITHIN_S for pair in drawn)
    assert 100 < sum(pair.delay_s < 0.05 for pair in drawn) < 300
    assert {pair.phase for pair in drawn} == set(PHASES)
    assert all(pair.steps == ((pair.first, 0.0), (pair.second, pair.delay_s)) for pair in drawn)


def test_without_a_link_nothing_is_cut() -> None:
    """The schedule contains the other kinds of faults."""
    assert not any("link" in pair.what for pair in first(300, link=False))
