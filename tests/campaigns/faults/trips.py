"""One request through a prefill and a decode server: what a router does, and a record of all that its client sees.

The record is what faults are timed by and answers are judged by; it needs nothing of the connector.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from testing.sequential_proxy import PRODUCE
from testing.servers import MODEL
from tests.campaigns.faults.presets import ROUTER_PREFILL_S

ANSWER_TOKENS = 24


@dataclass(frozen=True)
class Question:
    """A prompt of known answer: ``expected`` is the text of ``ANSWER_TOKENS`` greedy tokens of a plain engine."""

    prompt: str
    prompt_tokens: int
    recall: str
    expected: str


@dataclass
class Trip:
    """``marks`` are times (``time.monotonic()``) of what the client has seen; the first two legs' ends may be missing.

    ``failure`` says why there is no whole answer: what a server answered, or that a connection broke. ``gave_up`` is
    the leg whose time was up; ``cancelled`` means that the driver has closed the connection on purpose. ``request_id``
    is what both legs send as X-Request-Id, as vLLM's own proxies do: NixlPushConnector matches its two ends by nothing
    else, so that a replayed reference must come with the id of the request that it was given to.
    """

    question: Question
    trip_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    request_id: str = ""
    marks: dict[str, float] = field(default_factory=dict)
    params: dict[str, Any] | None = None
    text: str = ""
    finish: str | None = None
    complete: bool = False
    failure: str | None = None
    gave_up: str | None = None
    cancelled: bool = False

    def __post_init__(self) -> None:
        self.request_id = self.request_id or self.trip_id

    def mark(self, name: str) -> None:
        self.marks.setdefault(name, time.monotonic())

    @property
    def ended(self) -> bool:
        return "ended" in self.marks


Meanwhile = Callable[[Trip], Any]


@dataclass
class Router:
    """``bound_s`` is how long a decode leg may take."""

    client: httpx.AsyncClient
    prefill_url: str
    decode_url: str
    bound_s: float
    _timers: set[asyncio.Timeout] = field(default_factory=set)
    _paused: bool = False

    def pause(self) -> None:
        """The decode server is stopped: its legs' time stands still."""
        self._paused = True
        for timer in self._timers:
            timer.reschedule(None)

    def resume(self) -> None:
        """It runs again, and has ``bound_s`` from now."""
        if self._paused:
            self._paused = False
            for timer in self._timers:
                timer.reschedule(asyncio.get_running_loop().time() + self.bound_s)

    async def in_turn(self, trip: Trip, between: Meanwhile | None = None) -> None:
        """Prefill, then decode with what prefill has answered, unless ``between`` changes it or says None."""
        async with _record(trip):
            if not await self.prefill(trip):
                return
            params = trip.params
            if between is not None:
                params = await between(trip)
            if params is not None:
                await self.decode(trip, params)

    async def at_once(self, trip: Trip, address: Mapping[str, Any]) -> None:
        """Both legs at the same time, for connectors that understand it."""
        async with _record(trip):
            leg = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": trip.trip_id}
            first = asyncio.ensure_future(self.prefill(trip, leg, sole=False))
            try:
                await self.decode(trip, dict(address) | {"transfer_id": trip.trip_id})
            finally:
                first.cancel()
                await asyncio.wait([first])

    async def prefill(self, trip: Trip, leg: Mapping[str, Any] = PRODUCE, sole: bool = True) -> bool:
        """The prefill leg. If it is the ``sole`` one under way, its failure is the request's."""
        body = _body(trip) | {"max_tokens": 1, "stream": False, "kv_transfer_params": dict(leg)}
        trip.mark("prefill_sent")
        failure = None
        try:
            async with asyncio.timeout(ROUTER_PREFILL_S):
                answer = await self.client.post(
                    f"{self.prefill_url}/v1/completions", json=body, headers={"X-Request-Id": trip.request_id}
                )
            if answer.status_code == 200:
                trip.params = answer.json().get("kv_transfer_params")
                if trip.params is None:
                    failure = "prefill: an answer without kv_transfer_params"
            else:
                failure = f"prefill: {answer.status_code} {answer.text[:200]}"
        except TimeoutError:
            failure = f"prefill: given up by the router after {ROUTER_PREFILL_S:g} s"
        except (httpx.HTTPError, ValueError) as error:
            failure = f"prefill: {type(error).__name__} {error}"
        trip.mark("prefill_answered")
        if failure and sole:
            trip.failure = failure
        return failure is None

    async def decode(self, trip: Trip, params: Mapping[str, Any] | None) -> None:
        """The decode leg, streamed; without ``params`` this engine computes all of it."""
        body = _body(trip) | {"stream": True}
        if params is not None:
            body["kv_transfer_params"] = dict(params)
        trip.mark("decode_sent")
        try:
            async with asyncio.timeout(None if self._paused else self.bound_s) as timer:
                self._timers.add(timer)
                try:
                    await self._stream(trip, body)
                finally:
                    self._timers.discard(timer)
        except TimeoutError:
            trip.gave_up = "decode"
        except httpx.HTTPError as error:
            trip.failure = f"decode: {type(error).__name__} {error}"

    async def _stream(self, trip: Trip, body: Mapping[str, Any]) -> None:
        headers = {"X-Request-Id": trip.request_id}
        url = f"{self.decode_url}/v1/completions"
        async with self.client.stream("POST", url, json=body, headers=headers) as answer:
            if answer.status_code != 200:
                trip.failure = f"decode: {answer.status_code} {(await answer.aread())[:200].decode(errors='replace')}"
                return
            async for line in answer.aiter_lines():
                if not line.startswith("data: "):
                    continue
                if line == "data: [DONE]":
                    trip.complete = trip.failure is None
                    return
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    trip.failure = f"decode: error event {json.dumps(event['error'])[:200]}"
                for choice in event.get("choices", ()):
                    trip.text += choice["text"]
                    trip.finish = choice["finish_reason"] or trip.finish
                    if choice["text"]:
                        trip.mark("first_token")
            trip.failure = trip.failure or "decode: the stream ends without [DONE]"


class _record:
    """Marks the trip's end; a cancellation is the driver's, and goes on."""

    def __init__(self, trip: Trip) -> None:
        self._trip = trip

    async def __aenter__(self) -> None:
        self._trip.mark("started")

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._trip.mark("ended")
        self._trip.cancelled = kind is asyncio.CancelledError


def _body(trip: Trip) -> dict[str, Any]:
    return {
        "model": MODEL,
        "prompt": trip.question.prompt,
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
    }
