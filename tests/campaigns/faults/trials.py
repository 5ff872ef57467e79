"""One request through a prefill and a decode server, as a router sends it, and its client's record.

The campaign times faults and judges answers by this record, which does not depend on the connector.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from testing.sequential_proxy import PRODUCE
from testing.servers import MODEL
from tests.campaigns.faults.presets import ROUTER_PREFILL_S

ANSWER_TOKENS = 24


@dataclass(frozen=True)
class Question:
    """A prompt of known answer: ``expected`` is a plain engine's greedy text of
    ``ANSWER_TOKENS`` tokens.
    """

    prompt: str
    prompt_tokens: int
    expected: str


@dataclass
class Trial:
    """One request and its client's observations.

    ``timestamps`` are ``time.monotonic()`` of the client's events; the ends of the legs may be
    missing. ``failure`` is the reason for a missing or partial answer: a server's answer, or a
    broken connection. ``gave_up`` is the leg that timed out; ``cancelled``: the driver has closed
    the connection on purpose. ``request_id`` is the X-Request-Id of both legs, as in vLLM's own
    proxies: NixlPushConnector matches its two ends only by it, so a replayed reference needs the id
    of its original request.
    """

    question: Question
    trial_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    request_id: str = ""
    timestamps: dict[str, float] = field(default_factory=dict)
    params: dict[str, Any] | None = None
    text: str = ""
    finish: str | None = None
    complete: bool = False
    failure: str | None = None
    gave_up: str | None = None
    cancelled: bool = False

    def __post_init__(self) -> None:
        self.request_id = self.request_id or self.trial_id

    def stamp(self, name: str) -> None:
        self.timestamps.setdefault(name, time.monotonic())

    @property
    def ended(self) -> bool:
        return "ended" in self.timestamps


Meanwhile = Callable[[Trial], Any]


@dataclass
class Router:
    """Client that sends the legs of requests, as a router does, and records them in trials.

    ``bound_s``  longest time in seconds that a decode leg may take
    """

    client: httpx.AsyncClient
    prefill_url: str
    decode_url: str
    bound_s: float
    _timers: set[asyncio.Timeout] = field(default_factory=set)
    _paused: bool = False

    def pause(self) -> None:
        """Record that the decode server is stopped: its legs' time does not count."""
        self._paused = True
        for timer in self._timers:
            timer.reschedule(None)

    def resume(self) -> None:
        """Record that it runs again, with ``bound_s`` from now."""
        if self._paused:
            self._paused = False
            for timer in self._timers:
                timer.reschedule(asyncio.get_running_loop().time() + self.bound_s)

    async def in_turn(self, trial: Trial, between: Meanwhile | None = None) -> None:
        """Send prefill, then decode with prefill's answer, unless ``between`` changes it or
        returns None.
        """
        async with record(trial):
            if not await self.prefill(trial):
                return
            params = trial.params
            if between is not None:
                params = await between(trial)
            if params is not None:
                await self.decode(trial, params)

    async def at_once(self, trial: Trial, address: Mapping[str, Any]) -> None:
        """Send both legs at the same time, for connectors that support it.

        ``address``  prefill's answer to ``describe``
        """
        async with record(trial):
            leg = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": trial.trial_id}
            first = asyncio.ensure_future(self.prefill(trial, leg, sole=False))
            try:
                await self.decode(trial, dict(address) | {"transfer_id": trial.trial_id})
            finally:
                first.cancel()
                await asyncio.wait([first])

    async def prefill(self, trial: Trial, leg: Mapping[str, Any] = PRODUCE, sole: bool = True) -> bool:
        """Run the prefill leg; return whether it succeeded.

        ``sole``  whether no other leg runs, so that a failure of this one is the request's failure
        """
        body = _body(trial) | {"max_tokens": 1, "stream": False, "kv_transfer_params": dict(leg)}
        trial.stamp("prefill_sent")
        failure = None
        try:
            async with asyncio.timeout(ROUTER_PREFILL_S):
                headers = {"X-Request-Id": trial.request_id}
                answer = await self.client.post(f"{self.prefill_url}/v1/completions", json=body, headers=headers)
            if answer.status_code == 200:
                trial.params = answer.json().get("kv_transfer_params")
                if trial.params is None:
                    failure = "prefill: an answer without kv_transfer_params"
            else:
                failure = f"prefill: {answer.status_code} {answer.text[:200]}"
        except TimeoutError:
            failure = f"prefill: given up by the router after {ROUTER_PREFILL_S:g} s"
        except (httpx.HTTPError, ValueError) as error:
            failure = f"prefill: {type(error).__name__} {error}"
        trial.stamp("prefill_answered")
        if failure and sole:
            trial.failure = failure
        return failure is None

    async def decode(self, trial: Trial, params: Mapping[str, Any] | None) -> None:
        """Run the decode leg as a stream; without ``params``, decode also computes the prompt."""
        body = _body(trial) | {"stream": True}
        if params is not None:
            body["kv_transfer_params"] = dict(params)
        trial.stamp("decode_sent")
        try:
            async with asyncio.timeout(None if self._paused else self.bound_s) as timer:
                self._timers.add(timer)
                try:
                    await self._stream(trial, body)
                finally:
                    self._timers.discard(timer)
        except TimeoutError:
            trial.gave_up = "decode"
        except httpx.HTTPError as error:
            trial.failure = f"decode: {type(error).__name__} {error}"

    async def _stream(self, trial: Trial, body: Mapping[str, Any]) -> None:
        headers = {"X-Request-Id": trial.request_id}
        url = f"{self.decode_url}/v1/completions"
        async with self.client.stream("POST", url, json=body, headers=headers) as answer:
            if answer.status_code != 200:
                trial.failure = f"decode: {answer.status_code} {(await answer.aread())[:200].decode(errors='replace')}"
                return
            async for line in answer.aiter_lines():
                if not line.startswith("data: "):
                    continue
                if line == "data: [DONE]":
                    trial.complete = trial.failure is None
                    return
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    trial.failure = f"decode: error event {json.dumps(event['error'])[:200]}"
                for choice in event.get("choices", ()):
                    trial.text += choice["text"]
                    trial.finish = choice["finish_reason"] or trial.finish
                    if choice["text"]:
                        trial.stamp("first_token")
            trial.failure = trial.failure or "decode: the stream ends without [DONE]"


@asynccontextmanager
async def record(trial: Trial) -> AsyncIterator[None]:
    """Mark the trial's end; a cancellation is the driver's, and propagates."""
    trial.stamp("started")
    try:
        yield
    except asyncio.CancelledError:
        trial.cancelled = True
        raise
    finally:
        trial.stamp("ended")


def _body(trial: Trial) -> dict[str, Any]:
    return {
        "model": MODEL,
        "prompt": trial.question.prompt,
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
    }
