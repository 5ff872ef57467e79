"""The router: sends both legs of a request to a pair of engines at once and relays decode's answer."""

import asyncio
import json
import logging
import uuid
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from ray.serve.handle import DeploymentHandle

from actors.asgi_call import Call, Headers, ResponseStart
from actors.handoff import Endpoint, Producer, decode_leg, prefill_leg, why_local
from actors.leg import Leg, Opened, OverloadedError, choose, deadline, serve_errors
from actors.prefill_leg import PrefillLeg
from actors.router_metrics import RouterMetrics
from configs.settings import RoleName, RouterLimits
from connectors.errors import TandemError

logger = logging.getLogger(__name__)

NO_PREFILL = "no_prefill"
"""Why decode served a request that could have been split: no prefill replica took it in time."""

PREFILL_FAILED = "prefill_failed"
"""Why decode served a request that had been split: its prefill leg broke before decode's first byte."""


@dataclass(frozen=True)
class ClientRequest:
    """A validated request: its body as received and as an object."""

    endpoint: Endpoint
    headers: Headers
    raw: bytes
    body: Mapping[str, Any]


class Answer:
    """Decode's answer, opened: its first bytes are there, so the handover is done."""

    def __init__(self, opened: Opened, decode: Leg, local_reason: str | None, timing: "Timing") -> None:
        self.start = opened.start
        self.local_reason = local_reason
        self.first_byte_s = timing.age_s
        self._head = opened.head
        self._decode = decode
        self._timing = timing

    @property
    def route(self) -> str:
        """`remote` when another engine computed the prompt, `local` when decode did."""
        return "remote" if self.local_reason is None else "local"

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """The body as it comes; DeadlineError once the request's time is over."""
        item: Any = self._head
        while item is not None:
            if isinstance(item, bytes):
                yield item
            async with deadline(self._timing.left_s, "the rest of the answer"):
                item = await self._decode.next()


class Timing:
    """How long ago the router took a request, and how long it may still take."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._began_at = asyncio.get_running_loop().time()

    @property
    def age_s(self) -> float:
        return asyncio.get_running_loop().time() - self._began_at

    @property
    def left_s(self) -> float:
        return max(self._timeout_s - self.age_s, 0.0)


class Router:
    """Holds the handles of both roles. `answer` opens a request; closing it ends both legs."""

    def __init__(self, limits: RouterLimits, prefill: DeploymentHandle, decode: DeploymentHandle) -> None:
        self.limits = limits
        self.metrics = RouterMetrics()
        self._roles: dict[RoleName, DeploymentHandle] = {"prefill": prefill, "decode": decode}
        self._prefill = prefill.options(method_name="call_and_hold", stream=True)
        self._decode = decode.options(method_name="call", stream=True)
        self._ongoing = 0

    def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Serve's hook: new deadlines and limits for the requests that come from now on."""
        self.limits = RouterLimits.model_validate(user_config)

    @contextmanager
    def admitted(self) -> Iterator[None]:
        """Count a request while it is here; raises OverloadedError when there are too many."""
        if self._ongoing >= self.limits.max_ongoing_requests:
            raise OverloadedError(f"{self._ongoing} requests are being served, which is the limit")
        self._ongoing += 1
        try:
            with self.metrics.ongoing.track_inprogress():
                yield
        finally:
            self._ongoing -= 1

    @asynccontextmanager
    async def answer(self, request: ClientRequest) -> AsyncGenerator[Answer, None]:
        """Serve `request`. Leaving the context closes whatever still runs of it on either engine.

        Raises OverloadedError, UnavailableError or DeadlineError when decode gives no answer.
        """
        timing = Timing(self.limits.request_timeout_s)
        local_reason = why_local(request.endpoint, request.body)
        async with AsyncExitStack() as stack:
            async with deadline(timing.left_s, "the request"):
                answer = None
                if local_reason is None:
                    answer, local_reason = await self._try_split(stack, request, timing)
                if answer is None:
                    answer = await self._serve_alone(stack, request, local_reason, timing)
            yield answer

    async def _try_split(
        self, stack: AsyncExitStack, request: ClientRequest, timing: Timing
    ) -> tuple[Answer | None, str | None]:
        """Dispatch both legs. Without an answer, why decode must serve the request alone."""
        async with AsyncExitStack() as legs:
            decode_place, prefill_place = await self._choose_pair(legs)
            if prefill_place is None:
                return None, NO_PREFILL
            transfer_id = uuid.uuid4().hex
            producer = Producer.from_params(prefill_place.replica_metadata)
            prefill_call = _call(request, prefill_leg(request.endpoint, request.body, transfer_id))
            decode_call = _call(request, decode_leg(request.body, transfer_id, producer))
            prefill = PrefillLeg(
                Leg("prefill", self._prefill.dispatch(prefill_place, prefill_call, transfer_id, timing.left_s)),
                transfer_id,
                self.limits.prefill_timeout_s,
                self.metrics,
                self._discard,
            )
            legs.push_async_callback(prefill.close)
            decode = Leg("decode", self._decode.dispatch(decode_place, decode_call))
            legs.push_async_callback(decode.close)
            opening = asyncio.ensure_future(decode.open())
            legs.callback(opening.cancel)
            await asyncio.wait({opening, prefill.broken}, return_when=asyncio.FIRST_COMPLETED)
            if not opening.done():
                return None, PREFILL_FAILED
            answer = Answer(await opening, decode, None, timing)
            if answer.start.status < HTTPStatus.BAD_REQUEST:
                prefill.release()
            stack.push_async_exit(legs.pop_all())
            return answer, None

    async def _serve_alone(
        self, stack: AsyncExitStack, request: ClientRequest, reason: str | None, timing: Timing
    ) -> Answer:
        """The request as the client sent it, on a decode replica."""
        place = await choose(stack, "decode", self._decode, self.limits.replica_timeout_s)
        call = Call("POST", request.endpoint, request.headers, request.raw)
        decode = Leg("decode", self._decode.dispatch(place, call))
        stack.push_async_callback(decode.close)
        return Answer(await decode.open(), decode, reason, timing)

    async def _choose_pair(self, stack: AsyncExitStack) -> tuple[Any, Any]:
        """Places on a decode and on a prefill replica; None for the latter when none is free in time."""
        decode, prefill = await asyncio.gather(
            choose(stack, "decode", self._decode, self.limits.replica_timeout_s),
            choose(stack, "prefill", self._prefill, self.limits.prefill_wait_s),
            return_exceptions=True,
        )
        if isinstance(decode, BaseException):
            raise decode
        if isinstance(prefill, TandemError):
            logger.warning("serving a request on decode alone: %s", prefill)
            return decode, None
        if isinstance(prefill, BaseException):
            raise prefill
        return decode, prefill

    async def models(self, headers: Headers) -> tuple[ResponseStart, bytes]:
        """Decode's answer to GET /v1/models."""
        async with AsyncExitStack() as stack, deadline(self.limits.replica_timeout_s, "GET /v1/models"):
            place = await choose(stack, "decode", self._decode, self.limits.replica_timeout_s)
            leg = Leg("decode", self._decode.dispatch(place, Call("GET", "/v1/models", headers)))
            stack.push_async_callback(leg.close)
            start, body = await leg.start(), b""
            while isinstance(item := await leg.next(), bytes):
                body += item
            return start, body

    async def healthy(self) -> dict[RoleName, int]:
        """How many replicas of each role answer within `health_timeout_s`."""
        answers = await asyncio.gather(
            *(self._ask_all(role, "ping", self.limits.health_timeout_s) for role in self._roles)
        )
        return {role: len(replies) for role, replies in zip(self._roles, answers, strict=True)}

    async def engine_metrics(self) -> list[tuple[RoleName, str, str]]:
        """(role, replica, exposition) of every replica that answers within `metrics_timeout_s`."""
        answers = await asyncio.gather(
            *(self._ask_all(role, "metrics", self.limits.metrics_timeout_s) for role in self._roles)
        )
        pairs = zip(self._roles, answers, strict=True)
        return [(role, replica, text) for role, replies in pairs for replica, text in replies]

    async def _discard(self, transfer_id: str) -> None:
        """Have the prefill replica that holds this transfer give its KV back; where that fails, its lease will."""
        self.metrics.discards.inc()
        await self._ask_all("prefill", "discard", self.limits.health_timeout_s, transfer_id)

    async def _ask_all(self, role: RoleName, method: str, timeout_s: float, *arguments: object) -> list[Any]:
        """What the replicas of `role` return from `method`; those that fail or are late are left out."""
        try:
            async with deadline(timeout_s, f"asking the {role} replicas"), serve_errors(role):
                response = self._roles[role].broadcast(method, *arguments)
                replies = await response.results_async(return_exceptions=True)
        except TandemError as error:
            logger.warning("%s: %s", method, error)
            return []
        failures = [reply for reply in replies if isinstance(reply, BaseException)]
        for failure in failures:
            logger.warning("%s failed on a %s replica: %s", method, role, failure)
        return [reply for reply in replies if not isinstance(reply, BaseException)]


def _call(request: ClientRequest, body: Mapping[str, Any]) -> Call:
    return Call("POST", request.endpoint, request.headers, json.dumps(body).encode())
