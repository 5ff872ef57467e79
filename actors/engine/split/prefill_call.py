"""One call of a decode engine to a prefill engine, without a task: callbacks and timers."""

import asyncio
import json
import time
from dataclasses import dataclass

from actors.engine.asgi_call import Notices
from actors.engine_pool.engine_call import RESOLUTION_S
from actors.request import (
    Accepted,
    EngineTimings,
    FirstTokenChunk,
    Heartbeat,
    Item,
    PrefillOutcome,
    PrefillReport,
    ResponseStart,
    StreamChunk,
)
from actors.rpc.client import Channel
from actors.rpc.messages import PrefillCandidate, PrefillOrder, RpcFailure, RpcRequest
from actors.rpc.protocol import GRANT_BYTES, item_bytes

BODY_S = 0.01
"""Longest wait in seconds for the body of an answer whose start has arrived."""

BROKEN = frozenset({"full", "leaving", "rejected", "failed", "silent", "late"})
"""Outcomes after which the call delivers no KV, or not all of it."""


@dataclass(frozen=True)
class Relayed:
    """Item of the prefill engine's answer that the decode engine passes on."""

    item: ResponseStart | StreamChunk | bytes


class PrefillCall:
    """Listener of one prefill call. Puts reports, and the first token's items, into `notices`.

    The prefill engine holds the KV, and the call stays open, until `close`. A call that has failed
    does not fail the request: decode tries another engine, or computes the prompt.
    """

    def __init__(self, order: PrefillOrder, candidate: PrefillCandidate, notices: Notices, accepted_at: float) -> None:
        """Create the call; decode's call was accepted at the monotonic time `accepted_at`."""
        self.candidate = candidate
        self.outcome: PrefillOutcome | None = None
        """Last outcome; None before the engine has accepted the call."""
        self.began_at = time.monotonic()
        self._order = order
        self._notices = notices
        self._tried_s = self.began_at - accepted_at
        self._channel: Channel | None = None
        self._stream = 0
        self._unread_bytes = 0
        self._start: ResponseStart | None = None
        self._first: list[Relayed] = []
        """Items of the answer before prefill's first token."""
        self._done: bool | None = None
        """Value for `close` once the prompt is computed; None: keep the call open."""
        self._loop = asyncio.get_running_loop()
        self._heard_at = self._loop.time()
        self._late_at = self._heard_at + order.timeout_s
        self._timer = self._loop.call_later(min(order.silence_s, order.timeout_s), self._check)

    @property
    def broken(self) -> bool:
        return self.outcome in BROKEN

    def send(self, channel: Channel, request: RpcRequest) -> None:
        self._channel = channel
        self._stream = channel.call(request, self)

    def received(self, item: Item) -> None:
        """Receive the next item of the prefill engine."""
        self._consume(item)
        if self.outcome == "computed":
            if self._order.samples and isinstance(item, bytes | StreamChunk):
                self._notices.put(Relayed(item))
            return
        if self.broken:
            return
        self._heard_at = self._loop.time()
        match item:
            case Accepted(ongoing=ongoing):
                self._report("accepted", ongoing=ongoing)
            case ResponseStart():
                self._start = item
                if item.status < 400 and not self._order.samples:
                    # The prompt is computed. The body, with its token count, normally follows.
                    self._timer.cancel()
                    self._timer = self._loop.call_later(BODY_S, self._body, b"")
            case bytes() | StreamChunk():
                self._body(item)
            case Heartbeat():
                pass

    def ended(self, lost: str | None, failure: RpcFailure | None = None) -> None:
        """Receive the end of the call, with `lost` or `failure` before `close` or `hold_s`."""
        self._channel = None
        if self.broken:
            return
        if failure is not None and failure.kind in ("full", "leaving"):
            self._report(failure.kind, message=failure.message)
        elif lost is not None or failure is not None:
            self._report("failed", message=lost or (failure.message if failure else ""))
        elif self.outcome != "computed":
            self._body(b"")

    def finish(self, done: bool) -> None:
        """Close the call once its answer has arrived: its timings update the routing policy."""
        if self.outcome == "computed" or self.broken or not done:
            self.close(done)
        else:
            self._done = done

    def close(self, done: bool) -> None:
        """End the call; the prefill engine discards the KV unless it is `done`."""
        self._timer.cancel()
        if self._channel is not None:
            channel, self._channel = self._channel, None
            channel.cancel(self._stream, done)

    def _body(self, item: bytes | StreamChunk) -> None:
        """Judge the answer by the first item of its body, or by its first token."""
        start = self._start
        if start is None:
            self._report("failed", message="the call ended without an answer")
        elif start.status >= 400:
            # Another engine may accept the request after a server error.
            outcome: PrefillOutcome = "failed" if start.status >= 500 else "rejected"
            self._report(outcome, message=f"HTTP {start.status} {item!r}")
        elif not self._order.samples:
            self._report("computed", prompt_tokens=_prompt_tokens(item), timings=start.timings)
        else:
            self._first.append(Relayed(item))
            if isinstance(item, StreamChunk):
                tokens = item.prompt_tokens if isinstance(item, FirstTokenChunk) else None
                self._report("computed", prompt_tokens=tokens, timings=item.timings)
                for relayed in (Relayed(start), *self._first):
                    self._notices.put(relayed)
            elif self._channel is None or b'"error"' in item:  # an event may report the error, with HTTP 200
                self._report("rejected", message=repr(item))

    def _report(
        self,
        outcome: PrefillOutcome,
        ongoing: int = 0,
        prompt_tokens: int | None = None,
        timings: EngineTimings | None = None,
        message: str = "",
    ) -> None:
        self.outcome = outcome
        if outcome != "accepted":
            self._timer.cancel()
        took_s = time.monotonic() - self.began_at
        self._notices.put(
            PrefillReport(
                self.candidate.replica, outcome, self._tried_s, took_s, ongoing, prompt_tokens, timings, message
            )
        )
        if self._done is not None and outcome != "accepted":
            self.close(self._done)

    def _check(self) -> None:
        """End a silent or late call, or set the timer again."""
        order, now, silent_at = self._order, self._loop.time() + RESOLUTION_S, self._heard_at + self._order.silence_s
        if now >= self._late_at:
            self._report("late", message=f"the prefill engine did not answer within {order.timeout_s:g} s")
        elif now >= silent_at:
            self._report("silent", message=f"the prefill engine sent nothing for {order.silence_s:g} s")
        else:
            self._timer = self._loop.call_at(min(silent_at, self._late_at), self._check)

    def _consume(self, item: Item) -> None:
        self._unread_bytes += item_bytes(item)
        if self._unread_bytes >= GRANT_BYTES and self._channel is not None:
            self._channel.grant(self._stream, self._unread_bytes)
            self._unread_bytes = 0


def _prompt_tokens(answer: bytes | StreamChunk) -> int | None:
    """Return the prompt's token count from the usage of an answer, or None."""
    try:
        body = json.loads(answer if isinstance(answer, bytes) else answer.body)
        usage = body["usage"]
        # In Anthropic's usage, `input_tokens` excludes cached tokens.
        cached = usage.get("cache_read_input_tokens", 0)
        tokens = usage["input_tokens"] + cached if body.get("type") == "message" else usage["prompt_tokens"]
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return tokens if type(tokens) is int and tokens > 0 else None
