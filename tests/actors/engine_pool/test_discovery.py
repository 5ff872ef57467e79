"""The choice among replicas."""

from collections import Counter

import pytest

from actors.engine_pool.discovery import rank


@pytest.mark.parametrize(
    ("ongoing", "best"),
    [
        ({"a": 0}, "a"),
        ({"a": 3, "b": 1}, "b"),
        ({"a": 1, "b": 3, "c": 2}, "a"),
        ({"a": 2, "b": 2, "c": 1}, "c"),
    ],
)
def test_the_least_loaded_replica_comes_first_at_every_turn(ongoing, best):
    """Turns break ties only."""
    assert {rank(ongoing, turn)[0] for turn in range(7)} == {best}


def test_equals_take_turns():
    """Over any run of turns, equally loaded replicas get equal numbers of requests."""
    firsts = Counter(rank({"a": 1, "b": 1, "c": 1, "d": 5}, turn)[0] for turn in range(9))
    assert firsts == {"a": 3, "b": 3, "c": 3}


def test_all_are_ranked():
    """Serve tries the next one if the first has no slot."""
    assert sorted(rank({"b": 4, "a": 0, "c": 2}, 5)) == ["a", "b", "c"]
    assert rank({"b": 4, "a": 0, "c": 2}, 5) == ["a", "c", "b"]


def test_no_replica_no_rank():
    """An empty deployment is not an error here."""
    assert rank({}, 3) == []


def test_a_replica_to_avoid_is_not_ranked():
    """A dead engine looks idle, and is not ranked."""
    assert rank({"a": 0, "b": 5, "c": 2}, 0, avoid={"a", "gone"}) == ["c", "b"]
    assert rank({"a": 0}, 0, avoid={"a"}) == []
