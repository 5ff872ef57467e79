"""The routing decision for one request, and the estimates behind it."""

from __future__ import annotations

import json
from typing import NamedTuple

CHEAPER = "cheaper"
"""The decision takes the route whose best option sorts first by `choice._keys`; local if equal.

Usually this option costs less. An engine that failed or was silent recently, and the session, count
before the cost.
"""

SHORT = "short_uncached"
"""Decode alone would compute and load fewer tokens than `local_below_tokens`."""

NO_PREFILL = "no_prefill"
"""No prefill engine accepts calls, or this request got no slot on one.

None accepted it within `prefill_wait_s`, or the queue for prefill slots was full.
"""

PREFILL_FAILED = "prefill_failed"
"""Prefill rejected this request, or failed it and no attempt, engine or free slot is left.

A late leg or a silent pair counts as a failure.
"""

OTHER_IDENTITY = "other_identity"
"""No prefill engine that accepts calls has the identity of a decode engine.

Their models, dtypes or releases differ, so decode could not use their KV.
"""

SEVERAL_CHOICES = "n"
"""A request for several choices, and a prefill engine without `first_token_multiple`.

Its model has states or drafts, which decode's prefix cache could not share among the choices. Or
the engine may not sample first tokens for another reason (docs/decisions/0056).
"""

POLICY = "policy"
"""The policy does not compare local with remote."""

UNSEEN = "unseen"
"""The prefill engines are not known yet, or no decode engine is usable.

The decision lists no engines. The dispatcher takes the least busy ones of each role, and waits if
there are none.
"""


class Estimate(NamedTuple):
    """Expected cost of one option, in seconds.

    ``decode``           decode engine
    ``prefill``          prefill engine; None if decode computes the prompt
    ``uncached_tokens``  prompt tokens to compute, on prefill or, without it, on decode
    ``loaded_tokens``    prompt tokens that the same engine is expected to load from its KV store
    ``moved_tokens``     tokens whose KV is transferred
    ``queue_s``          wait for other prompts
    ``compute_s``        load and computation of the prompt
    ``handover_s``       from the computed prompt to the first token; 0 without prefill
    ``decoding_s``       time of the answer after its first token
    ``interference_s``   delay of other streams on the decode engine, summed
    """

    decode: str
    prefill: str | None
    uncached_tokens: int
    loaded_tokens: int
    moved_tokens: int
    queue_s: float
    compute_s: float
    handover_s: float
    decoding_s: float
    interference_s: float

    @property
    def ttft_s(self) -> float:
        return self.queue_s + self.compute_s + self.handover_s


class Decision(NamedTuple):
    """Destination of a request: the engines of each role, best first.

    ``route``          local or remote
    ``reason``         one of the constants of this module, or why decode serves the whole request
    ``policy``         configured policy
    ``prompt_tokens``  estimated prompt tokens
    ``decode``         decode engines; empty: the dispatcher takes the least busy one
    ``prefill``        prefill engines; empty on the local route. Empty on the remote route: the
                       dispatcher takes the least busy one
    ``chosen``         estimate of the chosen option; None if the route has none
    ``other``          best estimate of the other route; None if it has none or `chosen` is None
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
        """Return the decision as JSON without its lists of engines; rounded to microseconds."""
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
    numbers = {name: value for name, value in estimate._asdict().items() if value is not None}
    numbers["ttft_s"] = estimate.ttft_s
    return {name: round(value, 6) if isinstance(value, float) else value for name, value in numbers.items()}
