"""Decide which requests may wait for an engine, and when a refused client should retry.

Work is counted in tokens of KV, of prompt and expected answer: whether slots or the KV cache are
scarce, engines release them at a rate that can be measured.
"""

import math
from typing import NamedTuple

from actors.policy.choice import Estimate

SAFE_SHARE = 0.5
"""Fraction of a deadline that estimates may use; the rest absorbs their errors."""

CROWDING_SHARE = 0.5
"""Factor on SAFE_SHARE for an API key with more than its share of the ongoing requests."""

LONG_ANSWER = 3.0
"""A request must meet its deadline with an answer that is this many times as long as expected."""

LEAST_WAIT_S = 1.0
"""Every request may wait this long: whatever is expected of it, it may still be served in time."""

MEASURED_S = 30.0
"""Time constant of the decay of a measured rate, in seconds."""

FEWEST_RELEASES = 8
"""Number of releases, while requests wait, from which the measured rate is used."""

MOST_RETRY_S = 60.0
"""Limit in seconds of the spacing by Retry-After: OpenAI's clients ignore larger values."""


class KvCache(NamedTuple):
    """KV cache of an engine, as the engine announces it. All its groups take blocks of one pool."""

    tokens: int  # capacity for requests of the greatest length, as in vLLM's log
    blocks: int
    groups: tuple[tuple[int, int], ...]  # tokens per block; tokens that a sequence keeps, 0: all

    def share(self, tokens: int, used: int, answers: int) -> int:
        """Return the part of ``self.tokens`` that a request takes.

        A window or state takes up to a fixed number of blocks, so a short request counts as more
        tokens than it has.

        ``tokens``   of its prompt and all its answers
        ``used``     of its prefix, in blocks that admitted requests hold already
        ``answers``  number of its sequences, which share the blocks of the prompt
        """
        blocks = 0
        for block_tokens, kept_tokens in self.groups:
            all_blocks = math.ceil(tokens / block_tokens)
            kept = (math.ceil(kept_tokens / block_tokens) + 1) * answers
            blocks += min(max(all_blocks, answers), kept) if kept_tokens else all_blocks - used // block_tokens
        return math.ceil(blocks * self.tokens / self.blocks)


def longest_wait_s(
    expected: Estimate | None, first_token_s: float, whole_s: float | None = None, crowds: bool = False
) -> float:
    """Return the estimated wait for a slot up to which a request may queue.

    ``expected``       estimate of the chosen option; None: no costs are known
    ``first_token_s``  time left until the first token; also limits requests that are not streamed,
                       which would fill the queue otherwise
    ``whole_s``        time left until the whole answer; None: no limit
    ``crowds``         whether the request's API key has more than its share
    """
    share = SAFE_SHARE * (CROWDING_SHARE if crowds else 1.0)
    begins_s = 0.0 if expected is None else expected.compute_s + expected.handover_s
    longest_s = share * first_token_s - begins_s
    if whole_s is not None and expected is not None:
        longest_s = min(longest_s, share * whole_s - begins_s - LONG_ANSWER * expected.decoding_s)
    return max(longest_s, LEAST_WAIT_S)


class ServiceRate:
    """Measured tokens that a role's engines release per second while requests wait."""

    def __init__(self) -> None:
        self._tokens = self._seconds = self._since_s = self._at = self._measured_at = 0.0
        self._releases = 0
        self._busy = False

    def observe(self, tokens: int, waiting: bool, now: float) -> None:
        """Record `tokens` released since the last call, and whether requests wait from now on."""
        if self._busy:
            self._since_s, self._measured_at = self._not_released_s(now), now
            if tokens > 0:
                # Only a release makes earlier ones count less: else the estimate would grow
                # exponentially while engines release nothing.
                kept = math.exp(-self._since_s / MEASURED_S)
                self._tokens = self._tokens * kept + tokens
                self._seconds = self._seconds * kept + self._since_s
                self._since_s = 0.0
                self._releases += 1
        elif tokens > 0:
            self._since_s = 0.0
        self._at, self._busy = now, waiting

    def wait_s(self, tokens: int, now: float) -> float:
        """Return the estimated seconds until the engines have released `tokens`; 0: unknown.

        Also 0 once no request has waited for MEASURED_S: the next one may wait, so refusals end
        with the overload.
        """
        old = not self._busy and now - self._measured_at > MEASURED_S
        if old or self._releases < FEWEST_RELEASES:
            return 0.0
        return tokens * (self._seconds + self._not_released_s(now)) / self._tokens

    def _not_released_s(self, now: float) -> float:
        return self._since_s + (max(now - self._at, 0.0) if self._busy else 0.0)


class Returns:
    """Times at which refused requests should retry, spaced by the time to serve each."""

    def __init__(self) -> None:
        self._last_at = 0.0

    def retry_s(self, work_s: float, late_s: float, now: float) -> float:
        """Return the seconds until a refused request should retry, which may exceed MOST_RETRY_S.

        ``work_s``  time in which the engines serve this request
        ``late_s``  time until the queue is short enough
        """
        self._last_at = min(max(self._last_at, now + late_s) + work_s, now + MOST_RETRY_S)
        return max(self._last_at - now, late_s)

    def forget(self) -> None:
        """Start anew once the engines have capacity: some clients never retry."""
        self._last_at = 0.0
