"""Reads `Server-Timing` as a client would."""

import httpx


def server_timing(reply: httpx.Response) -> dict[str, float]:
    """Milliseconds by name."""
    entries = (entry.split(";") for entry in reply.headers["server-timing"].split(", "))
    return {name: float(duration.removeprefix("dur=")) for name, duration in entries}
