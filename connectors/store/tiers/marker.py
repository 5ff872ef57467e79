"""The file that marks a folder as a tier and names it."""

from __future__ import annotations

import contextlib
import os
import re
import uuid
from collections.abc import Iterator
from pathlib import Path

from connectors.errors import ConfigurationError
from connectors.store.tiers.open_folder import OpenFolder, open_folder

MARKER = "tandem-kv-store"


@contextlib.contextmanager
def opened_root(path: Path, create: bool = True) -> Iterator[OpenFolder]:
    """Open a tier's folder. Raises ConfigurationError if it cannot be a tier, also for any OSError.

    Without the marker of a store it must be empty, except for ``lost+found``.
    """
    try:
        root = open_folder(path, create)
        if not os.access(".", os.W_OK | os.X_OK, dir_fd=root.fd):
            raise ConfigurationError(
                f"store: this process may not write to {path} or search it; permit both, or configure another path"
            )
        # The marker is created before all other files: if another process has created some of the
        # listed ones in the meantime, it exists now.
        others = {entry.name for entry in root.entries()} - {"lost+found", MARKER}
        if others and not os.path.lexists(path / MARKER):
            raise ConfigurationError(
                f"store: {path} contains {min(others)!r}, which is not part of a store; configure a separate folder"
            )
        if create:
            os.close(root.open(MARKER, os.O_RDWR | os.O_CREAT))
        yield root
    except OSError as error:
        raise ConfigurationError(
            f"store: {path / (error.filename or '')} cannot be used: {error.strerror}; configure another path"
        ) from error


def folder_id(folder: OpenFolder) -> str:
    """Return the id of the tier in a folder: 32 hexadecimal digits, the same for all its processes.

    Creates a random id if the tier has none, so the caller must hold the tier's lock. Raises
    OSError if the marker is missing or cannot be read or written.
    """
    with open(folder.open(MARKER, os.O_RDWR), "r+", encoding="ascii", errors="replace") as file:
        found = file.read()
        if not re.fullmatch("[0-9a-f]{32}", found):
            found = uuid.uuid4().hex
            file.seek(0)
            file.truncate()
            file.write(found)
            file.flush()
            os.fsync(file.fileno())
        return found
