"""Shape of a pair of servers: parallel sizes of each side, and speculative decoding."""

from __future__ import annotations

import json
from dataclasses import dataclass

Sizes = tuple[int, int]

SPECULATION = [
    "--speculative-config",
    json.dumps({"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}),
]
"""Server arguments for n-gram speculation: prompts of the campaign repeat tokens."""


@dataclass(frozen=True)
class Shape:
    """Tensor-parallel and data-parallel sizes of prefill and decode.

    ``drafts``  whether both servers use speculative decoding
    """

    tp: Sizes = (1, 1)
    dp: Sizes = (1, 1)
    drafts: bool = False

    @property
    def workers(self) -> Sizes:
        """Number of worker processes of prefill and of decode."""
        return self.tp[0] * self.dp[0], self.tp[1] * self.dp[1]

    @property
    def options(self) -> str:
        """Return the campaign's command-line options for this shape, without ``--tp`` itself."""
        parts = ["{}:{}".format(*self.tp)]
        if self.dp != (1, 1):
            parts.append("--dp {}:{}".format(*self.dp))
        if self.drafts:
            parts.append("--speculation")
        return " ".join(parts)
