"""Differences between two answers."""

from __future__ import annotations

import math
from typing import Any

from tests.campaigns.differential.answers import Answer, Reply, events_of

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


def same_events(single: Reply, service: Reply) -> bool:
    """Return whether two streams are equal event for event.

    Timing decides how many tokens an event has: vLLM joins outputs that its frontend has not read.
    """
    return not _differences("", events_of(single), events_of(service))


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
