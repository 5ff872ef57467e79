"""Recent requests of one router replica, for the status page; without prompts and answers."""

import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from actors.telemetry.latency_breakdown import LatencyBreakdown

KEPT = 200
"""Number of requests of all models that a router replica keeps, of about 2 KB each."""

MAX_ID_CHARACTERS = 80
"""Number of characters to which the access log and the status page cut a client's request id."""


@dataclass(frozen=True)
class Pair:
    """Ids of the engines that served a request.

    `prefill` is None for a local request, `decode` is None for an answer of prefill alone.
    """

    prefill: str | None
    decode: str | None


class RecentRequest(NamedTuple):
    """A request whose answer has started, without an error status."""

    request_id: str
    began_at: float
    """Unix time of arrival in seconds, by this host's clock."""
    endpoint: str
    route: str
    reason: str | None
    status: int
    streams: bool
    pair: Pair
    breakdown: LatencyBreakdown

    def describe(self) -> dict[str, Any]:
        """Return the request as JSON values; names of values in milliseconds end with `_ms`."""
        spans = [[span.part, round(span.begin_s * 1e3, 3), round(span.end_s * 1e3, 3)] for span in self.breakdown.spans]
        own = {name: value for name, value in self._asdict().items() if name not in ("pair", "breakdown")}
        return {**own, **asdict(self.pair), "total_ms": round(self.breakdown.total_s * 1e3, 3), "spans_ms": spans}


def now_unix(monotonic_at: float) -> float:
    """Return the Unix time in seconds of a moment on this host's monotonic clock."""
    return time.time() - (time.monotonic() - monotonic_at)


def newest_of(lists: Iterable[Iterable[dict[str, Any]]], most: int) -> list[dict[str, Any]]:
    return sorted((one for some in lists for one in some), key=lambda one: -one["began_at"])[:most]
