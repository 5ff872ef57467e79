"""Dispatch of one request, with retries on other replicas until an engine answers."""

import asyncio
import logging
import math
import random
import time
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from http import HTTPStatus
from typing import Any

from actors.engine_pool.slots import Slot, SlotRequest
from actors.errors import (
    CannotResumeError,
    DeadlineError,
    EngineDownError,
    OverloadedError,
    RefusedError,
    SilentError,
    UnavailableError,
    with_causes,
)
from actors.policy.admission import longest_wait_s
from actors.policy.choice import MOVED, NO_PREFILL, OTHER_IDENTITY, PREFILL_FAILED, SEVERAL_CHOICES, Decision
from actors.request import Call, ReplayLog, StreamChunk
from actors.router.attempt import Attempt
from actors.router.client_request import (
    TOKENS_ONLY,
    ClientRequest,
    choices_of,
    is_one_token,
    needs_seed,
    prefill_may_sample,
    why_local,
    why_not_resumable,
)
from actors.router.model_router import ModelRouter, take_slot
from actors.rpc.messages import PrefillCandidate, PrefillOrder
from connectors.errors import TandemError

logger = logging.getLogger(__name__)

SEED_BITS = 31
"""Number of bits of a seed that the router generates for both engines."""

MOST_CANDIDATES = 4
"""Largest number of prefill engines in an order."""

OLDER_ENGINE = "older_engine"
"""The decode engine is of a release whose routers call prefill."""


class Dispatcher:
    """Dispatcher that makes the attempts of one request: calls to decode engines, one at a time.

    The decode engine calls the prefill engines of its order. Excludes a replica after it has failed
    the request, and a suspect decode replica only while another one is available. Makes at most
    `limits.attempts` attempts, besides refused ones; a new event for the client resets the number.
    """

    def __init__(self, request: ClientRequest, model: ModelRouter) -> None:
        self.request = request
        self.model = model
        self.limits = limits = model.limits
        self._loop = asyncio.get_running_loop()
        self._arrived_at = self._loop.time() - (time.monotonic() - request.arrived_at)
        timeout_s = limits.first_token_timeout_s if request.streams else limits.request_timeout_s
        self.ends_at = self._arrived_at + timeout_s
        """Deadline of a stream's first token, or of a whole answer, on the event loop's clock."""
        self.began_at = 0.0
        """Monotonic time of the first attempt."""
        self._local_reason = why_local(request.endpoint, request.body)
        self._prefill_samples = limits.first_token == "prefill" and prefill_may_sample(request.endpoint, request.body)
        self._on_prefill = limits.first_token == "prefill" and is_one_token(request.endpoint, request.body)
        """Whether a prefill engine alone may serve the request; false after one try."""
        self._seed = random.getrandbits(SEED_BITS) if self._prefill_samples and needs_seed(request.body) else None
        self._failed_prefill: set[str] = set()
        self._failed_decode: set[str] = set()
        """Replicas that failed, or lack the stored response of `previous_response_id`."""
        self._left_decode: AbstractSet[str] = frozenset()
        """Ranks of the replica from which the stream moved last, which may accept calls again."""
        self._suspect_decode: set[str] = set()
        """Replicas that sent nothing for `silence_timeout_s`, perhaps because of the transfer.

        The router tries them again only if no other replica is available.
        """
        self._movable = why_not_resumable(request.endpoint, request.body) is None
        self._transfer: Mapping[str, Any] | None = None
        """KV of the tokens to repeat, on the engine from which the stream moves."""
        self._identity: str | None = None
        """Identity of the engines that may continue the stream; None before it is interrupted."""
        self._frontend = ""
        """Digest of the frontend of the stream's engine (`EngineReplica.frontend`)."""
        self._decode_replica: str | None = None
        self._decode_tries = 0
        self._admitted = False
        """Whether the request has had a slot; later attempts are never refused."""
        self._last_error: UnavailableError | None = None
        self._silent_pairs = 0

    def extend(self, idle_s: float) -> None:
        """Set the deadline to `idle_s` seconds from now; limits the idle time after a token."""
        self.ends_at = self._loop.time() + idle_s

    @property
    def age_s(self) -> float:
        return self._loop.time() - self._arrived_at

    @property
    def left_s(self) -> float:
        return max(self.ends_at - self._loop.time(), 0.0)

    async def open(
        self, replay_log: ReplayLog = (), identity: str | None = None, transfer: Mapping[str, Any] | None = None
    ) -> Attempt:
        """Return an attempt whose answer has started; the answer first repeats `replay_log`.

        ``identity``  identity of the engine that sampled the tokens of `replay_log`; only decode
                      engines with the same identity continue it
        ``transfer``  parameters of the KV of prompt and `replay_log`, for the first engine that
                      does not refuse the call

        With a `replay_log`, an answer with status 429 or 5xx is a failure of its engine: the client
        has received status 200.

        Raises OverloadedError, UnavailableError or DeadlineError if no engine answers,
        CannotResumeError if an engine cannot repeat `replay_log` or no engine has `identity`,
        EngineError for an internal error of an engine.
        """
        self._identity, self._transfer = identity, transfer
        left_s = self.left_s
        try:
            async with asyncio.timeout(left_s):
                while True:
                    try:
                        attempt = await self._open_once(replay_log)
                        if replay_log and _is_busy_or_broken(status := attempt.start.status):
                            attempt.close()
                            raise UnavailableError(f"the engine that should continue the stream answered HTTP {status}")
                        return attempt
                    except RefusedError as error:
                        logger.debug("a decode engine refused a request; trying again: %s", error)  # until the deadline
                    except UnavailableError as error:
                        self.decode_failed(error)
        except TimeoutError:
            raise DeadlineError(f"waiting for an engine's answer took longer than {left_s:g} s") from None

    def decode_failed(self, error: UnavailableError) -> None:
        """Exclude the decode replica of a failed attempt, and report it to the routing policy.

        Raises `error` if no attempts are left. If the attempt had no decode replica yet, raises the
        error of the last failed replica, or `error` if none has failed.
        """
        if self._decode_replica is None:
            raise self._last_error or error
        self._transfer = None
        # All data-parallel ranks of a replica end together.
        down = isinstance(error.__cause__, EngineDownError)
        self._failed_decode |= self.model.decode.same_replica(self._decode_replica) if down else {self._decode_replica}
        self.model.planner.failed(self._decode_replica, self._loop.time(), isinstance(error, SilentError))
        logger.warning(
            "decode replica %s failed a request, which no longer uses it: %s", self._decode_replica, with_causes(error)
        )
        self._decode_replica = None
        self._decode_tries += 1
        self._last_error = error
        if self._decode_tries >= self.limits.attempts:
            raise error
        self.model.metrics.retries.labels("decode", "unavailable").inc()

    def decode_leaves(self) -> None:
        """Leave the decode replica, which is stopping or drained, with all its ranks."""
        if self._decode_replica is not None:
            self._left_decode = self.model.decode.same_replica(self._decode_replica)
            self._decode_replica = None

    def prefill_failed(self, replica: str, error: UnavailableError) -> None:
        """Exclude a prefill replica, with all its ranks, after it failed as the only engine."""
        self._failed_prefill |= self.model.prefill.same_replica(replica)
        self.model.planner.failed(replica, self._loop.time(), isinstance(error, SilentError))

    def reset_failures(self) -> None:
        self._decode_tries = 0

    async def _open_once(self, replay_log: ReplayLog) -> Attempt:
        """Return an attempt whose answer has started, on a decode engine or on prefill alone.

        If a replica lacks the stored response of `previous_response_id`, try the next replica. If
        no replica has it but one has failed, raise the last failure: the failed replica may have
        it. If none has failed, return the last HTTP 404.
        """
        decision = self._decide()
        if self._on_prefill and not decision.local:
            self._on_prefill = False  # once: later attempts have a decode engine
            with self._begin(decision) as alone:
                if await self._open_on_prefill(alone, decision):
                    return alone
                alone.close()
            decision = self._decide()
        while self._response_is_elsewhere(attempt := await self._send(replay_log, decision)):
            attempt.close()
            if not self._others():
                self._decode_replica = None
                assert self._last_error is not None, "a replica has failed"
                raise self._last_error
            decision = self._decide()
        return attempt

    async def _send(self, replay_log: ReplayLog, decision: Decision) -> Attempt:
        with self._begin(decision) as attempt:
            slot = attempt.take(self.model.decode, await self._choose_decode(decision))
            order = None
            if not decision.local and self._transfer:
                attempt.serve_locally(MOVED)
            elif not decision.local:
                order = await self._order(attempt, slot, replay_log)
            request = self.request
            attempt.send(
                Call(
                    "POST",
                    request.endpoint,
                    request.headers,
                    request.raw,
                    replay_log,
                    request.sequences,
                    self._movable,
                    self._transfer or None,
                ),
                order,
            )
            # Some streams begin before the first token. The router's keep-alive comments must not
            # end earlier, and until then decode may try other prefill engines.
            late = order is not None or request.endpoint == "/v1/responses"
            try:
                await attempt.open(self.limits.silence_timeout_s, to_first_token=late)
            except SilentError as error:
                if not attempt.transfers:
                    raise
                self._suspect(attempt)
                raise RefusedError("decode sent nothing after the prompt was computed") from error
            return attempt

    def _suspect(self, attempt: Attempt) -> None:
        """Exclude both engines of a silent attempt: the transfer may block either of them."""
        assert attempt.pair.prefill is not None
        assert attempt.pair.decode is not None
        self._failed_prefill.add(attempt.pair.prefill)
        self._suspect_decode.add(attempt.pair.decode)
        self.model.planner.failed(attempt.pair.decode, self._loop.time(), silent=True)
        logger.warning(
            "decode replica %s sent nothing after prefill replica %s computed the prompt; trying other replicas",
            attempt.pair.decode,
            attempt.pair.prefill,
        )
        self._silent_pairs += 1
        if self._silent_pairs >= self.limits.attempts:
            self._local_reason = PREFILL_FAILED
        else:
            self.model.metrics.retries.labels("prefill", "silent").inc()

    async def _order(self, attempt: Attempt, decode: Slot, replay_log: ReplayLog) -> PrefillOrder | None:
        """Take a prefill slot, and return the order for decode; None if decode serves alone."""
        decision, request, pool = attempt.decision, self.request, self.model.prefill
        if not decode.engine.calls_prefill:
            attempt.serve_locally(OLDER_ENGINE)
            return None
        identity = decode.engine.identity
        slot = None if self._has_no_match(decode) else await self._choose_prefill(decision, identity)
        if slot is None:
            other = OTHER_IDENTITY if self._has_no_match(decode) else NO_PREFILL
            attempt.serve_locally(PREFILL_FAILED if self._failed_prefill else other)
            return None
        attempt.take_prefill(slot)
        producer = slot.engine.producer
        if (choices_of(request.body) or 1) > 1 and not producer.first_token_multiple:
            # Decode's prefix cache would lack states or drafts of the received prompt, so the other
            # choices would compute it (docs/decisions/0056).
            attempt.serve_locally(SEVERAL_CHOICES)
            return None
        # Without an identity, decode's tokens could not be verified.
        samples = self._prefill_samples and not replay_log and bool(identity)
        first = PrefillCandidate(slot.replica_id, slot.engine.address, producer)
        limits = self.limits
        return PrefillOrder(
            (first, *self._spares(first, decision, identity)),
            *pool.caller,
            samples=samples and producer.first_token_multiple > 0,
            seed=self._seed,
            attempts=limits.attempts,
            timeout_s=limits.prefill_timeout_s,
            silence_s=limits.silence_timeout_s,
            refused_s=limits.prefill_wait_s,
            hold_s=self.left_s,
        )

    def _spares(self, first: PrefillCandidate, decision: Decision, identity: str) -> list[PrefillCandidate]:
        """Return other prefill engines that decode may call, of one replica each, best first."""
        pool, spares = self.model.prefill, list[PrefillCandidate]()
        engines, samples = pool.engines(), bool(first.producer.first_token_multiple)
        excluded = self._failed_prefill | pool.same_replica(first.replica)
        for name in dict.fromkeys((*decision.prefill, *pool.ongoing())):
            if len(spares) + 1 == MOST_CANDIDATES:
                break
            engine = engines.get(name)
            if engine is None or name in excluded or engine.identity != identity:
                continue
            if bool(engine.producer.first_token_multiple) == samples:
                spares.append(PrefillCandidate(name, engine.address, engine.producer))
                excluded |= pool.same_replica(name)
        return spares

    def _decide(self) -> Decision:
        return self.model.decide(self.request, self._local_reason, self._failed_prefill, self._avoided())

    def _avoided(self) -> set[str]:
        """Return the decode replicas excluded for this request."""
        excluded = self._failed_decode | self._suspect_decode
        if self.model.decode.has_engines(excluded | self._left_decode):
            excluded |= self._left_decode
        if self._identity is not None:
            engines = self.model.decode.engines().items()
            excluded |= {name for name, one in engines if one.identity != self._identity}
            # Most streams cannot continue with another chat template or `max_model_len`.
            others = {name for name, one in engines if one.frontend != self._frontend}
            if self.model.decode.has_engines(excluded | others):
                excluded |= others
        return excluded

    async def _open_on_prefill(self, attempt: Attempt, decision: Decision) -> bool:
        """Serve a one-token request on prefill alone.

        Returns False if this fails: a later attempt with decode then answers, also with the error
        of an invalid request.
        """
        slot = await self._choose_prefill(decision, None)
        if slot is None:
            return False
        attempt.take(self.model.prefill, slot)
        if not slot.engine.producer.first_token_multiple:
            return False
        request = self.request
        try:
            attempt.send(Call("POST", request.endpoint, request.headers, request.raw))
            start, items = await attempt.call.open(self.limits.silence_timeout_s, to_first_token=True)
        except TandemError as error:
            logger.warning(
                "prefill replica %s did not serve a one-token request; trying again with a decode engine: %s",
                slot.replica_id,
                with_causes(error),
            )
            if isinstance(error, UnavailableError):
                self.prefill_failed(slot.replica_id, error)
            return False
        if start.status >= HTTPStatus.BAD_REQUEST or (start.streams and not _has_tokens(items)):
            return False
        self.model.metrics.first_tokens.labels("ended").inc()
        attempt.opened_on_prefill(slot, start, items)
        return True

    def _response_is_elsewhere(self, attempt: Attempt) -> bool:
        """Return whether another replica may have the stored response that this one lacks.

        False unless this replica answered 404 to a `previous_response_id`; in that case, excludes
        this replica.
        """
        if attempt.start.status != HTTPStatus.NOT_FOUND or not self.request.body.get("previous_response_id"):
            return False
        assert attempt.pair.decode is not None
        self._failed_decode.add(attempt.pair.decode)
        return bool(self._others() or self._last_error)

    def _others(self) -> AbstractSet[str]:
        return self.model.decode.ongoing().keys() - self._avoided()

    def _begin(self, decision: Decision) -> Attempt:
        attempt = Attempt(self.model, self.request.prompt, decision, self._failed_prefill)
        self.began_at = self.began_at or attempt.began_at
        return attempt

    def _has_no_match(self, decode: Slot) -> bool:
        """Return whether usable prefill replicas accept calls, but none like `decode`."""
        accepting = self.model.prefill.accepting().items()
        identities = {one.identity for name, one in accepting if name not in self._failed_prefill}
        return bool(identities) and decode.engine.identity not in identities

    async def _choose_prefill(self, decision: Decision, identity: str | None) -> Slot | None:
        """Take a slot on a prefill engine of `identity`; None if none is free in time.

        Follows the choice of decode: a request that waits for decode must not hold a prefill slot.
        """
        try:
            wanted = SlotRequest(self._failed_prefill, decision.prefill, identity=identity)
            return await take_slot(self.model.prefill, self.limits.prefill_wait_s, wanted)
        except TandemError as error:
            logger.warning("serving a request on decode alone: %s", error)
            return None

    async def _choose_decode(self, decision: Decision) -> Slot:
        self._decode_replica = None
        request, timeout_s = self.request, self.limits.replica_timeout_s
        # A stream that continues is never refused because many requests wait.
        continues = self._identity is not None
        part = request.part or continues or self._admitted
        wanted = SlotRequest(
            self._avoided(),
            decision.decode,
            request.sequences,
            self._identity,
            part,
            tokens=0 if request.endpoint in TOKENS_ONLY else decision.kv_tokens,
            priority=request.priority,
            wait_s=math.inf if part else self._longest_wait_s(decision),
            continues=continues,
        )
        try:
            slot = await take_slot(self.model.decode, timeout_s, wanted, queues=True)
        except DeadlineError as error:
            if self._suspect_decode:
                self._suspect_decode.clear()
                return await self._choose_decode(decision)
            if self._identity is not None and self.model.decode.has_engines(self._failed_decode):
                raise CannotResumeError(
                    "the stream cannot be continued: the engine that computed it is not available, and the others "
                    "run another model, dtype or release; send the request again"
                ) from None
            if self._last_error is not None:
                raise self._last_error from self._last_error.__cause__
            raise error from None
        self._decode_replica = slot.replica_id
        self._admitted = True
        if self._identity is None:
            self._frontend = slot.engine.frontend
        return slot

    def _longest_wait_s(self, decision: Decision) -> float:
        """Return the longest estimated wait for a slot with which the request meets its deadlines.

        Raises OverloadedError if the prompt would wait longer for prefill. This is checked only
        while no request waits for decode, because that wait covers prefill's.
        """
        request, limits, chosen, model = self.request, self.limits, decision.chosen, self.model
        whole_s = None if request.streams else limits.request_timeout_s - self.age_s
        longest_s = longest_wait_s(chosen, limits.first_token_timeout_s - self.age_s, whole_s, request.crowds)
        _, waiting = model.decode.caller
        if chosen is not None and not waiting and request.endpoint not in TOKENS_ONLY:
            if chosen.queue_s > longest_s:
                work_s = chosen.compute_s / max(len(decision.prefill), 1)
                raise OverloadedError(
                    f"the prompt would wait about {chosen.queue_s:.0f} s, too long for its deadline; retry later",
                    model.prompt_returns.retry_s(work_s, chosen.queue_s - longest_s, self._loop.time()),
                )
            if chosen.queue_s < longest_s / 2:
                model.prompt_returns.forget()
        return longest_s


def _is_busy_or_broken(status: int) -> bool:
    """Return whether another engine may accept a request that was answered with `status`."""
    return status == HTTPStatus.TOO_MANY_REQUESTS or status >= HTTPStatus.INTERNAL_SERVER_ERROR


def _has_tokens(items: list[StreamChunk | bytes]) -> bool:
    return bool(items) and isinstance(items[-1], StreamChunk)
