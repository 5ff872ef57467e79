"""The phase in which a fault occurred: from the client's timestamps and the connector's trace.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tests.campaigns.faults.trials import Trial


def seen(trial: Trial, at: float, events: Iterable[Mapping[str, Any]] = ()) -> str:
    """Return the phase of ``trial`` at the time ``at``; ``events`` are those of a trace, of any
    requests.

    Without a trace, ``prefill`` and ``waiting for KV`` are the only observable phases.
    """
    timestamps = {name for name, when in trial.timestamps.items() if when <= at}
    if "ended" in timestamps:
        return "after the end"
    if "first_token" in timestamps:
        return "decoding"
    events = list(events)
    traced = bool(events)
    mine = [event for event in events if event["t"] <= at and _concerns(trial, event)]
    names = {event["event"] for event in mine}
    if "received" in names:
        return "waiting to run"
    chunks = [event["tokens"] for event in mine if event["event"] == "chunk"]
    computed = bool(chunks) and max(chunks) >= trial.question.prompt_tokens - 1
    if computed and "offer" in names:
        return "transfer"
    if "decode_sent" in timestamps and "prefill_answered" in timestamps:
        return "offering" if mine else "waiting for KV"
    if "prefill_answered" in timestamps:
        return "between legs"
    if chunks:
        return "between chunks"
    return "queued" if mine or traced else "prefill"


def _concerns(trial: Trial, event: Mapping[str, Any]) -> bool:
    transfer = (trial.params or {}).get("transfer_id", trial.trial_id)
    return event.get("transfer") in (transfer, trial.trial_id) or trial.trial_id in str(event.get("request", ""))
