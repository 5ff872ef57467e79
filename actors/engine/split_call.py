"""The answer of a decode engine whose prompt a prefill engine computes.

The decode engine calls the prefill engine, and owns this call from its beginning to its end. If
decode ends or its router dies, the prefill engine loses the call and frees the KV.
"""

import asyncio
import json
import time
import uuid
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractContextManager, aclosing, suppress
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Any

from actors.engine.asgi_call import Notices
from actors.engine.split_bodies import decode_body, first_token_body, prefill_body
from actors.large_json import as_written, off_loop, write
from actors.policy.choice import NO_PREFILL, PREFILL_FAILED
from actors.request import (
    Accepted,
    Call,
    FirstTokenChunk,
    Heartbeat,
    Item,
    PrefillOutcome,
    PrefillReport,
    ResponseStart,
    StreamChunk,
    TokenGroup,
)
from actors.rpc.client import Channel, Channels
from actors.rpc.messages import PrefillCandidate, PrefillOrder, RpcFailure, RpcRequest
from actors.rpc.protocol import GRANT_BYTES, item_bytes

RESOLUTION_S = 0.001
"""Resolution of uvloop's clock and timers in seconds; a timer may expire this much early."""

BODY_S = 0.01
"""Longest wait in seconds for the body of an answer whose start has arrived."""

BROKEN = frozenset({"full", "leaving", "rejected", "failed", "silent", "late"})
"""Outcomes after which the call delivers no KV, or not all of it."""

ANSWER_S = 0.5
"""Longest wait in seconds for prefill's answer after the end of decode's."""

BACK_OFF_S = 0.05
"""Initial pause in seconds after all candidates have refused a call. Doubles each time."""

MOST_BACK_OFF_S = 1.0

Serve = Callable[[Call, Notices, float], AsyncGenerator[Any, None]]
"""Function that serves a call on this engine: yields its items and those of the notices.

The third argument is the monotonic time from which the engine's timings count.
"""

Beats = Callable[[Callable[[], None]], AbstractContextManager[None]]
"""Function that calls its argument after each answer of the engine core, during a block."""


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
        self.accepted = False
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

    def _report(self, outcome: PrefillOutcome, **more: Any) -> None:
        """Put a report with ``more`` of the fields of PrefillReport into the notices."""
        self.outcome = outcome
        self.accepted = self.accepted or outcome == "accepted"
        if outcome != "accepted":
            self._timer.cancel()
        took_s = time.monotonic() - self.began_at
        self._notices.put(PrefillReport(self.candidate.replica, outcome, self._tried_s, took_s, **more))
        if self._done is not None and outcome != "accepted":
            self.close(self._done)

    def _check(self) -> None:
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


class SplitCall:
    """One call with a `PrefillOrder`. `items` yields its answer.

    Items of this engine's answer are held back until the KV or the answer has arrived, so that the
    router does not notice another try.
    """

    def __init__(self, call: Call, order: PrefillOrder, connections: Channels, serve: Serve, beats: Beats) -> None:
        self._call = call
        self._order = order
        self._connections = connections
        self._serve = serve
        self._beats = beats
        self._accepted_at = time.monotonic()
        self._candidates = deque(order.candidates)
        self._failures = 0
        self._refusals = 0
        self._refused_at: float | None = None
        self._back_off_s = BACK_OFF_S
        self._prefill: PrefillCall | None = None
        self._decode_call = call
        self._relayed: list[TokenGroup] = []
        """Token groups of prefill's first token that were passed on."""
        self._is_answered = False
        """Whether items of this engine's answer are passed on."""
        self._has_kv = False
        """Whether this engine has the KV from the prefill engine."""

    async def items(self, accepted: Accepted) -> AsyncGenerator[Item, None]:
        """Yield `accepted`, reports on prefill, and this engine's answer from its ResponseStart on.

        If prefill has sampled the first token, the items of its answer come first, and this
        engine's answer repeats them.
        """
        yield accepted
        fields = await off_loop(len(self._call.body), lambda: as_written(self._call.body))
        if self._order.seed is not None:
            fields["seed"] = self._order.seed
        try:
            while True:
                notices = Notices()
                prefill = self._begin(fields, notices)
                began_at = time.monotonic() if prefill is None else prefill.began_at
                if prefill is not None:
                    with self._beats(notices.beat):
                        while prefill.outcome is None:
                            yield await notices.get()
                    if prefill.broken:
                        for report in await self._leave(prefill, notices):
                            yield report
                        continue
                held: list[Item] = []
                async with aclosing(self._serve(self._decode_call, notices, began_at)) as answer:
                    async for item in answer:
                        if self._is_answered:
                            if not isinstance(item, Relayed):
                                yield item
                            continue
                        for one in self._until_answered(item, held):
                            yield one
                        if not self._is_answered and prefill is not None and prefill.broken:
                            break
                    else:
                        for one in held:
                            yield one
                        for one in await self._last_reports(notices):
                            yield one
                        return
                assert prefill is not None
                for report in await self._leave(prefill, notices):
                    yield report
        finally:
            if self._prefill is not None:
                self._prefill.close(self._has_kv)

    def _begin(self, fields: dict[str, Any], notices: Notices) -> PrefillCall | None:
        """Call the next candidate; without one, report that this engine computes the prompt."""
        order, call = self._order, self._call
        if not self._candidates:
            self._prefill = None
            self._is_answered = True
            self._decode_call = replace(call, replay_log=call.replay_log or tuple(self._relayed))
            reason = PREFILL_FAILED if self._failures else NO_PREFILL
            now = time.monotonic() - self._accepted_at
            notices.put(PrefillReport("", "alone", now, 0.0, message=reason))
            return None
        candidate, transfer_id = self._candidates[0], uuid.uuid4().hex
        body = first_token_body(fields, transfer_id) if order.samples else prefill_body(call.path, fields, transfer_id)
        self._decode_call = replace(
            call, body=write(decode_body(fields, transfer_id, candidate.producer, order.samples))
        )
        prefill = self._prefill = PrefillCall(order, candidate, notices, self._accepted_at)
        request = RpcRequest(
            replace(call, body=write(body), replay_log=(), sequences=1),
            order.router,
            order.queued,
            transfer_id,
            order.hold_s,
            maybe_full=True,  # this engine waits for `Accepted`
        )
        prefill.send(self._connections.to(candidate.address), request)
        return prefill

    async def _last_reports(self, notices: Notices) -> list[PrefillReport]:
        """Wait for prefill's answer, which may follow decode's: it updates the routing policy."""
        reports, prefill = [], self._prefill
        with suppress(TimeoutError):
            async with asyncio.timeout(ANSWER_S):
                while self._has_kv and prefill is not None and prefill.outcome == "accepted":
                    reports.append(await notices.get())
        reports += iter(notices.pop, None)
        return [item for item in reports if isinstance(item, PrefillReport)]

    async def _leave(self, prefill: PrefillCall, notices: Notices) -> list[PrefillReport]:
        """End a broken call; return its unread reports.

        Pauses after all candidates have refused the request.
        """
        prefill.close(done=False)
        reports = [item for item in iter(notices.pop, None) if isinstance(item, PrefillReport)]
        if prefill.outcome not in ("full", "leaving"):
            self._failures += 1
            self._candidates.popleft()
            if prefill.outcome == "rejected" or self._relayed or self._failures >= self._order.attempts:
                self._candidates.clear()
            return reports
        if prefill.accepted:  # it had waited in this engine's queue
            self._refused_at = None
        self._refused_at = self._refused_at or time.monotonic()
        self._refusals += 1
        if prefill.outcome == "leaving":
            self._candidates.popleft()
        if time.monotonic() - self._refused_at > self._order.refused_s:
            self._candidates.clear()
        if self._candidates:
            self._candidates.rotate(-1)
            if self._refusals % len(self._candidates) == 0:
                await asyncio.sleep(self._back_off_s)
                self._back_off_s = min(2 * self._back_off_s, MOST_BACK_OFF_S)
        return reports

    def _until_answered(self, item: Any, held: list[Item]) -> list[Item]:
        """Return what the router receives now; add the other items of this engine to `held`."""
        if isinstance(item, Relayed | Heartbeat | PrefillReport):
            if isinstance(item, Heartbeat) and item.tokens:
                self._hand_over(None)
            return [self._passed_on(item)]
        held.append(item)
        if not isinstance(item, StreamChunk) and not (isinstance(item, ResponseStart) and not item.streams):
            return []
        self._hand_over(item)
        answer = list(held)
        held.clear()
        return answer

    def _hand_over(self, item: StreamChunk | ResponseStart | None) -> None:
        """Decide that this engine's answer is the answer: `item` or its first token has arrived."""
        self._is_answered = True
        timings = None if item is None else item.timings
        refused = isinstance(item, ResponseStart) and item.status >= HTTPStatus.BAD_REQUEST
        self._has_kv = not refused and (timings is None or timings.received_kv)
        if self._prefill is not None:
            self._prefill.finish(self._has_kv)

    def _passed_on(self, item: Any) -> Any:
        if not isinstance(item, Relayed):
            return item
        if isinstance(item.item, StreamChunk):
            self._relayed += item.item.groups
        return item.item


def _prompt_tokens(answer: bytes | StreamChunk) -> int | None:
    try:
        body = json.loads(answer if isinstance(answer, bytes) else answer.body)
        usage = body["usage"]
        # In Anthropic's usage, `input_tokens` excludes cached tokens.
        cached = usage.get("cache_read_input_tokens", 0)
        tokens = usage["input_tokens"] + cached if body.get("type") == "message" else usage["prompt_tokens"]
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return tokens if type(tokens) is int and tokens > 0 else None
