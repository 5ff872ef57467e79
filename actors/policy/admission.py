"""Which requests may wait for an engine, and when a refused one should come back.

Work is counted in tokens of KV, a request's prompt and expected answer: an engine's slots and its
KV cache both free them at a rate that can be measured.
"""

import math

from actors.policy.choice import Estimate

SAFE_SHARE = 0.5
"""Fraction of a deadline that estimates may use up. Admitted requests must not time out."""

CROWDING_SHARE = 0.5
"""Fraction of that for an API key with more than its share; the rest is left for the others."""

LONG_ANSWER = 3.0
"""A request must meet its deadline with an answer that is this many times as long as expected."""

MEASURED_S = 30.0
"""Time constant of the decay of a measured rate, in seconds."""

FEWEST_RELEASES = 8
"""Number of releases from which the measured rate is used; assumptions refuse no request."""

MOST_RETRY_S = 60.0
"""Largest Retry-After, in seconds: OpenAI's clients ignore larger ones."""


def longest_wait_s(
    expected: Estimate | None, first_token_s: float, whole_s: float | None = None, crowds: bool = False
) -> float:
    """Return the estimated wait for a slot up to which a request may queue.

    ``expected``       estimate of the chosen option; None: no costs are known
    ``first_token_s``  time left until the first token; all requests have this limit, so that those
                       with more time do not fill the queue
    ``whole_s``        time left until the whole answer; None: no limit
    ``crowds``         whether the request's API key has more than its share
    """
    share = SAFE_SHARE * (CROWDING_SHARE if crowds else 1.0)
    begins_s = 0.0 if expected is None else expected.compute_s + expected.handover_s
    longest_s = share * first_token_s - begins_s
    if whole_s is not None and expected is not None:
        longest_s = min(longest_s, share * whole_s - begins_s - LONG_ANSWER * expected.decoding_s)
    return max(longest_s, 0.0)


class ServiceRate:
    """Tokens that a role's engines release per second while requests wait, measured."""

    def __init__(self) -> None:
        self._tokens = self._seconds = self._at = 0.0
        self._releases = 0
        self._busy = False

    def observe(self, tokens: int, waiting: bool, now: float) -> None:
        """Record `tokens` released since the last call, and whether requests wait from now on."""
        if self._busy:
            elapsed_s = max(now - self._at, 0.0)
            kept = math.exp(-elapsed_s / MEASURED_S)
            self._tokens = self._tokens * kept + tokens
            self._seconds = self._seconds * kept + elapsed_s
            self._releases += tokens > 0
        self._at, self._busy = now, waiting

    def wait_s(self, tokens: int) -> float:
        """Return the estimated seconds until the engines have released `tokens`; 0: unknown."""
        return tokens * self._seconds / self._tokens if self._releases >= FEWEST_RELEASES else 0.0


class Returns:
    """Times at which refused requests should return: one after the other, at the engines' rate."""

    def __init__(self) -> None:
        self._last_at = 0.0

    def retry_s(self, work_s: float, late_s: float, now: float) -> float:
        """Return Retry-After: `late_s` until the queue is short enough, and `work_s` for each
        request that was refused before, in which the engines serve it.
        """
        self._last_at = min(max(self._last_at, now + late_s) + work_s, now + MOST_RETRY_S)
        return max(self._last_at - now, late_s)

    def forget(self) -> None:
        """Forget the times, once the engines have capacity: some requests have not returned."""
        self._last_at = 0.0
