"""Numbered objects in a tier on real files; each uses one block of the file system."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

from connectors.store.keys.names import ObjectName
from connectors.store.tiers.files import DIGEST_BYTES
from connectors.store.tiers.folder import FolderTier

SPACE = b"a" * 16
PAYLOAD = 4096 - DIGEST_BYTES
"""Payload bytes of an object whose file fills one block of the file system."""

BLOCK = 4096


def name(number: int, space: bytes = SPACE, end_token: int = 0) -> ObjectName:
    return ObjectName(space, number.to_bytes(32, "big"), end_token)


def payload(number: int, size: int = PAYLOAD) -> memoryview:
    return memoryview(np.random.default_rng(number).bytes(size))


def soon() -> float:
    return time.monotonic() + 10.0


def write(tier: FolderTier, number: int, size: int = PAYLOAD, end_token: int = 0) -> bool:
    return tier.write(name(number, end_token=end_token), payload(number, size), soon())


def holds(tier: FolderTier, number: int, size: int = PAYLOAD) -> bool:
    if not tier.find(name(number)):
        return False
    into = memoryview(bytearray(size))
    tier.read(name(number), into)
    assert into == payload(number, size)
    return True


def file_of(tier: FolderTier, number: int, space: bytes = SPACE) -> Path:
    return tier.path / "objects" / space.hex() / name(number).key.hex()


def disk_bytes(tier: FolderTier) -> int:
    files = [path for part in ("objects", "parts") for path in (tier.path / part).rglob("*") if path.is_file()]
    return sum(path.stat().st_blocks * 512 for path in files)
