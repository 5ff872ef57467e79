"""Dispatch of one request, with retries on other replicas until an engine answers."""

import asyncio
import logging
import random
import time
import uuid
from collections.abc import AsyncGenerator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import AsyncExitStack
from functools import partial
from http import HTTPStatus
from typing import Any

from actors.engine_pool.engines import Slot
from actors.errors import (
    CannotResumeError,
    DeadlineError,
    EngineDownError,
    HandoverError,
    RefusedError,
    SilentError,
    UnavailableError,
    with_causes,
)
from actors.policy.decision import NO_PREFILL, OTHER_IDENTITY, PREFILL_FAILED, SEVERAL_CHOICES, Decision
from actors.request import Call, ProducerAddress, ReplayLog, StreamChunk
from actors.router.client_request import ClientRequest, RequestTimer
from actors.router.dispatch.attempt import Attempt
from actors.router.dispatch.fleet import Fleet
from actors.router.dispatch.leg import Leg, choose, deadline
from actors.router.dispatch.prefill_leg import PrefillLeg
from actors.router.raw_json import write
from actors.router.request_shaping import (
    choices_of,
    decode_leg,
    first_token_leg,
    is_one_token,
    needs_seed,
    prefill_leg,
    why_decode_samples,
    why_local,
)
from actors.telemetry.latency_breakdown import RequestTimestamps
from configs.settings.base import RoleName
from configs.settings.router import RouterLimits
from connectors.errors import TandemError

logger = logging.getLogger(__name__)

SEED_BITS = 31
"""Number of bits of a seed that the router generates for both legs."""


class Dispatcher:
    """Dispatcher that makes the attempts of one request; each split attempt has a new transfer id.

    Excludes a replica after it has failed the request. Excludes a suspect decode replica only while
    another one is available. Retries a failed leg on another replica. Each leg has
    `limits.attempts` attempts, besides refused ones. After the last one of prefill, or at once if
    prefill rejects the request, decode computes the prompt. A failed or refused decode leg resets
    the number of prefill's attempts. A new event for the client resets the number of decode's
    attempts.
    """

    def __init__(self, request: ClientRequest, limits: RouterLimits, timing: RequestTimer, fleet: Fleet) -> None:
        self.timing = timing
        self.request = request
        self.limits = limits
        self._fleet = fleet
        self._local_reason = why_local(request.endpoint, request.body)
        self._prefill_samples = (
            limits.first_token == "prefill" and why_decode_samples(request.endpoint, request.body) is None
        )
        self._on_prefill = limits.first_token == "prefill" and is_one_token(request.endpoint, request.body)
        """Whether a prefill engine alone may serve the request; false after one try."""
        self._seed = random.getrandbits(SEED_BITS) if self._prefill_samples and needs_seed(request.body) else None
        self._failed_prefill: set[str] = set()
        self._failed_decode: set[str] = set()
        self._suspect_decode: set[str] = set()
        """Replicas that sent nothing for `silence_timeout_s`, perhaps because of the transfer.

        The router tries them again only if no other replica is available.
        """
        self._without_response: set[str] = set()
        """Replicas without the stored response of `previous_response_id`."""
        self._identity: str | None = None
        """Identity of the engines that may continue the stream; None before it is interrupted."""
        self._decode_replica: str | None = None
        self._decode_tries = 0
        self._last_error: UnavailableError | None = None
        self._refused_at: dict[RoleName, float] = {}
        """Monotonic time of the first refusal by an engine of a role since the call of `open`."""
        self._began_at: float | None = None

    async def open(self, replay_log: ReplayLog = (), identity: str | None = None) -> Attempt:
        """Return an attempt whose answer has started; the answer first repeats `replay_log`.

        ``identity``  identity of the engine that sampled the tokens of `replay_log`; only decode
                      engines with the same identity continue it

        With a `replay_log`, an answer with status 429 or 5xx is a failure of its engine: the client
        has received status 200.

        Raises OverloadedError, UnavailableError or DeadlineError if no engine answers,
        CannotResumeError if an engine cannot repeat `replay_log` or no engine has `identity`,
        EngineError for an internal error of an engine.
        """
        self._refused_at.clear()
        self._identity = identity
        async with deadline(self.timing.left_s, "waiting for an engine's answer"):
            while True:
                try:
                    attempt = await self._open_once(replay_log)
                    if replay_log and _is_busy_or_broken(status := attempt.start.status):
                        await attempt.close()
                        raise UnavailableError(f"the engine that should continue the stream answered HTTP {status}")
                    return attempt
                except RefusedError as error:
                    logger.debug("a decode engine refused a request; trying again: %s", error)  # until the deadline
                except UnavailableError as error:
                    self.decode_failed(error)

    async def first_token(self, attempt: Attempt) -> AsyncGenerator[StreamChunk | bytes, None]:
        """Yield the items of prefill's first token until decode takes over.

        Afterwards `attempt.items` are decode's items. Raises HandoverError if decode refuses the
        request, answers with status 429 or 5xx or is silent, or the prefill leg breaks;
        UnavailableError if the decode engine dies; DeadlineError if decode does not answer within
        `idle_timeout_s`; CannotResumeError if it answers otherwise and not with a stream;
        EngineError for an internal error of the engine.
        """
        assert attempt.prefill is not None
        items = attempt.prefill.items
        taking_over = asyncio.create_task(self._take_over(attempt), name="decode-takes-over")
        reading = asyncio.create_task(items.get())
        try:
            while not taking_over.done():
                await asyncio.wait({taking_over, reading}, return_when=asyncio.FIRST_COMPLETED)
                if reading.done():
                    yield reading.result()
                    reading = asyncio.create_task(items.get())
        finally:
            await _end(reading)
            if not taking_over.done():
                await _end(taking_over)
        await taking_over

    async def _take_over(self, attempt: Attempt) -> None:
        try:
            async with deadline(self.limits.idle_timeout_s, "decode's answer after the first token"):
                broken = await self._until_decode_opens(attempt)
        except RefusedError as error:
            raise HandoverError(f"decode refused a request after prefill's first token: {error}") from error
        if broken is not None:
            raise HandoverError(f"the handover broke after prefill's first token, with the outcome `{broken}`")
        if not attempt.start.streams:
            answered = f"decode answered HTTP {attempt.start.status} after prefill's first token"
            if _is_busy_or_broken(attempt.start.status):
                raise HandoverError(answered)
            raise CannotResumeError(f"{answered}; send the request again")

    def timestamps(self, attempt: Attempt) -> RequestTimestamps:
        """Return the request's timestamps up to the answer of `attempt`."""
        assert self._began_at is not None, "call `open` first"
        prefill = None if attempt.prefill is None else attempt.prefill.timestamps
        by_prefill = attempt.sampled_by == "prefill"
        return RequestTimestamps(
            arrived_at=self.request.arrived_at,
            read_at=self.request.read_at,
            tried_at=self._began_at,
            retried_at=attempt.began_at,
            slots_at=attempt.slots_at,
            decode=prefill if by_prefill and prefill is not None else attempt.decode.timestamps,
            prefill=None if by_prefill else prefill,
            streams=attempt.start.streams,
            by_prefill=by_prefill,
        )

    def decode_failed(self, error: UnavailableError) -> None:
        """Exclude the decode replica of a failed attempt, and report it to the routing policy.

        Raises `error` if no attempts are left. If the attempt had no decode replica yet, raises the
        error of the last failed replica, or `error` if none has failed.
        """
        if self._decode_replica is None:
            raise self._last_error or error
        # All data-parallel ranks of a replica end together.
        down = isinstance(error.__cause__, EngineDownError)
        self._failed_decode |= self._fleet.decode.same_replica(self._decode_replica) if down else {self._decode_replica}
        self._fleet.feedback.failed(self._decode_replica, isinstance(error, SilentError))
        logger.warning(
            "decode replica %s failed a request, which no longer uses it: %s", self._decode_replica, with_causes(error)
        )
        self._decode_replica = None
        self._decode_tries += 1
        self._last_error = error
        if self._decode_tries >= self.limits.attempts:
            raise error
        self._fleet.metrics.retries.labels("decode", "unavailable").inc()

    def prefill_failed(self, replica: str, error: UnavailableError) -> None:
        """Exclude a prefill replica, with all its ranks, after it failed as the only engine.

        Also reports the failure to the routing policy.
        """
        self._failed_prefill |= self._fleet.prefill.same_replica(replica)
        self._fleet.feedback.failed(replica, isinstance(error, SilentError))

    def reset_failures(self) -> None:
        """Reset the count of failed decode attempts after a new event for the client."""
        self._decode_tries = 0

    async def _open_once(self, replay_log: ReplayLog) -> Attempt:
        prefill_tries = 0
        while not (decision := self._decide()).local:
            if self._on_prefill:
                self._on_prefill = False  # once: later attempts have a decode leg
                if (alone := await self._try_on_prefill(decision)) is not None:
                    return alone
                continue
            attempt, broken = await self._try_split(replay_log, decision)
            if attempt is not None:
                return attempt
            if broken == "refused":
                if self._refused_for_s("prefill") > self.limits.prefill_wait_s:
                    self._local_reason = NO_PREFILL
            elif broken is not None:
                prefill_tries += 1
                if broken == "rejected" or prefill_tries >= self.limits.attempts:
                    self._local_reason = PREFILL_FAILED
                else:
                    self._fleet.metrics.retries.labels("prefill", broken).inc()
        return await self._serve_alone(replay_log, decision)

    def _refused_for_s(self, role: RoleName) -> float:
        """Record a refusal by an engine of `role`; return the seconds since the first one."""
        return time.monotonic() - self._refused_at.setdefault(role, time.monotonic())

    def _decide(self) -> Decision:
        return self._fleet.feedback.decide(self.request, self._local_reason, self._failed_prefill, self._avoided())

    def _avoided(self) -> set[str]:
        """Return the decode replicas excluded for this request."""
        excluded = self._failed_decode | self._suspect_decode | self._without_response
        if self._identity is not None:
            excluded |= {name for name, own in self._fleet.decode.identities().items() if own != self._identity}
        return excluded

    async def _try_on_prefill(self, decision: Decision) -> Attempt | None:
        """Serve a one-token request on prefill alone.

        Returns None if this fails: a later attempt with decode then answers, also with the error of
        an invalid request.
        """
        async with self._begin(decision) as attempt:
            slot: Slot | None = None
            try:
                slot = await self._choose_prefill(attempt.legs, decision, None)
                if not ProducerAddress.from_params(slot.metadata["producer"]).first_token_multiple:
                    return None
                attempt.slots_at = time.monotonic()
                if decision.decode:
                    attempt.sent(decision.decode[0], slot.replica_id)
                request = self.request
                call = Call("POST", request.endpoint, request.headers, request.raw)
                attempt.decode = Leg("prefill", self._fleet.prefill.dispatch(slot, call))
                attempt.legs.callback(attempt.decode.close)
                response = await attempt.decode.open(self.limits.silence_timeout_s, to_first_token=True)
            except TandemError as error:
                replica = "none" if slot is None else slot.replica_id
                logger.warning(
                    "prefill replica %s did not serve a one-token request; trying again with a decode engine: %s",
                    replica,
                    with_causes(error),
                )
                if slot is not None and isinstance(error, UnavailableError):
                    self.prefill_failed(slot.replica_id, error)
                return None
            start, items = response
            if start.status >= HTTPStatus.BAD_REQUEST or (start.streams and not _has_tokens(items)):
                return None  # decode reports the error
            attempt.prefilled(None)
            self._fleet.metrics.first_tokens.labels("ended").inc()
            return attempt.opened_on_prefill(slot, response)

    async def _try_split(self, replay_log: ReplayLog, decision: Decision) -> tuple[Attempt | None, str | None]:
        """Dispatch both legs. Return (attempt, None) when an answer has started.

        Returns (None, outcome) if `_until_decode_opens` returns an outcome, and (None, None) if the
        legs were not sent. Raises the errors of `_choose_decode` and of the decode leg.
        """
        async with self._begin(decision) as attempt:
            legs = attempt.legs
            prefill_legs = await legs.enter_async_context(AsyncExitStack())
            decode_slot, prefill_slot = await self._choose_pair(legs, prefill_legs, decision)
            attempt.slots_at = time.monotonic()
            if prefill_slot is None:
                other = OTHER_IDENTITY if self._has_no_match(decode_slot) else NO_PREFILL
                self._local_reason = PREFILL_FAILED if self._failed_prefill else other
                return None, None
            transfer_id = uuid.uuid4().hex
            producer = ProducerAddress.from_params(prefill_slot.metadata["producer"])
            if (choices_of(self.request.body) or 1) > 1 and not producer.first_token_multiple:
                # Decode's prefix cache would lack states or drafts of the received prompt, so the
                # other choices would compute it (docs/decisions/0056).
                self._local_reason = SEVERAL_CHOICES
                return None, None
            body = self.request.fields if self._seed is None else {**self.request.fields, "seed": self._seed}
            samples = self._prefill_samples and not replay_log and producer.first_token_multiple > 0
            samples = samples and bool(decode_slot.identity)  # decode's tokens could not be verified
            prefill_call = self._call(
                first_token_leg(body, transfer_id) if samples else prefill_leg(self.request.endpoint, body, transfer_id)
            )
            multiple = producer.first_token_multiple if samples else 0
            decode_body = decode_leg(body, transfer_id, producer, multiple)
            decode_call = self._call(decode_body, replay_log, self.request.sequences)
            if decode_slot.maybe_full:
                # Without this wait, prefill could compute prompts repeatedly for a decode engine
                # that refuses the call, and delay other requests.
                attempt.decode = self._dispatch_decode(legs, decode_slot, decode_call)
                await attempt.decode.taken(self.limits.silence_timeout_s)
            attempt.sent(decode_slot.replica_id, prefill_slot.replica_id)
            attempt.prefill = prefill = PrefillLeg(
                Leg(
                    "prefill",
                    self._fleet.prefill.dispatch(prefill_slot, prefill_call, transfer_id, self.timing.left_s),
                ),
                transfer_id,
                self.limits,
                self._fleet.metrics,
                partial(self._fleet.discard, prefill_slot, transfer_id),
                attempt.prefilled,
                prefill_legs.pop_all(),
                samples,
            )
            legs.push_async_callback(prefill.close)
            if decode_slot.maybe_full:
                legs.callback(attempt.decode.close)  # runs before `prefill.close`, which discards the KV
            else:
                attempt.decode = self._dispatch_decode(legs, decode_slot, decode_call)
            opening = asyncio.create_task(attempt.decode.open(to_first_token=True), name=f"decode-opens-{transfer_id}")
            attempt.opening = opening
            legs.push_async_callback(_end, opening)
            first: set[asyncio.Future[Any]] = {opening, prefill.broken, prefill.answered, attempt.decode.sampled}
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            if samples and prefill.answered.done() and not opening.done():
                return attempt.opened_by_prefill(), None
            broken = await self._until_decode_opens(attempt)
            return (attempt if broken is None else None), broken

    async def _until_decode_opens(self, attempt: Attempt) -> str | None:
        """Wait until decode's answer starts. Return None, or the outcome of a broken leg.

        After a broken leg, excludes the replicas that may have caused it, unless prefill refused
        the call. Reports failures to the routing policy. After decode's first token the prefill leg
        no longer matters. Raises the errors of the decode leg, among them SilentError if decode
        sends nothing for `silence_timeout_s` after this token.
        """
        prefill, opening, sampled, pair = attempt.prefill, attempt.opening, attempt.decode.sampled, attempt.pair
        assert prefill is not None
        assert opening is not None
        assert pair.prefill is not None
        # The decode engine can now fetch the KV, so its silence shows a failure.
        alive = await self._decode_is_alive(attempt.decode, {opening, sampled, prefill.broken})
        if sampled.done() and not opening.done():
            attempt.handed_over()
            if not await self._decode_is_alive(attempt.decode, {opening}):
                silence_s = self.limits.silence_timeout_s
                raise SilentError(f"the decode engine sent nothing for {silence_s:g} s; try again")
        if not alive:
            silence_s = self.limits.silence_timeout_s
            logger.warning(
                "decode sent nothing for %g s after the prompt was computed; trying other replicas", silence_s
            )
            self._failed_prefill.add(pair.prefill)
            assert pair.decode is not None
            self._suspect_decode.add(pair.decode)
            self._fleet.feedback.failed(pair.decode, silent=True)
            return "silent"
        if not opening.done():
            broken = prefill.broken.result()
            if broken == "failed":
                self._failed_prefill |= self._fleet.prefill.same_replica(pair.prefill)
            elif broken != "refused":
                self._failed_prefill.add(pair.prefill)
            if broken not in ("refused", "rejected"):
                self._fleet.feedback.failed(pair.prefill, prefill.silent)
            return broken
        attempt.opened(await opening)
        return None

    async def _serve_alone(self, replay_log: ReplayLog, decision: Decision) -> Attempt:
        """Send the unchanged request to one decode replica.

        If the replica lacks the stored response of `previous_response_id`, try the next replica.
        If no replica has the response but one has failed, raise the last failure: the failed
        replica may have the response. If none has failed, return the last HTTP 404.
        """
        while self._response_is_elsewhere(attempt := await self._serve_once(replay_log, decision)):
            await attempt.close()
            if not self._others():
                self._decode_replica = None
                assert self._last_error is not None, "a replica has failed"
                raise self._last_error
            decision = self._decide()
        return attempt

    def _response_is_elsewhere(self, attempt: Attempt) -> bool:
        """Return whether another replica may have the stored response that this one lacks.

        False unless this replica answered 404 to a `previous_response_id`; in that case, excludes
        this replica.
        """
        if attempt.start.status != HTTPStatus.NOT_FOUND or not self.request.body.get("previous_response_id"):
            return False
        assert attempt.pair.decode is not None
        self._without_response.add(attempt.pair.decode)
        return bool(self._others() or self._last_error)

    def _others(self) -> AbstractSet[str]:
        """Return the decode replicas that this request may still try."""
        return (self._fleet.decode.ongoing() or {}).keys() - self._avoided()

    async def _serve_once(self, replay_log: ReplayLog, decision: Decision) -> Attempt:
        async with self._begin(decision) as attempt:
            slot = await self._choose_decode(attempt.legs, decision)
            attempt.slots_at = time.monotonic()
            attempt.sent(slot.replica_id, None)
            request = self.request
            call = Call("POST", request.endpoint, request.headers, request.raw, replay_log, request.sequences)
            attempt.decode = self._dispatch_decode(attempt.legs, slot, call)
            # vLLM sends two events of such a stream before it computes. The router's keep-alive
            # comments must not end before the first token.
            late = request.endpoint == "/v1/responses"
            return attempt.opened(await attempt.decode.open(self.limits.silence_timeout_s, to_first_token=late))

    def _dispatch_decode(self, legs: AsyncExitStack, slot: Slot, call: Call) -> Leg:
        """Send the call to decode; `legs` cancels the call when the stack unwinds."""
        decode = Leg("decode", self._fleet.decode.dispatch(slot, call))
        legs.callback(decode.close)
        return decode

    def _begin(self, decision: Decision) -> Attempt:
        attempt = Attempt(self._fleet.feedback.planner, self.request.prompt, decision)
        if self._began_at is None:
            self._began_at = attempt.began_at
        return attempt

    async def _decode_is_alive(self, decode: Leg, waited_for: set[asyncio.Future[Any]]) -> bool:
        """Return True when one of `waited_for` is done, False after `silence_timeout_s` of silence.

        Heartbeats count as items.
        """
        now = asyncio.get_running_loop().time
        began_at = now()
        while (left_s := max(began_at, decode.heard_at) + self.limits.silence_timeout_s - now()) > 0:
            done, _ = await asyncio.wait(waited_for, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            if done:
                return True
        return False

    async def _choose_pair(
        self, stack: AsyncExitStack, prefill_stack: AsyncExitStack, decision: Decision
    ) -> tuple[Slot, Slot | None]:
        """Take slots on a decode replica, then a slot on a prefill replica of the same identity.

        The prefill slot is None if no such replica has one in time, or if the queue for prefill
        slots is full. Takes the prefill slot last: a request waiting for decode must not hold one.

        Raises UnavailableError if no decode engine runs, and OverloadedError if the queue for
        decode slots is full. If only decode replicas run that this request avoids, raises the
        error of the last one that failed, or DeadlineError if none failed.
        """
        decode = await self._choose_decode(stack, decision)
        if self._has_no_match(decode):
            return decode, None
        try:
            prefill = await self._choose_prefill(prefill_stack, decision, decode.identity)
        except TandemError as error:
            logger.warning("serving a request on decode alone: %s", error)
            return decode, None
        return decode, prefill

    def _has_no_match(self, decode: Slot) -> bool:
        """Return whether prefill replicas run that have not failed, but none like `decode`."""
        running = self._fleet.prefill.identities().items()
        identities = {identity for name, identity in running if name not in self._failed_prefill}
        return bool(identities) and decode.identity not in identities

    async def _choose_prefill(self, stack: AsyncExitStack, decision: Decision, identity: str | None) -> Slot:
        return await choose(
            stack,
            "prefill",
            self._fleet.prefill,
            self.limits.prefill_wait_s,
            self._failed_prefill,
            decision.prefill,
            identity=identity,
        )

    async def _choose_decode(self, stack: AsyncExitStack, decision: Decision) -> Slot:
        self._decode_replica = None
        avoid = self._avoided()
        try:
            slot = await choose(
                stack,
                "decode",
                self._fleet.decode,
                self.limits.replica_timeout_s,
                avoid,
                decision.decode,
                self.request.sequences,
                queues=True,
                part=self.request.part,
                identity=self._identity,
            )
        except DeadlineError as error:
            if self._suspect_decode:
                self._suspect_decode.clear()
                return await self._choose_decode(stack, decision)
            tried = self._failed_decode | self._without_response
            if self._identity is not None and self._fleet.decode.has_engines(tried):
                raise CannotResumeError(
                    "the stream cannot be continued: the engine that computed it is not available, and the others "
                    "run another model, dtype or release; send the request again"
                ) from None
            if self._last_error is not None:
                raise self._last_error from self._last_error.__cause__
            raise error from None
        self._decode_replica = slot.replica_id
        return slot

    def _call(self, body: Mapping[str, Any], replay_log: ReplayLog = (), sequences: int = 1) -> Call:
        return Call("POST", self.request.endpoint, self.request.headers, write(body), replay_log, sequences)


async def _end(task: asyncio.Task[Any]) -> None:
    """Cancel `task`, wait for its end, and discard its result."""
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        task.exception()


def _is_busy_or_broken(status: int) -> bool:
    """Return whether another engine may accept a request that was answered with `status`."""
    return status == HTTPStatus.TOO_MANY_REQUESTS or status >= HTTPStatus.INTERNAL_SERVER_ERROR


def _has_tokens(items: list[StreamChunk | bytes]) -> bool:
    return bool(items) and isinstance(items[-1], StreamChunk)
