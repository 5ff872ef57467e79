"""Damage the cached KV of one group of layers, as a faulty KV transfer would.

The groups are those that vLLM makes of the demo model's layers. Each group has its own blocks, so a
transfer can lose or mix up the blocks of one group and deliver the others intact.
"""

from collections.abc import Sequence
from enum import StrEnum

import torch

FULL, SLIDING = "full_attention", "sliding_attention"


class Fault(StrEnum):
    """Kind of damage to the cached keys and values."""

    ZEROED = "zeroed"
    OTHER = "other prompt's"
    """Keys and values of the previous sequence in the batch."""


def kv_groups(layer_types: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Return the layers of each KV cache group that vLLM makes, the group of full layers last.

    Every group has as many layers as there are full ones; vLLM distributes the sliding layers in
    turn.
    """
    full = tuple(index for index, kind in enumerate(layer_types) if kind == FULL)
    sliding = tuple(index for index, kind in enumerate(layer_types) if kind == SLIDING)
    count = len(sliding) // len(full)
    return (*(sliding[first::count] for first in range(count)), full)


def damaged(states: torch.Tensor, fault: Fault, last: int | None = None) -> torch.Tensor:
    """Return cached keys or values [sequences, heads, tokens, width] with all or the `last`
    tokens damaged.
    """
    intact = 0 if last is None else max(states.shape[2] - last, 0)
    kept, part = states[:, :, :intact], states[:, :, intact:]
    return torch.cat([kept, torch.zeros_like(part) if fault is Fault.ZEROED else part.roll(1, dims=0)], dim=2)
