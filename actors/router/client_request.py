"""A validated client request and its deadline."""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from actors.large_json import OFF_LOOP_BYTES
from actors.policy.prompts import Prompt, read_prompt
from actors.request import Endpoint, Headers


@dataclass(frozen=True)
class ClientRequest:
    """A validated request.

    ``raw``         body as received; for a prompt of a list, the body that `split` wrote
    ``body``        parsed body; of a form, only the fields that the router needs
    ``session``     session id or None; requests of one session prefer the same decode replica
    ``explain``     whether the client asked for the routing decision and the latency breakdown
    ``part``        whether it is a later prompt of a list, not counted as a waiting request
    ``arrived_at``  time at which the headers had arrived, on the monotonic clock; for a streamed
                    prompt of a list, time at which the router began to serve it
    ``read_at``     time at which the whole body had arrived, on the monotonic clock
    """

    endpoint: Endpoint
    headers: Headers
    raw: bytes
    body: Mapping[str, Any]
    session: str | None = None
    explain: bool = False
    part: bool = False
    arrived_at: float = field(default_factory=time.monotonic)
    read_at: float = field(default_factory=time.monotonic)

    @cached_property
    def prompt(self) -> Prompt:
        """Prompts of the request, in which the routing policy finds cached prefixes."""
        return read_prompt(self.body)

    async def prepare(self) -> None:
        """Compute `prompt` in a thread if the body is large."""
        if len(self.raw) > OFF_LOOP_BYTES:
            # Not through the property: before Python 3.12 a cached_property holds one lock for all
            # instances while it computes (https://github.com/python/cpython/issues/87634).
            vars(self).update(prompt=await asyncio.to_thread(read_prompt, self.body))

    def with_metadata(self, **changes: Any) -> "ClientRequest":
        """Return a copy with `changes` of attributes other than the body; keeps computed values."""
        assert not changes.keys() & {"raw", "body"}
        copy = replace(self, **changes)
        vars(copy).update({name: vars(self)[name] for name in ("prompt",) if name in vars(self)})
        return copy

    @property
    def streams(self) -> bool:
        """True if `stream` is truthy; also for `"false"`, for which vLLM sends no stream."""
        return bool(self.body.get("stream"))

    @property
    def sequences(self) -> int:
        """Number of sequences of the request: prompts times `n`, or its number of `items`."""
        items = self.body.get("items")  # /generative_scoring: vLLM starts all items at once
        return max(self.prompt.answers, len(items) if isinstance(items, list) else 1)

    @property
    def request_id(self) -> str:
        """X-Request-Id for engines: the client's, else "" if the body has an id, else generated."""
        return dict(self.headers).get(b"x-request-id", b"").decode("latin-1")


class RequestTimer:
    """Age and deadline of a request that arrived at `arrived_at` on the monotonic clock."""

    def __init__(self, timeout_s: float, arrived_at: float) -> None:
        self._began_at = asyncio.get_running_loop().time() - (time.monotonic() - arrived_at)
        self.ends_at = self._began_at + timeout_s
        """Deadline on the event loop's clock."""

    def extend(self, idle_s: float) -> None:
        """Set the deadline to `idle_s` seconds from now; limits the idle time after a token."""
        self.ends_at = asyncio.get_running_loop().time() + idle_s

    @property
    def age_s(self) -> float:
        return asyncio.get_running_loop().time() - self._began_at

    @property
    def left_s(self) -> float:
        return max(self.ends_at - asyncio.get_running_loop().time(), 0.0)
