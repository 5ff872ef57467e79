"""One attempt at a request: its legs, its slots and its reports to the planner."""

import asyncio
import json
import time
from contextlib import AsyncExitStack
from http import HTTPStatus
from typing import Self

from actors.engine_pool.engines import Slot
from actors.policy.decision import Decision
from actors.policy.inflight import InflightRequest
from actors.policy.planner import Planner
from actors.policy.prompts import Prompt
from actors.request import FirstTokenChunk, ResponseStart, StreamChunk
from actors.router.dispatch.leg import Leg, Response
from actors.router.dispatch.prefill_leg import PrefillLeg
from actors.telemetry.recent_requests import Pair
from configs.settings.base import RoleName


class Attempt:
    """One attempt at a request: both legs, or one engine alone.

    Leaving the context closes the attempt unless an answer has started; after that, call `close`.
    If the routing decision names replicas, the planner counts the attempt before it has slots:
    concurrent decisions then take each other into account.
    """

    start: ResponseStart
    items: list[StreamChunk | bytes]
    decode: Leg
    pair: Pair

    def __init__(self, planner: Planner, prompt: Prompt, decision: Decision) -> None:
        self.decision = decision
        self.prefill: PrefillLeg | None = None
        self.began_at = self.slots_at = time.monotonic()
        """Monotonic times at which the attempt began and at which it had slots for its legs."""
        self.prompt_tokens: int | None = None
        """Number of tokens of the prompt, if the prefill engine's answer has it; else None."""
        self.opening: asyncio.Task[Response] | None = None
        """Task that waits for decode's first token, or for its whole answer if that is no stream.

        None if one engine serves the attempt alone.
        """
        self.sampled_by: RoleName = "decode"
        """Role of the engine whose first token the client receives."""
        self.legs = AsyncExitStack()
        self._planner = planner
        self._prompt = prompt
        self._inflight: InflightRequest | None = None
        self._prefilled_at: float | None = None
        self._is_open = False
        self._answered = False
        self._tokens = 0
        if decision.decode:
            self.sent(decision.decode[0], next(iter(decision.prefill), None))
        self.legs.callback(self._end)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if not self._is_open:
            await self.close()

    @property
    def local_reason(self) -> str | None:
        """Reason of the routing decision if it is local, else None."""
        return self.decision.reason if self.decision.local else None

    def sent(self, decode: str, prefill: str | None) -> None:
        """Report the replicas of the legs to the planner, in place of those reported before.

        ``prefill``  prefill replica; None if decode serves the attempt alone
        """
        self.pair = Pair(prefill, decode)
        if self._inflight is not None:
            if (self._inflight.decode, self._inflight.prefill) == (decode, prefill):
                return
            self._planner.ended(self._inflight, _now(), broken=True)
        self._inflight = self._planner.begin(self._prompt, decode, prefill, _now())

    def prefilled(self, body: object) -> None:
        """Record that prefill has computed the prompt; with `body`, also report it to the planner.

        ``body``  prefill's answer with the token count (bytes or FirstTokenChunk), None before it
                  arrives. Without an answer, `opened` or the end of the attempt makes the report
        """
        if self._prefilled_at is None:
            self._prefilled_at = _now()
        if body is not None:
            self.prompt_tokens = _prompt_tokens(body)
            self._report_prefilled(self.prompt_tokens)

    def opened(self, response: Response) -> Self:
        """Keep the calls open after the start of decode's answer, which may be an error.

        Unless the answer is an error, marks prefill's KV as delivered and reports the answer to the
        planner. The time of the first token is known, and reported, for streams only.
        """
        self.start, self.items = response
        self._is_open = True
        if self.start.status < HTTPStatus.BAD_REQUEST:
            if self.prefill is not None:
                self.prefill.delivered()
            self._answered = True
            self._report_prefilled()
            if self._inflight is not None:
                if any(isinstance(item, StreamChunk) for item in self.items):
                    self._planner.computed(self._inflight)
                if self.start.streams:
                    self._planner.opened(self._inflight, _now())
        return self

    @property
    def on_prefill(self) -> str | None:
        """Prefill replica of an attempt without a decode leg, else None."""
        return self.pair.prefill if self.pair.decode is None else None

    def opened_on_prefill(self, slot: Slot, response: Response) -> Self:
        """Keep the call open after the start of an answer from prefill alone.

        When the attempt ends, the planner no longer assumes the prompt in decode's prefix cache.
        """
        self.sampled_by = "prefill"
        self.start, self.items = response
        self.pair = Pair(slot.replica_id, None)
        self._is_open = True
        self._report_prefilled()
        return self

    def opened_by_prefill(self) -> Self:
        """Keep the calls open after prefill's first token, before decode's answer.

        Decode may not have received the KV.
        """
        assert self.prefill is not None
        assert self.prefill.start is not None, "prefill has answered"
        self.sampled_by = "prefill"
        self.start, self.items = self.prefill.start, []
        self._is_open = True
        self._report_prefilled()
        return self

    def handed_over(self) -> None:
        """Release the prefill leg after decode's first token of an answer that is not streamed.

        The leg still waits for prefill's answer, which arrives soon if decode received the KV.
        Whether decode received it is unknown until decode's answer arrives with its timings.
        """
        assert self.prefill is not None
        self.prefill.delivered()
        self.prefill.release(answers_soon=True)
        if self._inflight is not None:
            self._planner.handed_over(self._inflight)

    def passed_on(self, item: object) -> None:
        """Count the tokens in an item of decode's answer; ignore items of prefill alone."""
        if isinstance(item, StreamChunk) and self.pair.decode is not None:
            self._tokens += sum(map(len, item.groups))

    def release(self) -> None:
        """Release the prefill leg after decode's answer has started.

        Call this after the first bytes are sent: the message to the prefill engine takes time.
        """
        if self.prefill is not None:
            timings = self.decode.timestamps.timings
            had_kv = timings is not None and timings.kv_ended_s is not None and not timings.kv_failed
            self.prefill.release(answers_soon=had_kv)
            if self._inflight is not None:
                self._planner.handed_over(self._inflight)

    async def close(self) -> None:
        """Cancel the running calls, give back their slots, and report the end to the planner."""
        await self.legs.aclose()

    def _end(self) -> None:
        self._report_prefilled()
        if self._inflight is not None:
            self._planner.ended(self._inflight, _now(), self._tokens, broken=not self._answered)

    def _report_prefilled(self, prompt_tokens: int | None = None) -> None:
        """Report the prompt to the planner if prefill has computed it, with its token count."""
        if self._prefilled_at is not None and self._inflight is not None:
            self._planner.prefilled(self._inflight, self._prefilled_at, prompt_tokens)


def _now() -> float:
    return asyncio.get_running_loop().time()


def _prompt_tokens(answer: object) -> int | None:
    """Return the prompt's token count from the usage of an answer or from a chunk, or None."""
    if isinstance(answer, FirstTokenChunk):
        return answer.prompt_tokens
    if not isinstance(answer, bytes):
        return None
    try:
        body = json.loads(answer)
        usage = body["usage"]
        # In Anthropic's usage, `input_tokens` excludes cached tokens.
        cached = usage.get("cache_read_input_tokens", 0)
        tokens = usage["input_tokens"] + cached if body.get("type") == "message" else usage["prompt_tokens"]
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return tokens if type(tokens) is int and tokens > 0 else None
