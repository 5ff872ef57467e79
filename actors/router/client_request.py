"""A validated client request, and the time that it may take."""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from actors.policy.prompts import Prompt, read_prompt
from actors.request import Endpoint, Headers
from actors.router.raw_json import as_written


@dataclass(frozen=True)
class ClientRequest:
    """A validated request: its body as received and as an object."""

    endpoint: Endpoint
    headers: Headers
    raw: bytes
    body: Mapping[str, Any]
    session: str | None = None
    """Session id; requests of one session go to the same decode replica."""
    explain: bool = False
    """Whether the client asked for the routing decision and the latency breakdown."""
    arrived_at: float = field(default_factory=time.monotonic)
    read_at: float = field(default_factory=time.monotonic)
    """Monotonic times at which the headers and the whole body had arrived."""

    @cached_property
    def prompt(self) -> Prompt:
        """Passages of the prompt, from which cached prefixes are found."""
        return read_prompt(self.body)

    @property
    def streams(self) -> bool:
        """Whether the client asked for a stream."""
        return bool(self.body.get("stream"))

    @property
    def sequences(self) -> int:
        """Number of sequences that an engine computes for the request: prompts times `n`."""
        return self.prompt.answers

    @cached_property
    def fields(self) -> Mapping[str, Any]:
        """Fields of the body as the client wrote them. Decisions use `body`."""
        return as_written(self.raw, self.body)

    @property
    def request_id(self) -> str:
        """The client's X-Request-Id, or the id that both legs carry instead."""
        return dict(self.headers).get(b"x-request-id", b"").decode("latin-1")


class RequestTimer:
    """Age of a request and its remaining time. `arrived_at` is on the monotonic clock."""

    def __init__(self, timeout_s: float, arrived_at: float) -> None:
        self._began_at = asyncio.get_running_loop().time() - (time.monotonic() - arrived_at)
        self.ends_at = self._began_at + timeout_s
        """Deadline on the event loop's clock."""

    def extend(self, idle_s: float) -> None:
        """Move the deadline to `idle_s` from now: a stream with tokens has no deadline of its own."""
        self.ends_at = asyncio.get_running_loop().time() + idle_s

    @property
    def age_s(self) -> float:
        return asyncio.get_running_loop().time() - self._began_at

    @property
    def left_s(self) -> float:
        return max(self.ends_at - asyncio.get_running_loop().time(), 0.0)
