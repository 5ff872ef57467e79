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
    never; ``at`` is 0 to 1, a moment in the phase. ``seed`` draws all other parameters.
    """

    index: int
    family: str
    target: str
    part: str
    phase: str
    resume_s: float | None = None
    variant: str = ""
    at_once: bool = False
    at: float = 0.0
    seed: int = 0

    @property
    def what(self) -> str:
        """Description of the fault in a report."""
        match self.family:
            case "kill":
                return f"SIGKILL {self._victim}"
            case "stop":
                return f"SIGSTOP {self._victim}, {self._resumes}"
            case "cancel":
                return "client closes the connection" + (f" of {self.variant}" if self.variant else "")
            case "reference":
                return f"reference {self.variant}"
            case "cut":
                return f"link cut, {'mended soon' if self._soon else 'mended late'}"
        return "no fault"

    @property
    def brief(self) -> str:
        """Name of the fault in a pair."""
        return self.what.replace("client closes the connection", "cancel").replace("cancel of", "cancel")

    @property
    def steps(self) -> tuple[tuple[Fault, float], ...]:
        """Return the fault's parts and the delay of each after the previous one: itself."""
        return ((self, 0.0),)

    @property
    def _victim(self) -> str:
        return self.target if self.part == "tree" else f"{self.target}'s {self.part}"

    @property
    def _resumes(self) -> str:
        if self.resume_s is None:
            return "replaced"
        return "SIGCONT soon" if self._soon else "SIGCONT late"

    @property
    def _soon(self) -> bool:
        return self.resume_s is not None and self.resume_s < 2


SOON_S, LATE_S = (0.2, 1.5), (7.0, 12.0)


def cells(tp_sizes: tuple[int, int]) -> list[tuple[Fault, int]]:
    """Return all kinds of faults and their weights, for these tensor-parallel sizes of prefill
    and decode.
    """
    found: list[tuple[Fault, int]] = [(Fault(0, "none", "", "", "decoding"), 4)]
    for phase in PHASES:
        for target in ("prefill", "decode"):
            found.append((Fault(0, "kill", target, "tree", phase), 3))
            found.append((Fault(0, "stop", target, "tree", phase, resume_s=SOON_S[0]), 2))
            found.append((Fault(0, "stop", target, "tree", phase, resume_s=LATE_S[0]), 1))
            if phase in ("chunks", "transfer"):
                found.append((Fault(0, "stop", target, "tree", phase, resume_s=None), 1))
                found.append((Fault(0, "kill", target, "core", phase), 1))
        if phase != "handshake":
            found.append((Fault(0, "cancel", "client", "", phase), 4))
            found.append((Fault(0, "cancel", "client", "", phase, variant="all requests"), 1))
    for target, size in zip(("prefill", "decode"), tp_sizes, strict=True):
        if size > 1:
            for phase in ("chunks", "offering", "transfer", "decoding"):
                found += [(Fault(0, "kill", target, f"rank{rank}", phase), 1) for rank in range(size)]
                found.append((Fault(0, "stop", target, f"rank{size - 1}", phase, resume_s=LATE_S[0]), 1))
                found.append((Fault(0, "stop", target, f"rank{size - 1}", phase, resume_s=SOON_S[0]), 1))
            found.append((Fault(0, "stop", target, f"rank{size - 1}", "transfer", resume_s=None), 1))
    found += [(Fault(0, "reference", "client", "", "between", variant=variant), 2) for variant in REFERENCES]
    return found


def schedule(seed: int, tp_sizes: tuple[int, int], pattern: str = "") -> Iterator[Fault]:
    """Yield faults without end: those whose family, row or phase matches ``pattern``, with
    unchanged numbers.
    """
    wanted = re.compile(pattern)
    round_of = [fault for fault, weight in cells(tp_sizes) for _ in range(weight)]
    rng = random.Random(seed)
    index = 0
    while True:
        for drawn in rng.sample(round_of, len(round_of)):
            fault = replace(
                drawn,
                index=index,
                resume_s=_moment(rng, drawn.resume_s),
                at_once=rng.random() < 0.5 and drawn.family != "reference" and drawn.phase != "between",
                at=rng.random(),
                seed=rng.getrandbits(32),
            )
            if wanted.search(f"{fault.family} {fault.what} {fault.phase}"):
                yield fault
            index += 1


def _moment(rng: random.Random, resume_s: float | None) -> float | None:
    if resume_s is None:
        return None
    return rng.uniform(*(SOON_S if resume_s < 2 else LATE_S))
