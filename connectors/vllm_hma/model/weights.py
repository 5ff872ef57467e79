"""Digests of weight files: all of their bytes, remembered on this host until a file changes.

A file is known by path, inode, size, and times of modification and of status change; the last one cannot be set back by
copying tools. xxh3 reads about 5 GB/s from the page cache, in which the files still are when an engine has loaded them.
Engines of one host share the memory below vLLM's cache folder, and hash each file once.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import vllm.envs
import xxhash

from connectors.errors import ConfigurationError

logger = logging.getLogger(__name__)

_KINDS = (("*.safetensors", "*.safetensors.index.json"), ("*.bin", "*.bin.index.json"), ("*.pt",), ("*.gguf",))
"""The first of these that a folder has is what vLLM loads."""
_CHUNK_BYTES = 1 << 23
_THREADS = 4
_ATTEMPTS = 3


def digest_weights(path: Path) -> str:
    """Digest of names and content of a folder's weight files, or of one file. Raises ConfigurationError."""
    files = [path] if path.is_file() else _weight_files(path)
    with ThreadPoolExecutor(_THREADS) as pool:
        digests = list(pool.map(_remembered, files))
    names = [""] if path.is_file() else [file.name for file in files]
    whole = hashlib.blake2b(digest_size=16)
    for name, digest in zip(names, digests, strict=True):
        whole.update(f"{name}:{digest};".encode())
    return whole.hexdigest()


def _weight_files(folder: Path) -> list[Path]:
    for patterns in _KINDS:
        found = sorted(file for pattern in patterns for file in folder.glob(pattern))
        if found:
            return found
    return []


def _remembered(file: Path) -> str:
    """The digest of a file, from the memory on disk where it has one for this state of the file."""
    for _ in range(_ATTEMPTS):
        state = _state(file)
        with _memory(state) as memory:
            known = memory.read_text() if memory is not None and memory.exists() else ""
            if known:
                return known
            digest = _digest(file)
            if _state(file) != state:
                continue
            if memory is not None:
                part = memory.with_suffix(f".{os.getpid()}")
                part.write_text(digest)
                part.replace(memory)
            return digest
    raise ConfigurationError(f"the weights in {file} change while they are read: start the engine again afterwards")


def _state(file: Path) -> str:
    stat = file.stat()
    return f"{file.resolve()}:{stat.st_dev}:{stat.st_ino}:{stat.st_size}:{stat.st_mtime_ns}:{stat.st_ctime_ns}"


@contextlib.contextmanager
def _memory(state: str) -> Iterator[Path | None]:
    """The file that holds the digest for ``state``, locked against other engines; None where none can be written."""
    name = hashlib.blake2b(state.encode(), digest_size=16).hexdigest()
    with contextlib.ExitStack() as stack:
        try:
            folder = Path(vllm.envs.VLLM_CACHE_ROOT) / "tandem" / "weights"
            folder.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context((folder / f"{name}.lock").open("w"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            logger.warning("Tandem: digests of weights are not remembered: %s", error)
            yield None
            return
        yield folder / name


def _digest(file: Path) -> str:
    hasher = xxhash.xxh3_128()
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    with file.open("rb", buffering=0) as stream:
        while count := stream.readinto(buffer):
            hasher.update(buffer[:count])
    return str(hasher.hexdigest())
