"""Compute the objects that a step completes or a request needs, and the usable stored prefix.

A request *resumes at token t* if the engine computes it from token t on, and takes the earlier KV
that it needs from its own cache and from objects. Beside a transfer, objects supply only
full-attention KV before t (``StorePlan.full_attention``).

An object is identified by its group and its end token. It keeps the tokens ``[end_token -
kept_tokens, end_token)``, or the state after ``end_token`` tokens.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from connectors.planning.blocks import first_needed_token
from connectors.planning.layout import GroupKind
from connectors.store.planning.chunks import StoredGroup, StorePlan


@dataclass(frozen=True, slots=True, order=True)
class ObjectRef:
    end_token: int
    group: int


def completed_objects(plan: StorePlan, before_tokens: int, after_tokens: int) -> list[ObjectRef]:
    """Return the objects that a step completes, sorted.

    A state exists only between two steps, so ``after_tokens`` must be its object's end.
    """
    ends = resume_points(plan, before_tokens, after_tokens)[::-1]
    return [
        ObjectRef(end, each.index) for end in ends for each in plan.stored if not each.is_state or end == after_tokens
    ]


def needed_objects(plan: StorePlan, start_token: int, end_token: int) -> list[ObjectRef]:
    """Return the objects that a request must load to resume at ``end_token``, sorted.

    A load begins at the start of a block, so it also needs objects of this block's first tokens.
    """
    if start_token >= end_token:
        return []
    return sorted(
        ObjectRef(end, each.index) for each in plan.stored for end in _ends(plan, each, start_token, end_token)
    )


def resume_points(plan: StorePlan, start_token: int, limit_token: int) -> range:
    """Ends of chunks, the largest first."""
    chunk = plan.chunk_tokens
    return range(limit_token // chunk * chunk, start_token, -chunk)


def usable_prefix(plan: StorePlan, present: Set[ObjectRef], start_token: int, limit_token: int) -> int:
    """Return the largest token at which a request can resume; ``start_token`` without one."""
    for group in plan.full_attention.groups:
        limit_token = min(limit_token, _covered(plan, group, present, start_token, limit_token))
    others = _not_full(plan)
    for point in resume_points(plan, start_token, limit_token):
        if all(
            ObjectRef(end, each.index) in present for each in others for end in _ends(plan, each, start_token, point)
        ):
            return point
    return start_token


def possible_objects(plan: StorePlan, start_token: int, limit_token: int) -> list[ObjectRef]:
    points = resume_points(plan, start_token, limit_token)
    refs = set(needed_objects(plan.full_attention, start_token, points[0])) if points else set()
    for group in _not_full(plan):
        refs.update(ObjectRef(end, group.index) for at in points for end in _ends(plan, group, start_token, at))
    return sorted(refs)


def _ends(plan: StorePlan, group: StoredGroup, start_token: int, end_token: int) -> range:
    """Ends of the group's objects that a resume at ``end_token``, the end of a chunk, needs."""
    if group.is_state:
        return range(end_token, end_token + 1)
    block, chunk, first_needed = group.group.block_tokens, plan.chunk_tokens, first_needed_token(group.group, end_token)
    if first_needed >= end_token:
        return range(0)
    first = max(first_needed, start_token) // block * block
    return range((first // chunk + 1) * chunk, end_token + 1, chunk)


def _not_full(plan: StorePlan) -> list[StoredGroup]:
    return [group for group in plan.stored if group.group.kind is not GroupKind.FULL]


def _covered(plan: StorePlan, group: StoredGroup, present: Set[ObjectRef], start_token: int, limit_token: int) -> int:
    for end in _ends(plan, group, start_token, limit_token):
        if ObjectRef(end, group.index) not in present:
            return max(start_token, end - plan.chunk_tokens)
    return limit_token
