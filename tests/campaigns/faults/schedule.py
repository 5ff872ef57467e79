"""The faults of a campaign: a pure function of the seed.

Faults are drawn in rounds. A round has every cell of (family, target, phase, …) as often as its
weight, in an order that the seed shuffles. So any part of a campaign has all kinds, and a fault is
identified by its seed and index.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

PHASES = ("handshake", "queued", "chunks", "between", "offering", "transfer", "decoding")
"""Phases of a request, as far as they can be timed from outside.

handshake  the decode leg of a pair that is not connected; then offering, for the first time
queued     the prefill leg waits behind others
chunks     prefill computes a long prompt
between    prefill has answered, the decode leg has not been sent
offering   the decode leg has just been sent
transfer   the decode leg has been sent; the KV is (for connectors that trace: as in the trace) in
           flight
decoding   the first token has been streamed
"""

REFERENCES = (
    "twice at once",
    "twice in turn",
    "with another prompt",
    "with another prompt, after its own",
    "exchanged between two requests",
    "of an engine that has been restarted",
    "of an engine that has been restarted, with another prompt",
    "after its lease",
    "after its lease, with another prompt",
    "altered engine id",
    "altered host",
    "closed port",
    "foreign port",
    "altered request id",
    "altered token count",
    "altered TP size",
    "block ids shifted",
    "block ids reversed",
    "block ids out of range",
    "a block missing",
    "keys missing",
    "keys of another type",
)


@dataclass(frozen=True)
class Fault:
    """One fault.

    ``part`` is the process of a server's tree that receives the signal; ``resume_s`` None means
    never; ``at`` is 0 to 1, a moment in the phase.
    """

    family: str
    target: str
    part: str
    phase: str
    resume_s: float | None = None
    variant: str = ""
    at_once: bool = False
    at: float = 0.0

    @property
    def what(self) -> str:
        match self.family:
            case "kill":
                return f"SIGKILL {self._victim}"
            case "stop":
                return f"SIGSTOP {self._victim}, {self._resumes}"
            case "cancel":
                return "client closes the connection" + (f" of {self.variant}" if self.variant else "")
            case "reference":
                return f"reference {self.variant}"
        return "no fault"

    @property
    def _victim(self) -> str:
        return self.target if self.part == "tree" else f"{self.target}'s {self.part}"

    @property
    def _resumes(self) -> str:
        if self.resume_s is None:
            return "replaced"
        return "SIGCONT soon" if self.resume_s < 2 else "SIGCONT late"


@dataclass(frozen=True)
class Injection:
    """A fault, or two: ``second`` follows ``first`` after ``delay_s``, in the phase of the first.

    ``seed`` draws all other parameters.
    """

    index: int
    seed: int
    first: Fault
    second: Fault | None = None
    delay_s: float = 0.0

    @property
    def family(self) -> str:
        return "pair" if self.second else self.first.family

    @property
    def what(self) -> str:
        return f"{self.first.what}, then {self.second.what}" if self.second else self.first.what

    @property
    def steps(self) -> list[tuple[Fault, float]]:
        """Return each fault with the seconds since the previous one."""
        return [(self.first, 0.0), *([(self.second, self.delay_s)] if self.second else [])]


SOON_S, LATE_S = (0.2, 1.5), (7.0, 12.0)


def cells(tp_sizes: tuple[int, int]) -> list[tuple[Fault, int]]:
    """Return all kinds of faults and their weights, for these sizes of prefill and decode."""
    found: list[tuple[Fault, int]] = [(Fault("none", "", "", "decoding"), 4)]
    for phase in PHASES:
        for target in ("prefill", "decode"):
            found.append((Fault("kill", target, "tree", phase), 3))
            found.append((Fault("stop", target, "tree", phase, resume_s=SOON_S[0]), 2))
            found.append((Fault("stop", target, "tree", phase, resume_s=LATE_S[0]), 1))
            if phase in ("chunks", "transfer"):
                found.append((Fault("stop", target, "tree", phase, resume_s=None), 1))
                found.append((Fault("kill", target, "core", phase), 1))
        if phase != "handshake":
            found.append((Fault("cancel", "client", "", phase), 4))
            found.append((Fault("cancel", "client", "", phase, variant="all requests"), 1))
    for target, size in zip(("prefill", "decode"), tp_sizes, strict=True):
        if size > 1:
            for phase in ("chunks", "offering", "transfer", "decoding"):
                found += [(Fault("kill", target, f"rank{rank}", phase), 1) for rank in range(size)]
                found.append((Fault("stop", target, f"rank{size - 1}", phase, resume_s=LATE_S[0]), 1))
                found.append((Fault("stop", target, f"rank{size - 1}", phase, resume_s=SOON_S[0]), 1))
            found.append((Fault("stop", target, f"rank{size - 1}", "transfer", resume_s=None), 1))
    found += [(Fault("reference", "client", "", "between", variant=variant), 2) for variant in REFERENCES]
    return found


def schedule(seed: int, tp_sizes: tuple[int, int], pattern: str = "") -> Iterator[Injection]:
    """Yield faults without end; those that do not match ``pattern`` are left out."""
    wanted = re.compile(pattern)
    round_of = [fault for fault, weight in cells(tp_sizes) for _ in range(weight)]
    rng = random.Random(seed)
    index = 0
    while True:
        for drawn in rng.sample(round_of, len(round_of)):
            fault = replace(
                drawn,
                resume_s=_moment(rng, drawn.resume_s),
                at_once=rng.random() < 0.5 and drawn.family != "reference" and drawn.phase != "between",
                at=rng.random(),
            )
            seed_of = rng.getrandbits(32)
            if wanted.search(f"{fault.family} {fault.what} {fault.phase}"):
                yield Injection(index, seed_of, fault)
            index += 1


def _moment(rng: random.Random, resume_s: float | None) -> float | None:
    if resume_s is None:
        return None
    return rng.uniform(*(SOON_S if resume_s < 2 else LATE_S))


# ---- two faults at a time -----------------------------------------------------------------------

AT_ONCE_S, WITHIN_S = 0.05, 1.5
"""Half of the second faults follow in less than AT_ONCE_S, the others in less than WITHIN_S."""


def kinds(tp_sizes: tuple[int, int]) -> list[Fault]:
    """Return the faults that pairs consist of."""
    found = [Fault("cancel", "client", "", "", variant=variant) for variant in ("", "all requests")]
    for target, size in zip(("prefill", "decode"), tp_sizes, strict=True):
        rank = f"rank{size - 1}"
        found += [Fault("kill", target, part, "") for part in ("tree", "core", rank)]
        found += [Fault("stop", target, "tree", "", resume_s=soonest) for soonest in (SOON_S[0], LATE_S[0], None)]
        found.append(Fault("stop", target, rank, "", resume_s=LATE_S[0]))
    return found


def pair_cells(tp_sizes: tuple[int, int]) -> list[tuple[Fault, Fault]]:
    """Return all ordered pairs of kinds with different victims."""

    def victim(fault: Fault) -> tuple[str, str, str]:
        return fault.family, fault.target, fault.part

    every = kinds(tp_sizes)
    return [(first, second) for first in every for second in every if victim(first) != victim(second)]


def _hard(first: Fault, second: Fault) -> bool:
    """Return whether a write may arrive late: a stopped rank with a killed core."""
    both = {(each.family, each.target, each.part.rstrip("0123456789")) for each in (first, second)}
    return both == {("stop", "prefill", "rank"), ("kill", "prefill", "core")}


def pairs(seed: int, tp_sizes: tuple[int, int]) -> Iterator[Injection]:
    """Yield pairs without end, hard ones first in each round.

    The second fault starts during the first one, or soon after it.
    """
    round_of, rng, index = pair_cells(tp_sizes), random.Random(seed), 0
    while True:
        drawn = rng.sample(round_of, len(round_of))
        for first, second in sorted(drawn, key=lambda pair: not _hard(*pair)):
            phase = "transfer" if _hard(first, second) else rng.choice(PHASES)
            at_once = rng.random() < 0.5 and phase != "between"
            first = replace(first, phase=phase, resume_s=_moment(rng, first.resume_s), at_once=at_once, at=rng.random())
            second = replace(second, phase=phase, resume_s=_moment(rng, second.resume_s))
            delay_s = rng.uniform(0, AT_ONCE_S if rng.random() < 0.5 else WITHIN_S)
            yield Injection(index, rng.getrandbits(32), first, second, delay_s)
            index += 1
