"""Parse `Server-Timing` as a client does."""

import httpx


def server_timing(reply: httpx.Response) -> dict[str, float]:
    """Return the durations in a reply's `Server-Timing` header, in milliseconds by name."""
    entries = (entry.split(";") for entry in reply.headers["server-timing"].split(", "))
    return {name: float(duration.removeprefix("dur=")) for name, duration in entries}
