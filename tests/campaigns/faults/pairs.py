"""Draw pairs of faults and their delay: a pure function of the seed.

A round has every ordered pair of kinds once, and known difficult ones HARD_WEIGHT times, in an
order that the seed shuffles. The second fault starts during the first one, or soon after its end.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from tests.campaigns.faults.schedule import LATE_S, PHASES, SOON_S, Fault

AT_ONCE_S, WITHIN_S = 0.05, 1.5
"""Half of the second faults follow in less than AT_ONCE_S, the others in less than WITHIN_S."""

HARD_WEIGHT = 6


@dataclass(frozen=True)
class FaultPair:
    """``second`` follows ``first`` after ``delay_s``; the phase is that of the first."""

    index: int
    first: Fault
    second: Fault
    delay_s: float
    seed: int

    family = "pair"

    @property
    def what(self) -> str:
        return f"{self.first.brief}, then {self.second.brief}"

    @property
    def phase(self) -> str:
        return self.first.phase

    @property
    def at_once(self) -> bool:
        return self.first.at_once

    @property
    def steps(self) -> tuple[tuple[Fault, float], ...]:
        """Return each fault with the seconds since the previous one."""
        return ((self.first, 0.0), (self.second, self.delay_s))


def kinds(tp_sizes: tuple[int, int], link: bool) -> list[Fault]:
    """Return the faults that pairs consist of; cuts only with a ``link``."""
    found = [
        Fault(0, "cancel", "client", "", ""),
        Fault(0, "cancel", "client", "", "", variant="all requests"),
    ]
    for target, size in zip(("prefill", "decode"), tp_sizes, strict=True):
        found += [Fault(0, "kill", target, part, "") for part in ("tree", "core", f"rank{size - 1}")]
        found += [Fault(0, "stop", target, "tree", "", resume_s=soonest) for soonest in (SOON_S[0], LATE_S[0])]
        found.append(Fault(0, "stop", target, f"rank{size - 1}", "", resume_s=LATE_S[0]))
        found.append(Fault(0, "stop", target, "tree", "", resume_s=None))
    if link:
        found += [Fault(0, "cut", "link", "", "", resume_s=soonest) for soonest in (SOON_S[0], LATE_S[0])]
    return found


def cells(tp_sizes: tuple[int, int], link: bool) -> list[tuple[Fault, Fault]]:
    """Return all ordered pairs of different kinds, the hard ones HARD_WEIGHT times."""
    every = kinds(tp_sizes, link)
    pairs = [(first, second) for first in every for second in every if _fit(first, second)]
    hard = [pair for pair in pairs if _hard(*pair)]
    return pairs + hard * (HARD_WEIGHT - 1)


def _fit(first: Fault, second: Fault) -> bool:
    """Return whether two of one family have different victims."""
    return (first.family, first.target, first.part) != (second.family, second.target, second.part)


def _hard(first: Fault, second: Fault) -> bool:
    """Return whether a write may arrive late: a stopped rank with a killed core, or a cut link
    and a cancelled request.
    """
    both = {(each.family, each.target, each.part.rstrip("0123456789")) for each in (first, second)}
    stopped_and_killed = both == {("stop", "prefill", "rank"), ("kill", "prefill", "core")}
    return stopped_and_killed or {family for family, _, _ in both} == {"cut", "cancel"}


def pairs(seed: int, tp_sizes: tuple[int, int], link: bool) -> Iterator[FaultPair]:
    """Yield pairs without end."""
    round_of = cells(tp_sizes, link)
    rng = random.Random(seed)
    index = 0
    while True:
        for first, second in rng.sample(round_of, len(round_of)):
            phase = rng.choice(PHASES)
            at_once = rng.random() < 0.5 and phase != "between"
            yield FaultPair(
                index,
                replace(first, phase=phase, resume_s=_moment(rng, first), at_once=at_once, at=rng.random()),
                replace(second, phase=phase, resume_s=_moment(rng, second)),
                rng.uniform(0, AT_ONCE_S if rng.random() < 0.5 else WITHIN_S),
                rng.getrandbits(32),
            )
            index += 1


def _moment(rng: random.Random, fault: Fault) -> float | None:
    if fault.resume_s is None:
        return None
    return rng.uniform(*(SOON_S if fault.resume_s < 2 else LATE_S))
