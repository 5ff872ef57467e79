"""Takes one call's times in the engine's actor, which shares its host's monotonic clock with the engine."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from actors.request import EngineTimings

Arrival = tuple[float, float, bool]
"""When KV from elsewhere was asked for, when that ended, and whether it failed; on the host's monotonic clock."""


@dataclass(frozen=True)
class _FirstToken:
    queued_at: float
    scheduled_at: float
    first_token_at: float
    arrival: Arrival | None


class CallTimestamps:
    """Begins when the call reaches the actor; `timings` are known with the first token, and told once."""

    def __init__(self) -> None:
        self.request_id: str | None = None
        """The engine's own id of the call's request; of several, the first."""
        self._handed_at: float | None = None
        self._began_at = time.monotonic()
        self._first: _FirstToken | None = None
        self._told = False

    def handed(self, request_id: str) -> None:
        """The request goes to the engine's process now, which takes it from its inbox between two steps: the wait there
        is one for the scheduler, which dates the request later."""
        self.request_id = request_id
        self._handed_at = time.monotonic()

    def first_token(self, stats: Any, arrival: Arrival | None) -> None:
        """Note what vLLM's RequestStateStats say with the first output; later ones count for nothing.

        Without statistics (`disable_log_stats`) there is nothing to note.
        """
        if self._first is None and stats is not None and stats.queued_ts and stats.scheduled_ts:
            queued_at = self._handed_at or stats.queued_ts
            self._first = _FirstToken(queued_at, stats.scheduled_ts, stats.first_token_ts, arrival)

    def tell(self) -> EngineTimings | None:
        """The timings for the answer that leaves now; None before the first token, and after the first time."""
        first = self._first
        if first is None or self._told:
            return None
        self._told = True
        asked_at, ended_at, failed = first.arrival or (None, None, False)
        return EngineTimings(
            queued_s=first.queued_at - self._began_at,
            scheduled_s=first.scheduled_at - self._began_at,
            first_token_s=first.first_token_at - self._began_at,
            answered_s=time.monotonic() - self._began_at,
            kv_asked_s=None if asked_at is None else asked_at - self._began_at,
            kv_ended_s=None if ended_at is None else ended_at - self._began_at,
            kv_failed=failed,
        )


class KvArrivals:
    """When the KV of running requests arrived, out of the connector's statistics. Others' are not kept."""

    def __init__(self) -> None:
        self._found: dict[str, Arrival | None] = {}

    def expect(self, request_id: str) -> None:
        """Keep what is said of this request until `take`."""
        self._found[request_id] = None

    def take(self, request_id: str | None) -> Arrival | None:
        """What is known; nothing is kept of it."""
        return None if request_id is None else self._found.pop(request_id, None)

    def observe(self, connector_stats: Mapping[str, Any] | None) -> None:
        """What the connector reports of one step (`TandemStats.data`); another connector's says nothing of arrivals."""
        for request_id, (asked_at, ended_at, failed) in ((connector_stats or {}).get("arrivals") or {}).items():
            if request_id in self._found:
                self._found[request_id] = (asked_at, ended_at, bool(failed))
