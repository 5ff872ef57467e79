"""The routing decision for one request, and the estimates behind it."""

from __future__ import annotations

import json
from dataclasses import dataclass

CHEAPER = "cheaper"
"""This option has the lowest cost."""

SHORT = "short_uncached"
"""The prompt has fewer uncached tokens than `local_below_tokens`."""

NO_PREFILL = "no_prefill"
"""No prefill replica is running, or none accepted the request in time."""

PREFILL_FAILED = "prefill_failed"
"""Prefill legs of this request failed before decode's first byte, and no replica is left to try."""

SEVERAL_CHOICES = "n"
"""The prefix cache of decode cannot share a received prompt among several choices."""

POLICY = "policy"
"""The policy does not compare local with remote."""

UNSEEN = "unseen"
"""The running replicas are not known yet, so the least busy ones of each role serve the request."""


@dataclass(frozen=True)
class Estimate:
    """Expected cost of one option, in seconds.

    ``decode``           decode replica
    ``prefill``          prefill replica; None if decode computes the prompt
    ``uncached_tokens``  tokens to compute, on either engine
    ``moved_tokens``     tokens whose KV is transferred
    ``queue_s``          wait for other prompts
    ``compute_s``        computation of the prompt
    ``handover_s``       from the computed prompt to the first token
    ``decoding_s``       answer after its first token
    ``interference_s``   delay of other streams, summed
    """

    decode: str
    prefill: str | None
    uncached_tokens: int
    moved_tokens: int
    queue_s: float
    compute_s: float
    handover_s: float
    decoding_s: float
    interference_s: float

    @property
    def ttft_s(self) -> float:
        return self.queue_s + self.compute_s + self.handover_s


@dataclass(frozen=True)
class Decision:
    """Destination of a request: the replicas of each role, best first.

    ``route``          local or remote
    ``reason``         one of the constants of this module, or why decode serves the whole request
    ``policy``         configured policy
    ``prompt_tokens``  estimated prompt tokens
    ``chosen``         estimate of the chosen option, if estimated
    ``other``          best estimate of the other route
    """

    route: str
    reason: str
    policy: str
    prompt_tokens: int
    decode: tuple[str, ...] = ()
    prefill: tuple[str, ...] = ()
    chosen: Estimate | None = None
    other: Estimate | None = None

    @property
    def local(self) -> bool:
        return self.route == "local"

    def explain(self) -> str:
        """Return the decision as compact JSON, seconds rounded to microseconds."""
        fields: dict[str, object] = {
            "route": self.route,
            "reason": self.reason,
            "policy": self.policy,
            "prompt_tokens": self.prompt_tokens,
        }
        for name, estimate in (("chosen", self.chosen), ("other", self.other)):
            if estimate is not None:
                fields[name] = _fields(estimate)
        return json.dumps(fields, separators=(",", ":"))


def _fields(estimate: Estimate) -> dict[str, object]:
    numbers = {name: value for name, value in vars(estimate).items() if value is not None}
    numbers["ttft_s"] = estimate.ttft_s
    return {name: round(value, 6) if isinstance(value, float) else value for name, value in numbers.items()}
