"""Copies of runs, long and short, equal one memmove each."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from connectors.planning.descriptors import Runs
from connectors.store.copying import copy_runs


@pytest.mark.parametrize("seed", range(5))
def test_runs_of_any_length_are_copied(seed: int) -> None:
    rng = np.random.default_rng(seed)
    source, target = rng.integers(0, 256, 1 << 20, np.uint8), np.zeros(1 << 20, np.uint8)
    lengths = rng.choice([1, 24, 64, 500, 20_000], 60)
    places = rng.permutation(60)
    src = source.ctypes.data + rng.integers(0, (1 << 20) - 20_000, 60)
    dst = target.ctypes.data + places * 17_000
    lengths = np.minimum(lengths, 17_000).astype(np.int64)
    expected = np.zeros_like(target)
    for to, at, length in zip(dst.tolist(), src.tolist(), lengths.tolist(), strict=True):
        ctypes.memmove(expected.ctypes.data + to - target.ctypes.data, at, length)
    copy_runs(Runs(src.astype(np.int64), dst.astype(np.int64), lengths))
    assert np.array_equal(target, expected)
