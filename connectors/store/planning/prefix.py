"""Compute the objects that a step completes or a request needs, and the usable stored prefix.

A request *resumes at token t* if the engine computes it from token t on, and takes the earlier KV
that it needs from its own cache and from objects. Beside a transfer, objects supply only
full-attention KV before t (``StorePlan.full_attention``).

An object is identified by its group and its end token. It keeps the tokens ``[end_token -
kept_tokens, end_token)``, or the state after ``end_token`` tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass

from connectors.planning.blocks import first_needed_token
from connectors.planning.layout import GroupKind
from connectors.store.planning.spans import GroupSpans, StorePlan


@dataclass(frozen=True, slots=True, order=True)
class ObjectRef:
    end_token: int
    group: int


def completed_objects(plan: StorePlan, before_tokens: int, after_tokens: int) -> list[ObjectRef]:
    """Return the objects that a step completes, sorted.

    A state exists only between two steps, so ``after_tokens`` must be its object's end.
    """
    refs = []
    for group in plan.stored:
        if group.is_state:
            if before_tokens < after_tokens and after_tokens % group.span_tokens == 0:
                refs.append(ObjectRef(after_tokens, group.index))
            continue
        first = before_tokens // group.span_tokens + 1
        refs += [
            ObjectRef(number * group.span_tokens, group.index)
            for number in range(first, after_tokens // group.span_tokens + 1)
        ]
    return sorted(refs)


def needed_objects(plan: StorePlan, start_token: int, end_token: int) -> list[ObjectRef]:
    """Return the objects that a request must load to resume at ``end_token``, sorted.

    A load begins at the start of a block, so it also needs objects of this block's first tokens.
    """
    refs = [
        ObjectRef(end, group.index)
        for group in plan.stored
        if start_token < end_token
        for end in _needed_ends(group, start_token, end_token)
    ]
    return sorted(refs)


def _needed_ends(group: GroupSpans, start_token: int, end_token: int) -> Iterator[int]:
    if group.is_state:
        yield end_token
        return
    first_needed = first_needed_token(group.group, end_token)
    if first_needed >= end_token:
        return
    block = group.group.block_tokens
    first = max(first_needed // block * block, start_token // block * block)
    span = group.span_tokens
    yield from range((first // span + 1) * span, -(-end_token // span) * span + 1, span)


def resume_points(plan: StorePlan, start_token: int, limit_token: int) -> Iterator[int]:
    """The largest first: ends of chunks and, unless ``only_chunk_ends``, of all groups' spans."""
    chunk = plan.chunk_tokens
    points = set(range((start_token // chunk + 1) * chunk, limit_token + 1, chunk))
    if not plan.only_chunk_ends:
        for group in plan.groups:
            span = group.span_tokens
            points |= set(range((start_token // span + 1) * span, limit_token + 1, span))
    yield from sorted(points, reverse=True)


def usable_prefix(plan: StorePlan, present: Set[ObjectRef], start_token: int, limit_token: int) -> int:
    """Return the largest token at which a request can resume; ``start_token`` without one."""
    for group in plan.full_attention.groups:
        limit_token = min(limit_token, _covered(group, present, start_token, limit_token))
    others = _not_full(plan)
    for point in resume_points(plan, start_token, limit_token):
        if all(ObjectRef(end, g.index) in present for g in others for end in _needed_ends(g, start_token, point)):
            return point
    return start_token


def possible_objects(plan: StorePlan, start_token: int, limit_token: int) -> list[ObjectRef]:
    points = list(resume_points(plan, start_token, limit_token))
    refs = set(needed_objects(plan.full_attention, start_token, points[0])) if points else set()
    for group in _not_full(plan):
        refs.update(ObjectRef(end, group.index) for point in points for end in _needed_ends(group, start_token, point))
    return sorted(refs)


def _not_full(plan: StorePlan) -> list[GroupSpans]:
    return [group for group in plan.stored if group.group.kind is not GroupKind.FULL]


def _covered(group: GroupSpans, present: Set[ObjectRef], start_token: int, limit_token: int) -> int:
    for end in _needed_ends(group, start_token, limit_token):
        if ObjectRef(end, group.index) not in present:
            return max(start_token, end - group.span_tokens)
    return limit_token
