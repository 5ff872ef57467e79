"""Timings of one call in the engine's actor, on the host's monotonic clock, as in vLLM."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from actors.request import EngineTimings

Arrival = tuple[float, float, bool]
"""Start and end of a transfer on the host's monotonic clock in seconds, and whether it failed."""


@dataclass(frozen=True)
class KvTimes:
    """Times of one request's transfer, and of its lookup in the KV store; None without one."""

    arrival: Arrival | None = None
    fetch: tuple[float, float] | None = None


@dataclass(frozen=True)
class _FirstToken:
    queued_at: float
    scheduled_at: float
    first_token_at: float
    times: KvTimes


class CallTimestamps:
    """Timings of one call, from its arrival or `began_at`."""

    def __init__(self, began_at: float | None = None) -> None:
        self.request_id: str | None = None
        self._sent_at: float | None = None
        self._began_at = time.monotonic() if began_at is None else began_at
        self._first: _FirstToken | None = None
        self._taken = False

    def sent_to_engine(self, request_id: str) -> None:
        """Record that the call's first request is sent to the engine core.

        The core receives requests between two steps. The wait for the end of a step counts as queue
        time; vLLM's own timestamp `queued_ts` excludes it.
        """
        self.request_id = request_id
        self._sent_at = time.monotonic()

    def first_token(self, stats: Any, times: KvTimes) -> None:
        """Record vLLM's RequestStateStats and KV times at the first output; ignore later calls.

        Records nothing without statistics (`disable_log_stats`).
        """
        if self._first is None and stats is not None and stats.queued_ts and stats.scheduled_ts:
            queued_at = self._sent_at or stats.queued_ts
            self._first = _FirstToken(queued_at, stats.scheduled_ts, stats.first_token_ts, times)

    def take_timings(self) -> EngineTimings | None:
        """Return the timings, up to now, at the first call after the first token; else None."""
        first = self._first
        if first is None or self._taken:
            return None
        self._taken = True
        asked_at, ended_at, failed = first.times.arrival or (None, None, False)
        fetch_began_at, fetch_ended_at = first.times.fetch or (None, None)
        return EngineTimings(
            queued_s=first.queued_at - self._began_at,
            scheduled_s=first.scheduled_at - self._began_at,
            first_token_s=first.first_token_at - self._began_at,
            answered_s=time.monotonic() - self._began_at,
            kv_asked_s=None if asked_at is None else asked_at - self._began_at,
            kv_ended_s=None if ended_at is None else ended_at - self._began_at,
            kv_failed=failed,
            store_asked_s=None if fetch_began_at is None else fetch_began_at - self._began_at,
            store_ended_s=None if fetch_ended_at is None else fetch_ended_at - self._began_at,
        )


class KvArrivals:
    """Reports in connector statistics: times of KV transfers and store fetches of running requests,
    and identities of LoRA adapters.
    """

    def __init__(self) -> None:
        self._found: dict[str, KvTimes] = {}
        self._adapters: dict[tuple[int, str], str] = {}

    def expect(self, request_id: str) -> None:
        """Collect the times of this request until `take`; other requests are ignored."""
        self._found[request_id] = KvTimes()

    def take(self, request_id: str | None) -> KvTimes:
        return KvTimes() if request_id is None else self._found.pop(request_id, KvTimes())

    def adapter(self, rank: int, adapter: str) -> str:
        """Return the identity of an adapter's content on a data-parallel rank; empty if unknown."""
        return self._adapters.get((rank, adapter), "")

    def observe(self, connector_stats: Mapping[str, Any] | None, rank: int = 0) -> None:
        stats = connector_stats or {}
        for adapter, identity in (stats.get("adapters") or {}).items():
            self._adapters[rank, adapter] = identity
            if not identity:
                del self._adapters[rank, adapter]
        for request_id, (asked_at, ended_at, failed) in (stats.get("arrivals") or {}).items():
            if request_id in self._found:
                self._found[request_id] = replace(self._found[request_id], arrival=(asked_at, ended_at, bool(failed)))
        for request_id, (began_at, ended_at) in (stats.get("fetches") or {}).items():
            if request_id in self._found:
                self._found[request_id] = replace(self._found[request_id], fetch=(began_at, ended_at))
