"""Plan, when an engine starts, how each KV cache group is divided into stored objects.

chunk  ``chunk_tokens`` tokens of a request; chunks begin at multiples of ``chunk_tokens``
row    one token, or several that a kernel packs together (``connectors/planning/layout.py``)
span   tokens of one group per object: ``chunk_tokens`` for a state, or if chunks end between rows
       in all layers; else the fewest tokens that cover a chunk and are whole rows, with a warning

Spans do not depend on the allocator's block size, so engines of different block sizes have the same
objects.

An object *keeps* the tokens that a reader needs: its whole span; of a sliding window, the last
tokens that attention after the chunk's end reads, rounded up; of chunked attention, nothing if
attention chunks end at every chunk end; of a state, the one at the chunk's end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from connectors.errors import ConfigurationError
from connectors.planning.layout import WINDOWED, Group, GroupKind


@dataclass(frozen=True, slots=True)
class GroupSpans:
    """Span and kept tokens of one group.

    ``kept_tokens``  0 for a state, and for a group without objects
    ``whole``        whether the span exceeds the chunk because rows cannot be cut at chunk ends
    """

    group: Group
    span_tokens: int
    kept_tokens: int
    whole: bool = False

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
    """Spans of each KV cache group, with or without objects, by index; warnings for operators."""

    chunk_tokens: int
    groups: tuple[GroupSpans, ...]
    warnings: tuple[str, ...]

    @cached_property
    def stored(self) -> tuple[GroupSpans, ...]:
        """The groups that have objects: plans of copies and the virtual layout have only these."""
        return tuple(group for group in self.groups if group.stored)

    @cached_property
    def spans(self) -> tuple[int, ...]:
        return tuple(sorted({group.span_tokens for group in self.stored}))

    @cached_property
    def full_attention(self) -> StorePlan:
        """The plan with full-attention groups only; positions in ``groups`` are not indices."""
        groups = tuple(group for group in self.groups if group.group.kind is GroupKind.FULL)
        return StorePlan(self.chunk_tokens, groups, ())

    @cached_property
    def first_tokens(self) -> int:
        """Number of a prompt's first tokens that must be stored before a request can resume."""
        return max(self.spans, default=self.chunk_tokens)

    @cached_property
    def only_chunk_ends(self) -> bool:
        return any(group.is_state or group.kept_tokens < group.span_tokens for group in self.groups)


def plan_store(groups: Sequence[Group], chunk_tokens: int, max_model_len: int) -> StorePlan:
    """Raises ConfigurationError if ``chunk_tokens`` cannot fit."""
    if not groups:
        raise ConfigurationError("store: the model has no KV cache groups, so there is nothing to store; remove store")
    spans = tuple(_spans(group, chunk_tokens) for group in groups)
    plan = StorePlan(chunk_tokens, spans, tuple(_warning(each, chunk_tokens) for each in spans if each.whole))
    if not plan.stored:
        raise ConfigurationError(
            f"store: no KV cache group has tokens to store at multiples of {chunk_tokens} tokens; set "
            "chunk_tokens to a value that is not a multiple of the model's attention chunks"
        )
    # vLLM always computes the last token of a request, so a load has at most max_model_len - 1.
    if plan.first_tokens >= max_model_len:
        raise ConfigurationError(_nothing_fits(plan, max_model_len))
    return plan


def granule_tokens(group: Group) -> int:
    return math.lcm(*(group.row_tokens(pages) for pages in group.layers))


def _spans(group: Group, chunk_tokens: int) -> GroupSpans:
    if group.kind is GroupKind.STATE:
        return GroupSpans(group, chunk_tokens, 0)
    granule = granule_tokens(group)
    if chunk_tokens % granule:
        span = -(-chunk_tokens // granule) * granule
        return GroupSpans(group, span, span, whole=True)
    kept = _kept(group, chunk_tokens, granule)
    if 0 < kept < chunk_tokens and not _fits(group.block_tokens, kept, chunk_tokens):
        raise ConfigurationError(
            f"store: KV cache group {group.index} has blocks of {group.block_tokens} tokens, which do not fit the "
            f"{kept} tokens kept of each chunk of {chunk_tokens} for a window of {group.window_tokens}; set "
            f"block_size to a divisor of {math.gcd(kept, chunk_tokens)}, or chunk_tokens to at most {kept}"
        )
    return GroupSpans(group, chunk_tokens, kept)


def _kept(group: Group, chunk_tokens: int, granule: int) -> int:
    if group.kind not in WINDOWED:
        return chunk_tokens
    assert group.window_tokens is not None
    if group.kind is GroupKind.CHUNKED:
        # If attention chunks end at every chunk end, later tokens read no token before that end.
        return 0 if chunk_tokens % group.window_tokens == 0 else chunk_tokens
    seen = group.window_tokens - 1
    # Most block sizes are powers of two too, so that kept tokens and blocks fit (``_fits``).
    kept = 1 << (seen - 1).bit_length() if seen else 0
    return min(chunk_tokens, -(-kept // granule) * granule)


def _fits(block_tokens: int, kept: int, chunk_tokens: int) -> bool:
    """Return whether a load up to a chunk end leaves every block complete for a prefix cache.

    No token after the chunk reads the tokens that a block longer than the kept tokens lacks.
    """
    return chunk_tokens % block_tokens == 0 and (block_tokens >= kept or kept % block_tokens == 0)


def _warning(spans: GroupSpans, chunk_tokens: int) -> str:
    return (
        f"store: chunk_tokens {chunk_tokens} should be a multiple of the {granule_tokens(spans.group)} tokens that KV "
        f"cache group {spans.index} packs together: its objects have {spans.span_tokens} tokens, and shorter "
        "prefixes are not stored"
    )


def _nothing_fits(plan: StorePlan, max_model_len: int) -> str:
    needed = plan.first_tokens
    largest = next(group for group in plan.stored if group.span_tokens == needed)
    remedy = f"use a max_model_len of at least {needed + 1}"
    if not largest.whole:
        remedy += f", or chunk_tokens of at most {max_model_len - 1}"
    return (
        f"store: no prefix can be stored: KV cache group {largest.index} needs {needed} tokens, but max_model_len "
        f"{max_model_len} allows {max_model_len - 1}; {remedy}"
    )
