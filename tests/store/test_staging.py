"""Staging memory: slots, and the mapping by an engine's workers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from connectors.errors import ConfigurationError, StoreError
from connectors.store.tiers.staging import AttachedStaging, Staging, StagingLocation


def test_staging_is_dealt_out_and_merged_again(tmp_path: Path) -> None:
    staging = Staging(4 * 4096, tmp_path)
    slots = [staging.take(size) for size in (1, 4096, 4097)]
    assert slots == [0, 4096, 8192]
    assert staging.take(1) is None
    staging.share(4096)
    staging.give_back(4096)
    assert staging.take(1) is None, "it has another user"
    for offset in (0, 8192, 4096):
        staging.give_back(offset)
    assert staging.take(4 * 4096) == 0
    with pytest.raises(ConfigurationError, match="must be at least one page"):
        Staging(100, tmp_path)


def test_workers_do_not_map_another_file(tmp_path: Path) -> None:
    """The path leads to another file if the descriptor's number has been reused, and on another
    host, where another process may have the scheduler's pid.
    """
    first, second = Staging(4096, tmp_path), Staging(4096, tmp_path)
    number = int(Path(first.location.path).name)
    first.close()
    with pytest.raises(StoreError, match="user and in the pid namespace"):
        AttachedStaging(first.location)
    os.dup2(int(Path(second.location.path).name), number)
    try:
        with pytest.raises(StoreError, match="is another file"):
            AttachedStaging(first.location)
    finally:
        os.close(number)
    elsewhere = ("another host", *second.location.identity[1:])
    with pytest.raises(StoreError, match="is another file"):
        AttachedStaging(StagingLocation(second.location.path, elsewhere))
    second.close()


def test_staging_has_no_file_that_a_killed_engine_could_leave(tmp_path: Path) -> None:
    staging = Staging(4096, tmp_path)
    attached = AttachedStaging(staging.location)
    staging.view(0, 3)[:] = b"abc"
    assert bytes(attached.view(0, 3)) == b"abc"
    assert os.listdir(tmp_path) == []
