"""The routing decision for one request, and the estimates behind it."""

import json
from typing import NamedTuple

CHEAPER = "cheaper"
"""Usually the route of lower cost. Failing engines and the session count before the cost."""

SHORT = "short_uncached"
"""Decode alone would compute and load fewer tokens than `local_below_tokens`."""

NO_PREFILL = "no_prefill"
"""No prefill engine accepts calls, or this request got no slot on one in `prefill_wait_s`."""

PREFILL_FAILED = "prefill_failed"
"""Prefill rejected this request, or failed it and no attempt, engine or free slot is left.

A late leg or a silent pair counts as a failure.
"""

OTHER_IDENTITY = "other_identity"
"""No prefill engine has the identity of a decode engine, which could not use its KV."""

MOVED = "moved"
"""The stream comes from a stopping decode engine, which sends its KV."""

SEVERAL_CHOICES = "n"
"""A request for several choices, and a prefill engine without `first_token_multiple`.

Decode's prefix cache could not share states or drafts among the choices (docs/decisions/0056).
"""

POLICY = "policy"
"""The policy does not compare local with remote."""

UNSEEN = "unseen"
"""The prefill engines are not known yet, or no decode engine is usable.

The decision lists no engines. The dispatcher takes the least busy ones of each role, or waits.
"""


class Estimate(NamedTuple):
    """Expected cost of one option: of a pair, or of decode alone (`prefill` None)."""

    decode: str
    prefill: str | None
    uncached_tokens: int  # to compute, on prefill or, without it, on decode
    loaded_tokens: int  # to load from the KV store of the same engine
    moved_tokens: int  # whose KV is transferred
    queue_s: float  # wait for other prompts
    compute_s: float  # load and computation of the prompt
    handover_s: float  # from the computed prompt to the first token; 0 without prefill
    decoding_s: float  # of the answer after its first token
    interference_s: float  # delay of other streams on the decode engine, summed

    @property
    def ttft_s(self) -> float:
        return self.queue_s + self.compute_s + self.handover_s


class Decision(NamedTuple):
    """Destination of a request: the engines of each role, best first; empty: the least busy."""

    route: str  # local or remote
    reason: str  # a constant of this module, or why decode serves the whole request
    policy: str
    prompt_tokens: int  # estimated
    decode: tuple[str, ...] = ()
    prefill: tuple[str, ...] = ()  # empty on the local route
    chosen: Estimate | None = None
    other: Estimate | None = None  # best option of the other route

    @property
    def local(self) -> bool:
        return self.route == "local"

    def explain(self) -> str:
        """Return the decision as JSON without its lists of engines; rounded to microseconds."""
        fields: dict[str, object] = dict(zip(self._fields[:4], self[:4], strict=True))
        for name, estimate in (("chosen", self.chosen), ("other", self.other)):
            if estimate is not None:
                fields[name] = _fields(estimate)
        return json.dumps(fields, separators=(",", ":"))


def _fields(estimate: Estimate) -> dict[str, object]:
    numbers = {name: value for name, value in estimate._asdict().items() if value is not None}
    numbers["ttft_s"] = estimate.ttft_s
    return {name: round(value, 6) if isinstance(value, float) else value for name, value in numbers.items()}
