"""Kinds of KV cache between real engines; the campaign `families` runs all of them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.campaigns.shapes.families import FAMILIES, run

pytestmark = pytest.mark.engine


@pytest.mark.parametrize(
    ("name", "tp"),
    [
        # a state whose B and C are complete on every rank; x and the heads are split
        ("falcon_h1", (1, 2)),
        ("deepseek_v2", (2, 1)),  # both producer ranks have the one latent: layers take turns
        ("gemma3_blocks_32_to_64", (1, 2)),
    ],
)
def test_identity(name: str, tp: tuple[int, int], tmp_path: Path) -> None:
    family = FAMILIES[name]
    result = asyncio.run(run(family, tp, family.build(tmp_path / name), 24, tmp_path / "trace.jsonl", tokens=3))
    assert result.good, result
