"""Digest of the bytes that one pair of ranks moves, computed at each end from its own memory.

Both ends feed the units of a transfer in ascending order, in any number of calls. A *stream* is the
bytes of consecutive pieces of equal length in one layer of one group (``planning/plan.py``), unit
after unit. Each stream has a hash of its own, so the ends may feed layers in any order:

    xxh3_128( for every stream: group, first piece, bytes fed, hash of the stream )

Between two host memories, the hash of a stream is xxh3_128 of its bytes. Otherwise both ends use
the hash of ``device_digest.py``, which each end computes where its KV lies.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import xxhash
from numpy.lib.stride_tricks import as_strided

from connectors.errors import PlanError
from connectors.planning.blocks import Ints
from connectors.planning.layout import EngineLayout
from connectors.planning.plan import GroupPlan, PairPlan, Side

Bytes = npt.NDArray[np.uint8]

# Runs of at least this mean length are hashed in place; shorter runs are gathered first.
_LONG_RUN_BYTES = 16 * 2**10
_GATHER_BYTES = 512 * 2**10


class End(Enum):
    SOURCE = auto()
    TARGET = auto()


class Memory(Protocol):
    num_blocks: int

    def new_digests(self, groups: tuple[GroupStreams, ...], end: End) -> Callable[[], TransferDigest]: ...


class HostMemory:
    def __init__(self, layout: EngineLayout) -> None:
        self.num_blocks = layout.num_blocks
        self._base = min(region.address for region in layout.regions)
        self._span = max(region.end for region in layout.regions) - self._base
        memory = memoryview((ctypes.c_uint8 * self._span).from_address(self._base))
        # From the first region to the last: only pages are read, never the gaps between regions.
        self._bytes: Bytes = np.frombuffer(memory, np.uint8)
        self._rows: dict[int, Bytes] = {}

    def new_stream(self) -> HostStream:
        return HostStream(self)

    def new_digests(self, groups: tuple[GroupStreams, ...], end: End) -> Callable[[], TransferDigest]:
        return lambda: TransferDigest(groups, self.num_blocks, self.new_stream)

    def hash(self, hasher: xxhash.xxh3_128, address: Ints, length: int) -> None:
        if not len(address):
            return
        offset = address - self._base
        starts = np.concatenate(([0], np.flatnonzero(offset[1:] != offset[:-1] + length) + 1))
        if len(address) * length >= _LONG_RUN_BYTES * len(starts):
            counts = np.diff(starts, append=len(address))
            for at, size in zip(offset[starts].tolist(), (counts * length).tolist(), strict=True):
                hasher.update(self._bytes[at : at + size].data)
            return
        rows = self._rows_of(length)
        step = max(1, _GATHER_BYTES // length)
        for first in range(0, len(offset), step):
            hasher.update(rows[offset[first : first + step]].data)

    def _rows_of(self, length: int) -> Bytes:
        """Return a view in which row i is the ``length`` bytes at offset i of ``_bytes``."""
        rows = self._rows.get(length)
        if rows is None:
            shape = (self._span - length + 1, length)
            rows = self._rows[length] = as_strided(self._bytes, shape, (1, 1), writeable=False)
        return rows


class HostStream:
    def __init__(self, memory: HostMemory) -> None:
        self._memory = memory
        self._hasher = xxhash.xxh3_128()

    def feed(self, address: Ints, length: int) -> None:
        self._memory.hash(self._hasher, address, length)

    def digest(self) -> bytes:
        return self._hasher.digest()


@dataclass(frozen=True, slots=True)
class Stream:
    """Pieces ``[first, stop)`` of a group, all of one layer and of ``piece_bytes`` bytes each."""

    first: int
    stop: int
    piece_bytes: int


GroupStreams = tuple[GroupPlan, Side, tuple[Stream, ...]]


def digests(plan: PairPlan, memory: Memory, end: End) -> Callable[[], TransferDigest]:
    """Return a function that creates empty digests, for one end of a pair of ranks."""
    sides = (group.src if end is End.SOURCE else group.dst for group in plan.groups)
    groups = tuple((group, side, _streams(group)) for group, side in zip(plan.groups, sides, strict=True))
    return memory.new_digests(groups, end)


class TransferDigest:
    def __init__(self, groups: tuple[GroupStreams, ...], num_blocks: int, new_stream: Callable[[], Any]) -> None:
        self._groups = groups
        self._num_blocks = num_blocks
        self._hashes = [[new_stream() for _ in streams] for *_, streams in groups]
        self._fed_bytes = [[0 for _ in streams] for *_, streams in groups]

    def add(self, group: int, ids: Ints, parts: Ints, layers: tuple[int, int] | None = None) -> None:
        """Add the bytes of unit ``parts[i]`` in this end's block ``ids[i]``, for every i."""
        if not len(ids):
            return
        if not 0 <= int(ids.min()) <= int(ids.max()) < self._num_blocks:
            raise PlanError(
                f"group {group}: blocks {ids.min()} to {ids.max()} are not all in a pool of {self._num_blocks} blocks"
            )
        plan, _, streams = self._groups[group]
        pieces = plan.pieces_of(layers)
        whole = [n for n, each in enumerate(streams) if pieces.start <= each.first and each.stop <= pieces.stop]
        self._feed(group, whole, pieces, ids, parts)
        for number in whole:
            stream = streams[number]
            self._fed_bytes[group][number] += len(ids) * (stream.stop - stream.first) * stream.piece_bytes

    def _feed(self, group: int, numbers: list[int], pieces: slice, ids: Ints, parts: Ints) -> None:
        _, side, streams = self._groups[group]
        address = side.of(pieces).at(ids, parts)
        for number in numbers:
            stream = streams[number]
            of_stream = address[stream.first - pieces.start : stream.stop - pieces.start].T.ravel()
            self._hashes[group][number].feed(of_stream, stream.piece_bytes)

    def ready(self) -> bool:
        return True

    def hexdigest(self) -> str:
        whole = xxhash.xxh3_128()
        for group, (*_, streams) in enumerate(self._groups):
            for number, stream in enumerate(streams):
                whole.update(np.array([group, stream.first, self._fed_bytes[group][number]], "<i8").data)
                whole.update(self._hashes[group][number].digest())
        return whole.hexdigest()


def _streams(plan: GroupPlan) -> tuple[Stream, ...]:
    if not len(plan.piece_bytes):
        return ()
    changes = (np.diff(plan.layer_of) != 0) | (np.diff(plan.piece_bytes) != 0)
    bounds = [0, *(np.flatnonzero(changes) + 1).tolist(), len(plan.piece_bytes)]
    return tuple(Stream(first, stop, int(plan.piece_bytes[first])) for first, stop in itertools.pairwise(bounds))
