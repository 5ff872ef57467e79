"""The answer of a decode engine whose prompt a prefill engine computes.

The decode engine calls the prefill engine, and owns this call from its beginning to its end. If
decode ends or its router dies, the prefill engine loses the call and frees the KV.
"""

import asyncio
import time
import uuid
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractContextManager, aclosing, suppress
from dataclasses import replace
from http import HTTPStatus
from typing import Any, Protocol

from actors.engine.asgi_call import Notices
from actors.engine.split.bodies import decode_body, first_token_body, prefill_body
from actors.engine.split.prefill_call import PrefillCall, Relayed
from actors.large_json import off_loop
from actors.policy.decision import NO_PREFILL, PREFILL_FAILED
from actors.raw_json import as_written, write
from actors.request import Accepted, Call, Heartbeat, Item, PrefillReport, ResponseStart, StreamChunk, TokenGroup
from actors.rpc.address import RpcAddress
from actors.rpc.client import Channel
from actors.rpc.messages import PrefillOrder, RpcRequest

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


class Connections(Protocol):
    """Connections to prefill engines (`rpc/client.py`)."""

    def to(self, address: RpcAddress) -> Channel: ...


class SplitCall:
    """One call with a `PrefillOrder`. `items` yields its answer.

    Items of this engine's answer are held back until the KV or the answer has arrived, so that the
    router does not notice another try.
    """

    def __init__(self, call: Call, order: PrefillOrder, connections: Connections, serve: Serve, beats: Beats) -> None:
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
        self._has_kv = not refused and (timings is None or (timings.kv_ended_s is not None and not timings.kv_failed))
        if self._prefill is not None:
            self._prefill.finish(self._has_kv)

    def _passed_on(self, item: Any) -> Any:
        if not isinstance(item, Relayed):
            return item
        if isinstance(item.item, StreamChunk):
            self._relayed += item.item.groups
        return item.item
