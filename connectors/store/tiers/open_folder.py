"""Folders by descriptor: a link or a rename by another user cannot redirect the store."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections import deque
from collections.abc import Iterator
from pathlib import Path

# O_PATH: neither blocks nor needs permission to read. O_DIRECTORY also makes autofs mount a folder.
_LINK = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_FOLDER = _LINK | os.O_DIRECTORY
_LISTED = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_MAX_LINKS = 40


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
        """Raises OSError, also if it is a link, or another user owns it or may write to it."""
        if create:
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=self.fd)
        try:
            fd = os.open(name, _FOLDER, dir_fd=self.fd)
        except NotADirectoryError:
            raise NotADirectoryError(errno.ENOTDIR, "it is a link or a file", f"{self.path}/{name}") from None
        found = OpenFolder(f"{self.path}/{name}", fd)
        _check_writers(found)
        return found

    def file(self, name: str, create: bool = False) -> int:
        """Raises OSError also for a link, or a file with another name."""
        try:
            fd = self.open(name, os.O_RDWR | os.O_CREAT if create else os.O_RDWR)
        except OSError as error:
            raise OSError(
                error.errno, "it is a link" if error.errno == errno.ELOOP else error.strerror, f"{self.path}/{name}"
            ) from None
        state = os.fstat(fd)
        if stat.S_ISREG(state.st_mode) and state.st_nlink <= 1:
            return fd
        os.close(fd)
        raise OSError(errno.EPERM, "it is a link, or not a regular file", f"{self.path}/{name}")

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
        """Yield the entries. Their ``stat`` works until the next one is requested."""
        fd = os.open(".", _LISTED, dir_fd=self.fd)
        try:
            with os.scandir(fd) as entries:
                yield from entries
        finally:
            os.close(fd)


def open_folder(path: Path, create: bool = False) -> OpenFolder:
    """Open a configured folder that no other user can change.

    The folder and each link on the way must belong to root or this user, and the folder must not be
    world-writable. Groups are trusted: Kubernetes mounts a volume as root's, writable for the pod's
    ``fsGroup``. Folders above it may be writable for all, as an emptyDir is: a user who renames it
    does not redirect its descriptor, and can put only folders of root or this user in its place.
    Raises OSError that names the folder or link at fault.
    """
    root = here = OpenFolder("", os.open("/", _FOLDER))
    todo, links = deque(path.absolute().parts[1:]), 0
    while todo:
        name = todo.popleft()
        where = f"{here.path}/{name}"
        try:
            here = OpenFolder(where, os.open(name, _FOLDER, dir_fd=here.fd))
        except FileNotFoundError:
            if not create:
                raise
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, 0o755 if todo else 0o700, dir_fd=here.fd)
            todo.appendleft(name)
        except NotADirectoryError:
            links += 1
            if links > _MAX_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path)) from None
            target = _read_link(here, name)
            here = root if target.is_absolute() else here
            todo.extendleft(part for part in reversed(target.parts) if part != "/")
    found = OpenFolder(here.path, os.open(".", _LISTED, dir_fd=here.fd))
    _check_writers(found)
    return found


def _read_link(folder: OpenFolder, name: str) -> Path:
    where = f"{folder.path}/{name}"
    link = OpenFolder(where, os.open(name, _LINK, dir_fd=folder.fd))
    state = os.fstat(link.fd)
    if not stat.S_ISLNK(state.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), where)
    if state.st_uid not in (0, os.geteuid()):
        raise PermissionError(
            errno.EPERM, f"it is a link of user {state.st_uid}, who could redirect it; remove it or chown it", where
        )
    return Path(os.readlink("", dir_fd=link.fd))


def _check_writers(folder: OpenFolder) -> None:
    state, path = os.fstat(folder.fd), folder.path or "/"
    if state.st_uid not in (0, os.geteuid()):
        raise PermissionError(errno.EPERM, f"it belongs to user {state.st_uid}, who could change KV (chown)", path)
    if state.st_mode & stat.S_IWOTH:
        raise PermissionError(
            errno.EPERM, "all users of this host may write to it and could change stored KV (chmod o-w)", path
        )
