"""What was decided for one request, and from which numbers."""

from __future__ import annotations

import json
from dataclasses import dataclass

CHEAPER = "cheaper"
"""The least cost of all options that there were."""

SHORT = "short_uncached"
"""Fewer uncached tokens than `local_below_tokens`."""

NO_PREFILL = "no_prefill"
"""No prefill replica is running, or none took the request in time."""

PREFILL_FAILED = "prefill_failed"
"""Local: prefill legs of this request have broken before decode's first byte, and there is none to try."""

POLICY = "policy"
"""The policy set does not weigh local against remote."""

UNSEEN = "unseen"
"""Remote: it is not known yet which replicas there are, so Serve chooses the least busy of each role."""


@dataclass(frozen=True)
class Estimate:
    """One option's expected seconds. `prefill` None: decode computes the prompt itself."""

    decode: str
    prefill: str | None
    uncached_tokens: int
    """What is to be computed, there or here."""
    moved_tokens: int
    queue_s: float
    compute_s: float
    handover_s: float
    """From the computed prompt to the first token: what of the transfer is not hidden, and decode's step."""
    decoding_s: float
    """All of the answer but its first token."""
    interference_s: float
    """Summed over other streams: how much longer they take for this one."""

    @property
    def ttft_s(self) -> float:
        return self.queue_s + self.compute_s + self.handover_s


@dataclass(frozen=True)
class Decision:
    """Where to send a request: replicas of each role, best first."""

    route: str
    reason: str
    policy: str
    prompt_tokens: int
    decode: tuple[str, ...] = ()
    prefill: tuple[str, ...] = ()
    chosen: Estimate | None = None
    other: Estimate | None = None
    """The best option of the other route."""

    @property
    def local(self) -> bool:
        return self.route == "local"

    def explain(self) -> str:
        """Compact JSON for people and scripts; seconds to the microsecond."""
        told: dict[str, object] = {
            "route": self.route,
            "reason": self.reason,
            "policy": self.policy,
            "prompt_tokens": self.prompt_tokens,
        }
        for name, estimate in (("chosen", self.chosen), ("other", self.other)):
            if estimate is not None:
                told[name] = _told(estimate)
        return json.dumps(told, separators=(",", ":"))


def _told(estimate: Estimate) -> dict[str, object]:
    numbers = {name: value for name, value in vars(estimate).items() if value is not None}
    numbers["ttft_s"] = estimate.ttft_s
    return {name: round(value, 6) if isinstance(value, float) else value for name, value in numbers.items()}
