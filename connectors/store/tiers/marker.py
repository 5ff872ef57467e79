"""The folders of a tier, and the file that marks a folder as a tier and names it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from connectors.errors import ConfigurationError
from connectors.store.tiers.open_folder import OpenFolder, open_folder

MARKER = "tandem-kv-store"

LOCK_S = 1.0
"""Longest wait for the marker's lock: a process that holds it may be stopped."""


@dataclass(frozen=True, slots=True)
class TierFolders:
    """The folders of a tier: its own, and those of complete and of unfinished objects."""

    root: OpenFolder
    objects: OpenFolder
    parts: OpenFolder


def open_tier(path: Path) -> TierFolders:
    """Open a tier's folders; create what is missing.

    Raises ConfigurationError, as ``check_folder``, and if a folder cannot be opened or created.
    """
    with _explained(path):
        root = open_folder(path, create=True)
        _check_content(root)
        os.close(root.file(MARKER, create=True))
        return TierFolders(root, root.folder("objects", create=True), root.folder("parts", create=True))


def check_folder(path: Path) -> bool:
    """Return whether a folder exists. Raise ConfigurationError if it cannot be a tier.

    Other users must not be able to change it (``open_folder``), and this user must be able to write
    to it. Without the marker of a store it must be empty, except for ``lost+found``.
    """
    with _explained(path):
        try:
            folder = open_folder(path)
        except FileNotFoundError:
            return False
        _check_content(folder)
        return True


def folder_id(folder: OpenFolder) -> str:
    """Return the id of the tier in a folder: 32 hexadecimal digits, the same for all its processes.

    Creates a random id if the tier has none. Raises OSError if the folder is no tier, if its marker
    cannot be read or written, or if another process holds the marker's lock for LOCK_S.
    """
    with open(folder.file(MARKER), "r+", encoding="ascii", errors="replace") as file:
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


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigurationError(
            f"store: {path / (error.filename or '')} cannot be used: {error.strerror}; configure another path"
        ) from error


def _check_content(folder: OpenFolder) -> None:
    if not os.access(".", os.W_OK | os.X_OK, dir_fd=folder.fd):
        raise ConfigurationError(
            f"store: this process may not write to {folder.path} or search it; permit both, or configure another path"
        )
    # The marker is created before all other files: if another process has created some of the
    # listed ones in the meantime, it exists now.
    others = set(folder.names()) - {"lost+found", MARKER}
    try:
        folder.stat(MARKER)
    except FileNotFoundError:
        if others:
            raise ConfigurationError(
                f"store: {folder.path} contains {min(others)!r}, which is not part of a store; configure a separate "
                "folder"
            ) from None
