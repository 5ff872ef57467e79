"""Folders by descriptor: a rename or an unmount cannot redirect the store."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class OpenFolder:
    """An open folder, whose methods take names of its entries and follow no link.

    The descriptor ``fd`` is closed with the last reference. A thread that returns from a hanging
    disk thus never uses a reused descriptor. ``path`` is for messages.
    """

    __slots__ = ("fd", "path")

    def __init__(self, path: str, fd: int) -> None:
        self.path, self.fd = path, fd

    def __del__(self) -> None:
        os.close(self.fd)

    def folder(self, name: str, create: bool = False) -> OpenFolder:
        """Raises OSError also for a link, and if ``open_folder`` would refuse the folder."""
        if create:
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=self.fd)
        return _checked(f"{self.path}/{name}", os.open(name, _FLAGS | os.O_NOFOLLOW, dir_fd=self.fd))

    def open(self, name: str, flags: int) -> int:
        # O_NONBLOCK: a named pipe must not block.
        return os.open(name, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600, dir_fd=self.fd)

    def stat(self, name: str) -> os.stat_result:
        return os.stat(name, dir_fd=self.fd, follow_symlinks=False)

    def set_mtime(self, name: str, mtime_ns: int) -> None:
        os.utime(name, ns=(mtime_ns, mtime_ns), dir_fd=self.fd, follow_symlinks=False)

    def unlink(self, name: str) -> None:
        os.unlink(name, dir_fd=self.fd)

    def move(self, name: str, target: OpenFolder, new_name: str) -> None:
        os.rename(name, new_name, src_dir_fd=self.fd, dst_dir_fd=target.fd)

    def entries(self) -> Iterator[os.DirEntry[str]]:
        """Not thread-safe: all scans share the position of the descriptor."""
        with os.scandir(self.fd) as entries:
            yield from entries


def open_folder(path: Path, create: bool = False) -> OpenFolder:
    """Open a configured folder that no other user can change.

    It must belong to root or this user and not be world-writable. Groups are trusted: Kubernetes
    mounts a volume as root's, writable for the pod's ``fsGroup``. Folders above it may be writable
    for all, as an emptyDir is, and the path may contain any user's links: a change of those cannot
    redirect the open descriptor, only select another folder that passes these checks. Raises an
    OSError that names the folder at fault.
    """
    if create:
        # One by one: `Path.mkdir` creates parents with the umask alone.
        for folder in (*reversed(path.absolute().parents), path):
            if not folder.exists():
                with contextlib.suppress(FileExistsError):
                    folder.mkdir(0o700 if folder == path else 0o755)
    return _checked(str(path), os.open(path, _FLAGS))


def _checked(path: str, fd: int) -> OpenFolder:
    folder, state = OpenFolder(path, fd), os.fstat(fd)
    if state.st_uid not in (0, os.geteuid()):
        raise PermissionError(errno.EPERM, f"it belongs to user {state.st_uid}, who could change KV (chown)", path)
    if state.st_mode & stat.S_IWOTH:
        raise PermissionError(
            errno.EPERM, "all users of this host may write to it and could change stored KV (chmod o-w)", path
        )
    return folder
