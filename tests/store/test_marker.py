"""The id of a tier's folder."""

from __future__ import annotations

import fcntl
import re
import subprocess
import sys
from pathlib import Path

import pytest

from connectors.store.tiers.folder import FolderTier
from connectors.store.tiers.marker import MARKER, check_folder, folder_id


def test_a_folder_keeps_its_id(tmp_path: Path) -> None:
    """Its engines end and start; another folder has another id."""
    first, second = tmp_path / "first", tmp_path / "second"
    FolderTier(first, 1 << 20).close()
    FolderTier(second, 1 << 20).close()
    found = folder_id(first)
    assert re.fullmatch("[0-9a-f]{32}", found)
    FolderTier(first, 1 << 20).close()
    assert folder_id(first) == found != folder_id(second)
    check_folder(first)


def test_processes_that_ask_at_once_get_one_id(tmp_path: Path) -> None:
    FolderTier(tmp_path / "tier", 1 << 20).close()
    ask = (
        "import sys; from pathlib import Path; from connectors.store.tiers.marker import folder_id; "
        "sys.stdin.readline(); print(folder_id(Path(sys.argv[1])))"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", ask, str(tmp_path / "tier")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(4)
    ]
    answers = [process.communicate("\n", timeout=60)[0] for process in processes]
    assert set(answers) == {folder_id(tmp_path / "tier") + "\n"}


@pytest.mark.parametrize("content", [b"0123", bytes(32), b"g" * 32, b"0" * 33], ids=repr)
def test_a_marker_without_an_id_gets_one(tmp_path: Path, content: bytes) -> None:
    """A process that was killed may have written a part, and a power loss may leave zeros."""
    FolderTier(tmp_path / "tier", 1 << 20).close()
    (tmp_path / "tier" / MARKER).write_bytes(content)
    found = folder_id(tmp_path / "tier")
    assert re.fullmatch("[0-9a-f]{32}", found)
    assert folder_id(tmp_path / "tier") == found


def test_a_folder_that_is_no_tier_has_no_id(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        folder_id(tmp_path)


def test_a_process_that_keeps_the_lock_delays_no_start(tmp_path: Path) -> None:
    """It may be stopped. The store works without an id."""
    FolderTier(tmp_path / "tier", 1 << 20).close()
    with (tmp_path / "tier" / MARKER).open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(BlockingIOError):
            folder_id(tmp_path / "tier")
    assert len(folder_id(tmp_path / "tier")) == 32
