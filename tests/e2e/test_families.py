"""Every kind of KV cache between real engines: a cut of ``make families``, which runs all of them at all sizes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.campaigns.shapes.families import FAMILIES, run

pytestmark = pytest.mark.engine


@pytest.mark.parametrize(
    ("name", "tp"),
    [
        ("falcon_h1", (1, 2)),  # a state whose B and C are whole on every rank, x and the heads split
        ("deepseek_v2", (2, 1)),  # one latent on both producer ranks: layers take turns
        ("gemma3_blocks_32_to_64", (1, 2)),
    ],
)
def test_identity(name: str, tp: tuple[int, int], tmp_path: Path) -> None:
    """Tokens and logprobs are those of one engine, all KV is moved, and nothing leaks."""
    family = FAMILIES[name]
    result = asyncio.run(run(family, tp, family.build(tmp_path / name), 24, tmp_path / "trace.jsonl"))
    assert result.identity.wrong == ()
    assert result.moved == result.movable
    assert result.clean
