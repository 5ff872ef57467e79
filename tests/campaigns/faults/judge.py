"""Judge a fault's observations. Pure.

right      HTTP 200, the whole stream, and the text of a plain engine
refused    an error, or a broken stream whose text is the beginning of the right text
wrong      any text that the plain engine would not produce, whole or in part
hang       no end within the bound, which excludes time in which the decode server is stopped
cancelled  the campaign closed the connection; the text until then is right
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from tests.campaigns.faults.trials import Trial

AT_ONCE_S = 2.0
"""Pools should be at their baseline this long after the last end of a request."""


class Outcome(StrEnum):
    RIGHT = "right"
    REFUSED = "refused"
    WRONG = "wrong"
    HANG = "hang"
    CANCELLED = "cancelled"


def judge(trial: Trial) -> Outcome:
    """Return the outcome of one request."""
    expected = trial.question.expected
    if not expected.startswith(trial.text) or (trial.complete and trial.finish == "length" and trial.text != expected):
        return Outcome.WRONG
    if trial.complete and trial.text == expected:
        return Outcome.RIGHT
    if trial.cancelled:
        return Outcome.CANCELLED
    if trial.gave_up or not trial.ended:
        return Outcome.HANG
    return Outcome.REFUSED


@dataclass(frozen=True)
class Pool:
    """One engine's block pool after a fault, in blocks above its baseline.

    ``back_after_s`` counts from the last request's end; None if blocks were still held at the end
    of the observation. ``most`` is the last number held. ``waited_for_replacement`` marks a pool
    that returned after the other, dead, engine had been replaced, ``silent`` an engine that did not
    answer at the end of the observation.
    """

    engine: str
    back_after_s: float | None
    most: int = 0
    waited_for_replacement: bool = False
    silent: bool = False


@dataclass
class Case:
    """All observations of one fault.

    ``dead`` are engines that do not run although the campaign has not killed or has restarted them.
    """

    outcomes: Mapping[Outcome, int]
    dead: Collection[str] = ()
    pools: Sequence[Pool] = ()
    probes: Sequence[Outcome] = ()


def findings(case: Case) -> list[str]:
    """Return the broken promises in words; empty if all were kept."""
    found = []
    if wrong := case.outcomes.get(Outcome.WRONG, 0):
        found.append(f"wrong answer ({wrong})")
    if hang := case.outcomes.get(Outcome.HANG, 0):
        found.append(f"hang ({hang})")
    found += [f"{engine} engine died" for engine in sorted(case.dead)]
    found += [
        f"{pool.engine} hangs" if pool.silent else f"{pool.engine} leaks {pool.most} blocks"
        for pool in case.pools
        if pool.back_after_s is None
    ]
    found += [f"probe {outcome}" for outcome in dict.fromkeys(case.probes) if outcome is not Outcome.RIGHT]
    return found


def late(case: Case) -> list[str]:
    """Return the pools that returned late: blocks held by a lease or a quarantine."""
    return [
        f"{pool.engine} {pool.most} blocks {pool.back_after_s:.0f} s"
        + (" (until the dead one was replaced)" if pool.waited_for_replacement else "")
        for pool in case.pools
        if pool.back_after_s is not None and pool.back_after_s > AT_ONCE_S
    ]
