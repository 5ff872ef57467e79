"""Plan, when an engine starts, what the store keeps of each KV cache group.

chunk  ``chunk_tokens`` tokens of a request; chunks begin at multiples of ``chunk_tokens``
row    one token, or several that a kernel packs together (``connectors/planning/layout.py``); each
       chunk ends between two rows

Chunks do not depend on the allocator's block size, so engines of different block sizes have the
same objects.

An object *keeps* what a reader needs of a chunk:

full attention     all tokens
sliding window     the last tokens that attention after the chunk's end reads, rounded up
chunked attention  none if attention chunks end at every chunk end, else all tokens
state              the state at the chunk's end
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from connectors.errors import ConfigurationError
from connectors.planning.layout import WINDOWED, Group, GroupKind


@dataclass(frozen=True, slots=True)
class StoredGroup:
    """A group, and the tokens kept of each chunk: 0 for a state or a group without objects."""

    group: Group
    kept_tokens: int

    @property
    def index(self) -> int:
        return self.group.index

    @property
    def is_state(self) -> bool:
        return self.group.kind is GroupKind.STATE

    @property
    def stored(self) -> bool:
        return self.is_state or self.kept_tokens > 0


@dataclass(frozen=True)
class StorePlan:
    """Division of requests into chunks, and what is stored of each KV cache group, by index."""

    chunk_tokens: int
    groups: tuple[StoredGroup, ...]

    @cached_property
    def stored(self) -> tuple[StoredGroup, ...]:
        """The groups that have objects: plans of copies and the virtual layout have only these."""
        return tuple(group for group in self.groups if group.stored)

    @cached_property
    def full_attention(self) -> StorePlan:
        """The plan with full-attention groups only; positions in ``groups`` are not indices."""
        groups = tuple(group for group in self.groups if group.group.kind is GroupKind.FULL)
        return StorePlan(self.chunk_tokens, groups)


def plan_store(groups: Sequence[Group], chunk_tokens: int, max_model_len: int) -> StorePlan:
    """Raises ConfigurationError if ``chunk_tokens`` cannot fit."""
    if not groups:
        raise ConfigurationError("store: the model has no KV cache groups, so there is nothing to store; remove store")
    granule = math.lcm(*(_granule_tokens(group) for group in groups))
    if chunk_tokens % granule:
        raise ConfigurationError(
            f"store: chunk_tokens must be a multiple of {granule} for this model's kernels, not {chunk_tokens}; a "
            "model with states also needs max_num_batched_tokens equal to chunk_tokens"
        )
    plan = StorePlan(chunk_tokens, tuple(StoredGroup(group, _kept(group, chunk_tokens)) for group in groups))
    if not plan.stored:
        raise ConfigurationError(
            f"store: no KV cache group has tokens to store at multiples of {chunk_tokens} tokens; set "
            "chunk_tokens to a value that is not a multiple of the model's attention chunks"
        )
    # vLLM always computes the last token of a request, so a load has at most max_model_len - 1.
    if chunk_tokens >= max_model_len:
        raise ConfigurationError(
            f"store: no prefix can be stored: a chunk has {chunk_tokens} tokens, but max_model_len {max_model_len} "
            f"allows {max_model_len - 1}; reduce chunk_tokens to a multiple of {granule}, or use a max_model_len of at "
            f"least {chunk_tokens + 1}"
        )
    return plan


def _granule_tokens(group: Group) -> int:
    if group.kind is GroupKind.STATE:
        return 1
    return math.lcm(*(group.row_tokens(pages) for pages in group.layers))


def _kept(group: Group, chunk_tokens: int) -> int:
    if group.kind is GroupKind.STATE:
        return 0
    if group.kind not in WINDOWED:
        return chunk_tokens
    assert group.window_tokens is not None
    if group.kind is GroupKind.CHUNKED:
        # If attention chunks end at every chunk end, later tokens read no token before that end.
        return 0 if chunk_tokens % group.window_tokens == 0 else chunk_tokens
    seen, granule = group.window_tokens - 1, _granule_tokens(group)
    # Most block sizes are powers of two too, so that kept tokens and blocks fit (``_fits``).
    kept = 1 << (seen - 1).bit_length() if seen else 0
    kept = min(chunk_tokens, -(-kept // granule) * granule)
    if 0 < kept < chunk_tokens and not _fits(group.block_tokens, kept, chunk_tokens):
        raise ConfigurationError(
            f"store: KV cache group {group.index} has blocks of {group.block_tokens} tokens, which do not fit the "
            f"{kept} tokens kept of each chunk of {chunk_tokens} for a window of {group.window_tokens}; set "
            f"block_size to a divisor of {math.gcd(kept, chunk_tokens)}, or chunk_tokens to at most {kept}"
        )
    return kept


def _fits(block_tokens: int, kept: int, chunk_tokens: int) -> bool:
    """Return whether a load up to a chunk end leaves every block complete for a prefix cache.

    No token after the chunk reads the tokens that a block longer than the kept tokens lacks.
    """
    return chunk_tokens % block_tokens == 0 and (block_tokens >= kept or kept % block_tokens == 0)
