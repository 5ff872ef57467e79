"""Order in which a tier evicts objects: cost per byte decides, then the last use."""

from __future__ import annotations

import os
import time
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from connectors.store.tiers.eviction import EvictionOrder
from connectors.store.tiers.folder import FolderTier
from tests.store.folder_objects import BLOCK, disk_bytes, file_of, holds, soon, write


def test_costly_objects_stay_longer(tmp_path: Path) -> None:
    """Cost per byte decides, then the last use."""
    tier = FolderTier(tmp_path / "store", 4 * BLOCK, durable=False)
    for number, cost in ((1, 500), (2, 1000), (3, 500), (4, 1000)):
        write(tier, number, cost)
    assert holds(tier, 1), "this use of 1 comes after that of 3"
    write(tier, 5, 1000)
    write(tier, 6, 1000)
    assert [number for number in range(1, 7) if holds(tier, number)] == [2, 4, 5, 6]


def test_costs_and_uses_survive_a_restart(tmp_path: Path) -> None:
    first = FolderTier(tmp_path / "store", 4 * BLOCK, durable=False)
    for number, cost in ((1, 500), (2, 1000), (3, 1000), (4, 1000)):
        write(first, number, cost)
        os.utime(file_of(first, number), (1_000_000 - number, 1_000_000 - number))
    second = FolderTier(tmp_path / "store", 4 * BLOCK, durable=False)
    assert second.open() == 4
    for number in (5, 6):
        write(second, number, 1000)
    # 1 costs least; 4 was used before 2 and 3.
    assert [number for number in range(1, 7) if holds(second, number)] == [2, 3, 5, 6]


def test_an_unused_prompt_goes_first_after_a_restart(tmp_path: Path) -> None:
    """Later objects of a prompt cost slightly less. The last use still decides between prompts."""
    first = FolderTier(tmp_path / "store", 6 * BLOCK, durable=False)
    now = time.time()
    for number, cost, unused_s in (
        (1, 1000, 3600.0),
        (2, 999, 3601.0),
        (3, 998, 3602.0),
        (4, 990, 0.0),
        (5, 989, 1.0),
        (6, 988, 2.0),
    ):
        write(first, number, cost)
        os.utime(file_of(first, number), (now - unused_s, now - unused_s))
    second = FolderTier(tmp_path / "store", 6 * BLOCK, durable=False)
    assert second.open() == 6
    kept = []
    for number in range(7, 12):
        write(second, number, 990)
        kept.append([each for each in range(1, 7) if file_of(second, each).exists()])
    assert kept == [[1, 2, 4, 5, 6], [1, 4, 5, 6], [4, 5, 6], [4, 5], [4]]


def test_objects_that_another_engine_uses_stay(tmp_path: Path) -> None:
    """The first engine reads two of the objects. The eviction order of the second engine has only
    its own uses, so the second engine reads the files' times.
    """
    one, other = (FolderTier(tmp_path, 6 * BLOCK, durable=False) for _ in range(2))
    for number in range(6):
        write(one, number)
        os.utime(file_of(one, number), (time.time() - 3600, time.time() - 3600))
    other.open()
    assert holds(one, 0)
    assert holds(one, 1)
    kept = []
    for number in range(6, 10):
        write(other, number)
        kept.append([each for each in range(6) if file_of(other, each).exists()])
    assert kept == [[0, 1, 3, 4, 5], [0, 1, 4, 5], [0, 1, 5], [0, 1]]
    assert write(other, 10)
    assert [each for each in range(11) if holds(other, each)] == [1, 6, 7, 8, 9, 10]
    assert other.used_bytes(soon()) == disk_bytes(other)


def test_unused_objects_go_in_the_end_however_costly() -> None:
    order: EvictionOrder[int] = EvictionOrder()
    order.add(0, 1, 10.0, 0.0)
    for number in range(1, 100):
        order.add(number, 1, 1.0, 0.0)
        if len(order) > 3:
            order.pop()
    assert 0 not in order


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.sampled_from(["add", "use", "discard", "pop"])), max_size=80))
def test_eviction_with_equal_costs_is_lru(operations: list[tuple[int, str]]) -> None:
    """The eviction order equals a list that is sorted by the last use."""
    order: EvictionOrder[int] = EvictionOrder()
    model: list[int] = []
    for key, operation in operations:
        match operation:
            case "add":
                order.add(key, 10, 70.0, 0.0)
                model = [each for each in model if each != key] + [key]
            case "use":
                order.use(key, 0.0)
                model = [each for each in model if each != key] + [key] * (key in model)
            case "discard":
                order.discard(key)
                model = [each for each in model if each != key]
            case "pop":
                popped = order.pop()
                assert (popped and popped[0]) == (model.pop(0) if model else None)
        assert len(order) == len(model)


def test_objects_of_another_release_are_counted_and_evicted_first(tmp_path: Path) -> None:
    tier = FolderTier(tmp_path / "store", 3 * BLOCK, durable=False)
    write(tier, 1)
    data = bytearray(file_of(tier, 1).read_bytes())
    data[8] = 99
    file_of(tier, 1).write_bytes(data)
    write(tier, 2)
    again = FolderTier(tmp_path / "store", 3 * BLOCK, durable=False)
    assert again.open() == 2
    for number in (3, 4):
        write(again, number)
    assert not file_of(tier, 1).exists()
    assert [number for number in range(5) if holds(again, number)] == [2, 3, 4]
