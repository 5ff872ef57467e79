"""The decision for one request and the numbers behind it."""

from __future__ import annotations

import json
from dataclasses import dataclass

CHEAPER = "cheaper"
"""Lowest cost of all options."""

SHORT = "short_uncached"
"""Fewer uncached tokens than `local_below_tokens`."""

NO_PREFILL = "no_prefill"
"""No prefill replica is running, or none accepted the request in time."""

PREFILL_FAILED = "prefill_failed"
"""Local: prefill legs of this request failed before decode's first byte, and no replica is left to
try."""

POLICY = "policy"
"""The policy does not compare local with remote."""

UNSEEN = "unseen"
"""Remote: the running replicas are not known yet, so the least busy of each role serve the request."""


@dataclass(frozen=True)
class Estimate:
    """Expected seconds of one option. `prefill` is None when decode computes the prompt itself."""

    decode: str
    prefill: str | None
    uncached_tokens: int
    """Tokens to be computed, on either engine."""
    moved_tokens: int
    queue_s: float
    compute_s: float
    handover_s: float
    """From the computed prompt to the first token: the exposed part of the transfer, and decode's
    step."""
    decoding_s: float
    """Time for the answer after its first token."""
    interference_s: float
    """Delay of other streams, summed."""

    @property
    def ttft_s(self) -> float:
        return self.queue_s + self.compute_s + self.handover_s


@dataclass(frozen=True)
class Decision:
    """Destination of a request: replicas of each role, best first."""

    route: str
    reason: str
    policy: str
    prompt_tokens: int
    decode: tuple[str, ...] = ()
    prefill: tuple[str, ...] = ()
    chosen: Estimate | None = None
    other: Estimate | None = None
    """Best option of the other route."""

    @property
    def local(self) -> bool:
        return self.route == "local"

    def explain(self) -> str:
        """Return the decision as compact JSON; seconds to the microsecond."""
        fields: dict[str, object] = {
            "route": self.route,
            "reason": self.reason,
            "policy": self.policy,
            "prompt_tokens": self.prompt_tokens,
        }
        for name, estimate in (("chosen", self.chosen), ("other", self.other)):
            if estimate is not None:
                fields[name] = _estimate_fields(estimate)
        return json.dumps(fields, separators=(",", ":"))


def _estimate_fields(estimate: Estimate) -> dict[str, object]:
    numbers = {name: value for name, value in vars(estimate).items() if value is not None}
    numbers["ttft_s"] = estimate.ttft_s
    return {name: round(value, 6) if isinstance(value, float) else value for name, value in numbers.items()}
