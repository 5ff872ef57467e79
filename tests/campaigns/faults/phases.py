"""Which phase a fault has really hit: by what the client saw and the trace, if the connector keeps one. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tests.campaigns.faults.trips import Trip


def seen(trip: Trip, at: float, events: Iterable[Mapping[str, Any]] = ()) -> str:
    """The phase of ``trip`` at the time ``at``; ``events`` are those of a trace, of any requests.

    Without a trace ``prefill`` and ``waiting for KV`` are all that can be told of what happens inside.
    """
    marks = {name for name, when in trip.marks.items() if when <= at}
    if "ended" in marks:
        return "after the end"
    if "first_token" in marks:
        return "decoding"
    events = list(events)
    traced = bool(events)
    mine = [event for event in events if event["t"] <= at and _concerns(trip, event)]
    names = {event["event"] for event in mine}
    if "received" in names:
        return "waiting to run"
    chunks = [event["tokens"] for event in mine if event["event"] == "chunk"]
    computed = bool(chunks) and max(chunks) >= trip.question.prompt_tokens - 1
    if computed and "offer" in names:
        return "transfer"
    if "decode_sent" in marks and "prefill_answered" in marks:
        return "offering" if mine else "waiting for KV"
    if "prefill_answered" in marks:
        return "between legs"
    if chunks:
        return "between chunks"
    return "queued" if mine or traced else "prefill"


def _concerns(trip: Trip, event: Mapping[str, Any]) -> bool:
    transfer = (trip.params or {}).get("transfer_id", trip.trip_id)
    return event.get("transfer") in (transfer, trip.trip_id) or trip.trip_id in str(event.get("request", ""))
