"""Faults of a store's files, disks and processes."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from connectors.store.tiers.usage import allocated
from tests.campaigns.store.world import World, held

ROOT = Path(__file__).resolve().parents[3]

Fault = Callable[[World], None]


def flip_bits(world: World) -> None:
    _rewrite(world, lambda data: _flip(world, data))


def truncate(world: World) -> None:
    _rewrite(world, lambda data: data[: world.random.randrange(len(data) + 1)])


def extend(world: World) -> None:
    # Within the last block, also if a file is extended again: the store does not know of bytes that
    # others add.
    _rewrite(world, lambda data: data + bytes(world.random.randrange(allocated(len(data)) - len(data) + 1)))


def swap_objects(world: World) -> None:
    """Swap two objects of one tier."""
    root = world.random.choice((world.disk, world.memory))
    with held(root), contextlib.suppress(FileNotFoundError):  # readers remove damaged ones without the lock
        paths = world.random.sample(files, 2) if len(files := world.object_files(root)) > 1 else []
        for path, data in zip(paths, [path.read_bytes() for path in paths[::-1]], strict=True):
            _replace(path, data)


def wrong_index(world: World) -> None:
    """Damage, empty or remove a usage file, so that the budget depends on a count of the files."""
    usage = world.random.choice((world.disk, world.memory)) / "usage"
    with contextlib.suppress(OSError):
        match world.random.randrange(3):
            case 0:
                usage.write_bytes(world.random.randbytes(40))
            case 1:
                usage.write_bytes(b"")
            case 2:
                usage.unlink()


def no_space(world: World) -> None:
    engine = world.random.choice(world.engines)
    engine.files.full = frozenset(world.random.sample(["create", "write", "publish"], world.random.randrange(1, 4)))
    world.ask(engine)
    engine.files.heal()


def stalled_disk(world: World) -> None:
    """Make some calls hang until the disk returns, perhaps long after their requests have ended."""
    engine = world.random.choice(world.engines)
    engine.files.hang(
        *world.random.sample(["find", "read", "create", "write", "publish"], world.random.randrange(1, 3))
    )
    world.ask(engine)
    if world.random.random() < 0.5:
        world.ask(engine)
    engine.files.heal()


def removed_disk(world: World) -> None:
    away = world.root / "away"
    world.disk.rename(away)
    try:
        world.ask()
        if world.random.random() < 0.3:
            # The empty mount point.
            world.disk.mkdir()
            world.ask()
            if any(world.disk.iterdir()):
                world.outcome.problems.append("files were written below the mount point of a removed disk")
            world.disk.rmdir()
    finally:
        away.rename(world.disk)


def restarted_engine(world: World) -> None:
    world.restart()


KILLED = """
import itertools, random, sys, time
from pathlib import Path
from connectors.errors import StoreError
from connectors.store.tiers.folder import FolderTier
from tests.campaigns.store.world import DISK_BUDGET, SIZES, World, content, FolderTier, ObjectName, SPACE
tier = FolderTier(Path(sys.argv[1]), DISK_BUDGET, durable=False)
dice = random.Random(int(sys.argv[2]))
print("ready", flush=True)
for _ in itertools.count():
    name = ObjectName(SPACE, dice.randrange(200).to_bytes(32, "big"))
    data = memoryview(content(name, SIZES[0]))
    try:
        tier.write(name, data, time.monotonic() + 1.0)
        tier.read(name, memoryview(bytearray(SIZES[0])))
    except (StoreError, OSError):
        pass
"""


def killed_process(world: World) -> None:
    """Kill a process while it reads and writes the same path."""
    command = [sys.executable, "-c", KILLED, str(world.disk), str(world.random.randrange(2**32))]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        world.ask()
        time.sleep(world.random.random() * 0.02)
    finally:
        process.kill()
        process.wait()


FAULTS: dict[Fault, int] = {
    flip_bits: 32,
    truncate: 12,
    extend: 4,
    swap_objects: 20,
    wrong_index: 8,
    no_space: 8,
    stalled_disk: 4,
    removed_disk: 4,
    restarted_engine: 3,
    killed_process: 1,
}
"""Faults and how often each is drawn."""


def _rewrite(world: World, change: Callable[[bytearray], bytearray]) -> None:
    """Change a few files, in place or by replacing them."""
    root = world.random.choice((world.disk, world.memory))
    with held(root):
        files = world.object_files(root)
        for path in world.random.sample(files, min(3, len(files))):
            try:
                data = bytes(change(bytearray(path.read_bytes())))
            except FileNotFoundError:
                continue  # a reader has found it damaged, and removes such a file without the lock
            if world.random.random() < 0.5:
                path.write_bytes(data)
            else:
                _replace(path, data)


def _replace(path: Path, data: bytes) -> None:
    part = path.with_name(f".{os.getpid()}")
    part.write_bytes(data)
    part.rename(path)


def _flip(world: World, data: bytearray) -> bytearray:
    for _ in range(world.random.randrange(1, 4) if data else 0):
        data[world.random.randrange(len(data))] ^= 1 << world.random.randrange(8)
    return data
