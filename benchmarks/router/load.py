"""The client: `concurrency` requests at a time, and the times of each one's first byte, tokens
and end.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from benchmarks.router.engine import MODEL

DATA = b"data: {"
MADE = b'"made_ns": '


@dataclass(frozen=True)
class Stream:
    """Times of one request in seconds: first token, end, and delay of each token since its
    creation.
    """

    first_s: float
    whole_s: float
    relayed_s: tuple[float, ...]


@dataclass
class Load:
    """Results of a batch of requests."""

    streams: list[Stream] = field(default_factory=list)
    took_s: float = 0.0

    @property
    def per_second(self) -> float:
        return len(self.streams) / self.took_s


def body(prompt_bytes: int, tokens: int, pace_ms: float = 0.0) -> bytes:
    """Return a streaming completion's body. All prompts of one length are equal."""
    prompt = ("All work and no play makes an engine dull. " * (prompt_bytes // 43 + 1))[:prompt_bytes]
    asked: dict[str, Any] = {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "stream": True, "temperature": 0}
    return json.dumps(asked | ({"pace_ms": pace_ms} if pace_ms else {})).encode()


def raw(port: int, data: bytes) -> bytes:
    """Return a whole HTTP request on a connection of its own, for clients that count bytes."""
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(data)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + data


def age_s(event: bytes, now_ns: int) -> float:
    """Return the time since the creation of a token, from its event."""
    made = event.index(MADE) + len(MADE)
    return (now_ns - int(event[made : event.index(b"}", made)])) / 1e9


async def ask(session: aiohttp.ClientSession, url: str, data: bytes, tokens: int) -> Stream:
    """Send one request and read all of it.

    Raises ValueError if a token or the stream's end is missing.
    """
    began, first = time.monotonic(), 0.0
    relayed: list[float] = []
    rest = b""
    headers = {"content-type": "application/json"}
    async with session.post(f"{url}/v1/completions", data=data, headers=headers) as response:
        if response.status != 200:
            raise ValueError(f"HTTP {response.status}: {(await response.read())[:500]!r}")
        async for some in response.content.iter_any():
            now = time.monotonic_ns()
            *events, rest = (rest + some).split(b"\n\n")
            for event in events:
                if event.startswith(DATA):
                    first = first or now / 1e9 - began
                    relayed.append(age_s(event, now))
    if len(relayed) != tokens or event != b"data: [DONE]":
        raise ValueError(f"{len(relayed)} of {tokens} tokens, and {event!r} at the end")
    return Stream(first, time.monotonic() - began, tuple(relayed))


async def play(
    session: aiohttp.ClientSession, url: str, data: bytes, tokens: int, concurrency: int, count: int
) -> Load:
    """Send `count` requests, `concurrency` at a time."""
    load = Load()
    left = iter(range(count))

    async def client() -> None:
        for _ in left:
            load.streams.append(await ask(session, url, data, tokens))

    began = time.monotonic()
    await asyncio.gather(*(client() for _ in range(concurrency)))
    load.took_s = time.monotonic() - began
    return load
