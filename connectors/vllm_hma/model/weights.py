"""Digests of all bytes of weight files, cached on this host until a file changes.

The cache key is path, file system, inode, size, modification time and status change time, which
copying tools cannot restore. xxh3 reads about 5 GB/s from the page cache, which often still has the
files that the engine has loaded. Engines with the same VLLM_CACHE_ROOT share the digests, unless
another user can change the folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import math
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import vllm.envs
import xxhash

from connectors.errors import ConfigurationError
from connectors.store.tiers.open_folder import OpenFolder, open_folder

logger = logging.getLogger(__name__)

_KINDS = (("*.safetensors", "*.safetensors.index.json"), ("*.bin", "*.bin.index.json"), ("*.pt",), ("*.gguf",))
"""File patterns of weights in vLLM's order: vLLM loads the first kind that the folder has."""
_THREADS = 4
_REMOTE = ("nfs", "nfs4", "ceph", "lustre")
"""File systems whose servers assign the inode and the status change time of a file."""
_ATTEMPTS = 3
_TOLERANCE_S = 0.5
"""Tolerance of the coarse times of files and processes; a process reads no weights that early."""


def digest_weights(path: Path, unchanged_since_s: float = math.inf) -> str:
    """Return a digest of a folder's weight files and their names, or of a single weight file.

    ``unchanged_since_s``  start of the process, in ``time.time()`` seconds: a file that changed
                           later is refused, because vLLM may have read its earlier contents.
                           Infinity disables the check

    Raises ConfigurationError if there are no weight files, if one changed after
    ``unchanged_since_s``, or keeps changing while it is read, and OSError if one cannot be read.
    """
    files = [path] if path.is_file() else _weight_files(path)
    if not files:
        raise ConfigurationError(
            f"{path} has no weight files ({', '.join(kinds[0] for kinds in _KINDS)}), so its weights cannot be told "
            "from others; use a folder with the weights, or a model of the Hugging Face Hub"
        )
    for file in files:
        _check_unchanged(file, unchanged_since_s)
    with ThreadPoolExecutor(_THREADS) as pool:
        digests = list(pool.map(_cached_digest, files))
    names = [""] if path.is_file() else [file.name for file in files]
    whole = hashlib.blake2b(digest_size=16)
    for name, digest in zip(names, digests, strict=True):
        whole.update(f"{name}:{digest};".encode())
    return whole.hexdigest()


def begin_digests(path: Path) -> list[threading.Thread]:
    """Start and return threads that cache digests of a folder's weight files while vLLM loads it.

    ``digest_weights`` waits for the thread that reads a file. Starts none if ``path`` is no folder,
    or if nothing can be cached.
    """
    files = iter(_weight_files(path))

    def cache() -> None:
        for file in files:
            with contextlib.suppress(ConfigurationError, OSError):  # `digest_weights` raises it
                _cached_digest(file, needed=False)

    threads = [threading.Thread(target=cache, daemon=True) for _ in range(_THREADS)]
    for thread in threads:
        thread.start()
    return threads


def _check_unchanged(file: Path, since_s: float) -> None:
    """A time in the future is of a file server whose clock is ahead, and passes."""
    changed_s = file.stat().st_ctime
    if since_s + _TOLERANCE_S < changed_s <= time.time():
        raise ConfigurationError(
            f"{file} (its content, owner or permissions) changed after this process started, so vLLM may have loaded "
            "earlier weights; let all changes of the file finish, then restart the engine"
        )


def _weight_files(folder: Path) -> list[Path]:
    for patterns in _KINDS:
        found = sorted(file for pattern in patterns for file in folder.glob(pattern))
        if found:
            return found
    return []


def _cached_digest(file: Path, needed: bool = True) -> str:
    """If the digest is not ``needed`` and cannot be cached, return an empty string."""
    for _ in range(_ATTEMPTS):
        state = _state(file)
        name = hashlib.blake2b(state.encode(), digest_size=16).hexdigest()
        with _cache_locked(name) as cache:
            known = _read_cached(cache, name)
            if known or not (needed or cache):
                return known
            digest = digest_file(file)
            if _state(file) != state:
                continue
            if cache is not None:
                _write_cached(cache, name, digest)
            return digest
    raise ConfigurationError(
        f"the weights in {file} changed while they were read; restart the engine when the copy is complete"
    )


def _read_cached(cache: OpenFolder | None, name: str) -> str:
    if cache is None:
        return ""
    try:
        with open(cache.open(name, os.O_RDONLY), encoding="utf-8") as file:
            return file.read()
    except (OSError, UnicodeDecodeError):
        return ""


def _write_cached(cache: OpenFolder, name: str, digest: str) -> None:
    part = f"{name}.{os.getpid()}"
    try:
        with open(cache.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "w", encoding="utf-8") as file:
            file.write(digest)
        cache.move(part, cache, name)
    except OSError as error:
        logger.warning("Tandem: a weight file's digest cannot be cached, so the next start reads the file: %s", error)
        with contextlib.suppress(OSError):
            cache.unlink(part)


def _state(file: Path) -> str:
    stat = file.stat()
    where = f"{file.resolve()}:{_file_system(stat.st_dev)}:{stat.st_ino}"
    return f"{where}:{stat.st_size}:{stat.st_mtime_ns}:{stat.st_ctime_ns}"


def _file_system(device: int, mounts: Path = Path("/proc/self/mountinfo")) -> str:
    """Return the source of a remote file system, whose number differs by host; else its number."""
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in mounts.read_text(encoding="utf-8", errors="replace").splitlines() if mounts.exists() else ():
        mount, _, source = line.partition(" - ")
        if mount.split()[2] == number and source.split()[0] in _REMOTE:
            return source.split()[1]
    return str(device)


@contextlib.contextmanager
def _cache_locked(name: str) -> Iterator[OpenFolder | None]:
    """Yield the folder of cache files while this process holds the lock of one of them, for which
    it waits.

    Yields None if the lock file cannot be opened or locked, or if another user can change the
    folder: a wrong digest would let engines of other weights exchange KV.
    """
    with contextlib.ExitStack() as stack:
        try:
            folder = open_folder(Path(vllm.envs.VLLM_CACHE_ROOT) / "tandem" / "weights", create=True)
            lock = stack.enter_context(open(folder.open(f"{name}.lock", os.O_RDWR | os.O_CREAT), "w", encoding="utf-8"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            logger.warning("Tandem: a weight file's digest cannot be cached, so every start reads the file: %s", error)
            yield None
            return
        yield folder


def digest_file(file: Path) -> str:
    """xxh3_128, as 32 hexadecimal digits. Raises OSError."""
    with file.open("rb", buffering=0) as stream:
        return hashlib.file_digest(stream, xxhash.xxh3_128).hexdigest()
