"""The file that marks a folder as a tier of the KV store, and names it."""

from __future__ import annotations

import fcntl
import os
import re
import stat
import time
import uuid
from pathlib import Path

from connectors.errors import ConfigurationError

MARKER = "tandem-kv-store"

LOCK_S = 1.0
"""Longest wait for the marker's lock: a process that holds it may be stopped."""


def folder_id(path: Path) -> str:
    """Return the id of the tier in a folder: 32 hexadecimal digits, the same for all its processes.

    Creates a random id if the tier has none. Raises OSError if the folder is no tier, if its marker
    cannot be read or written, or if another process holds the marker's lock for LOCK_S.
    """
    with (path / MARKER).open("r+", encoding="ascii", errors="replace") as file:
        _lock(file.fileno())
        found = file.read()
        if not re.fullmatch("[0-9a-f]{32}", found):
            found = uuid.uuid4().hex
            file.seek(0)
            file.truncate()
            file.write(found)
            file.flush()
            os.fsync(file.fileno())
        return found


def _lock(descriptor: int) -> None:
    """Lock a file until it is closed."""
    latest = time.monotonic() + LOCK_S
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= latest:
                raise
        time.sleep(0.01)


def check_folder(path: Path) -> None:
    """Raise ConfigurationError if an existing folder cannot be a tier.

    The folder must belong to this user or root and be writable for this user, but not for all
    users. Its group may write to it: Kubernetes mounts a volume as root's, for the pod's
    ``fsGroup``. Without the marker of a store it must be empty, except for ``lost+found``. Raises
    OSError if the folder is missing or unreadable.
    """
    state = path.stat()
    if state.st_uid not in (0, os.geteuid()):
        raise ConfigurationError(
            f"store: {path} belongs to user {state.st_uid}, who could change stored KV; configure a folder of the "
            "user that runs the engine"
        )
    if state.st_mode & stat.S_IWOTH:
        raise ConfigurationError(
            f"store: all users of this host may write to {path} and could change stored KV; remove the permission "
            "(chmod o-w)"
        )
    if not os.access(path, os.W_OK | os.X_OK):
        raise ConfigurationError(
            f"store: this process may not write to {path} or search it; permit both, or configure another path"
        )
    # The marker is created before all other files: if another process has created some of the
    # listed ones in the meantime, it exists now.
    others = {entry.name for entry in path.iterdir()} - {"lost+found", MARKER}
    if others and not (path / MARKER).exists():
        raise ConfigurationError(
            f"store: {path} contains {sorted(others)[0]!r}, which is not part of a store; configure a separate folder"
        )
