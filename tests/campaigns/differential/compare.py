"""Differences between two answers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tests.campaigns.differential.answers import Answer, Reply, events_of, joined

LOGPROB = 1e-4
"""Tolerance of a token's logprob: the engines add the same numbers in other batches."""


def differences(single: Answer, service: Answer) -> list[str]:
    """Return one line for each difference of the service from the single server."""
    found = []
    if single.status != service.status:
        found.append(f"status: {single.status} -> {service.status}")
    if single.content_type != service.content_type:
        found.append(f"content-type: {single.content_type!r} -> {service.content_type!r}")
    return found + _differences("", single.says, service.says)


def event_groups(single: Reply, service: Reply) -> list[tuple[int, int]]:
    """Divide two streams into the smallest groups of neighbouring events with equal content.

    Return the numbers of events of both sides by group. vLLM joins outputs that its frontend has
    not read, so timing decides which tokens share an event: (1, 1) are equal events, (2, 1) two
    events that the service has joined. A last group that is not equal has a 0.
    """
    left, right = events_of(single), events_of(service)
    groups: list[tuple[int, int]] = []
    while left or right:
        groups.append(group := _first_group(left, right))
        if not all(group):
            break
        left, right = left[group[0] :], right[group[1] :]
    return groups


def _first_group(left: Sequence[Any], right: Sequence[Any]) -> tuple[int, int]:
    if not left or not right:
        return len(left), len(right)
    if not _differences("", left[0], right[0]):
        return 1, 1
    for both in range(3, len(left) + len(right) + 1):
        for some in range(max(1, both - len(right)), min(len(left), both - 1) + 1):
            if not _differences("", joined(left[:some]), joined(right[: both - some])):
                return some, both - some
    return len(left), 0


def _differences(where: str, one: Any, other: Any) -> list[str]:
    if isinstance(one, dict) and isinstance(other, dict):
        lines = [f"{where}.{key}: {_short(one[key])} -> nothing" for key in one.keys() - other.keys()]
        lines += [f"{where}.{key}: nothing -> {_short(other[key])}" for key in other.keys() - one.keys()]
        for key in sorted(one.keys() & other.keys()):
            lines += _differences(f"{where}.{key}", one[key], other[key])
        return lines
    if isinstance(one, list) and isinstance(other, list):
        if len(one) != len(other):
            return [f"{where}: {len(one)} items -> {len(other)}: {_short(one)} -> {_short(other)}"]
        return [
            line for i, pair in enumerate(zip(one, other, strict=True)) for line in _differences(f"{where}[{i}]", *pair)
        ]
    if isinstance(one, float) and isinstance(other, float):
        return [] if math.isclose(one, other, rel_tol=0, abs_tol=LOGPROB) else [f"{where}: {one!r} -> {other!r}"]
    return [] if type(one) is type(other) and one == other else [f"{where}: {_short(one)} -> {_short(other)}"]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 160 else f"{text[:160]}..."
