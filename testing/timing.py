"""Parse `Server-Timing` as a client does."""

import httpx


def server_timing(reply: httpx.Response) -> dict[str, float]:
    entries = (entry.split(";") for entry in reply.headers["server-timing"].split(", "))
    return {name: float(duration.removeprefix("dur=")) for name, duration in entries}
