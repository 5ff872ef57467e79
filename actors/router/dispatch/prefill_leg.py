"""The prefill leg of a request, from its dispatch to the end of the handover."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

from actors.errors import DeadlineError, RefusedError, SilentError, with_causes
from actors.request import ResponseStart, StreamChunk
from actors.router.dispatch.leg import Leg, deadline
from actors.telemetry.latency_breakdown import LegTimestamps
from actors.telemetry.router_metrics import RouterMetrics
from configs.settings.router import RouterLimits
from connectors.errors import TandemError

logger = logging.getLogger(__name__)


BROKEN = frozenset({"refused", "rejected", "failed", "late"})
"""Outcomes after which the leg delivers no KV, or not all of it.

`refused`: the engine has no free slot or is stopping. `rejected`: the engine answered with a 4xx
status, or without the first token. `failed`: the engine died, was silent, answered with a 5xx
status or had an internal error. `late`: no answer within `prefill_timeout_s`.
"""

Discard = Callable[[], Awaitable[None]]
"""Function that calls the leg's prefill replica to free the KV of the transfer; has its own
timeout.
"""

Prefilled = Callable[[object], None]
"""Function called with None when the prompt is computed, then with the answer: body or first
token.
"""


class PrefillLeg:
    """A prefill leg, with the task that reads its answer.

    ``answered``  done when the prompt is computed
    ``broken``    outcome of the leg, set if the leg fails
    ``silent``    whether the leg failed because the engine sent nothing for `silence_timeout_s`
    ``start``     start of the answer if the leg has sampled the first token, else None
    ``items``     items of that answer

    A failed leg does not fail the request. Until decode starts to answer, the router retries on
    another prefill replica or asks decode to serve the request alone. The decode engine's connector
    would detect the failure later.

    A leg that ends before its handover may leave finished KV without a consumer: decode refused the
    request, or the client disconnected before decode received the request. So the leg discards the
    KV before it closes the call.
    """

    def __init__(
        self,
        leg: Leg,
        transfer_id: str,
        limits: RouterLimits,
        metrics: RouterMetrics,
        discard: Discard,
        prefilled: Prefilled,
        slot: AsyncExitStack,
        samples: bool = False,
    ) -> None:
        """Start to read `leg`; unwind `slot`, which gives the slot back, when the leg has ended.

        ``samples``  whether the leg samples the first token of the answer
        """
        self.start: ResponseStart | None = None
        self.items: asyncio.Queue[StreamChunk | bytes] = asyncio.Queue()
        self._samples = samples
        self.silent = False
        self.broken: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.answered: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._leg = leg
        self._transfer_id = transfer_id
        self._limits = limits
        self._metrics = metrics
        self._discard = discard
        self._prefilled = prefilled
        self._slot = slot
        self._holds_kv = True
        self._told_all = False
        """True once the body of the answer, or its first token, has arrived."""
        self._ending: asyncio.Task[None] | None = None
        self._task = asyncio.create_task(self._watch(), name=f"prefill-leg-{transfer_id}")

    @property
    def timestamps(self) -> LegTimestamps:
        """Timestamps of the leg; engine timings are present after the prefill engine's answer."""
        return self._leg.timestamps

    @property
    def accounted(self) -> bool:
        """True once the prefill engine has answered or can no longer answer."""
        return self.answered.done() or self._task.done()

    async def account(self, at_most_s: float) -> None:
        """Wait until the leg is `accounted`, at most `at_most_s` seconds."""
        waited_for: set[asyncio.Future[None]] = {self.answered, self._task}
        await asyncio.wait(waited_for, timeout=at_most_s, return_when=asyncio.FIRST_COMPLETED)

    def delivered(self) -> None:
        """Mark the handover as complete: the prefill engine holds no KV for decode."""
        self._holds_kv = False

    def release(self, answers_soon: bool) -> None:
        """End a `delivered` leg, so that the engine no longer counts it as ongoing.

        On a busy machine decode's first token may arrive before the prefill answer, whose timings
        and token counts update the routing policy. With `answers_soon` the leg waits for this
        answer or for the end of the request; otherwise it ends now.
        """
        if not self._holds_kv and (self._told_all or not answers_soon):
            self._task.cancel()
            self._end()

    async def close(self) -> None:
        """End the leg in any state; the engine aborts a running prefill or frees unfetched KV."""
        self._task.cancel()
        await asyncio.wait({self._task, self._end()})

    def _end(self) -> asyncio.Task[None]:
        """Start `_end_leg` once, in its own task: the cancellation of a caller must not stop it."""
        if self._ending is None:
            self._ending = asyncio.create_task(self._end_leg(), name=f"prefill-leg-ends-{self._transfer_id}")
        return self._ending

    async def _end_leg(self) -> None:
        try:
            if self._holds_kv and await self._leg.accepted():
                await self._discard()
        except TandemError as error:
            logger.warning("cannot discard transfer %s; its lease will expire: %s", self._transfer_id, error)
        except Exception:
            logger.exception("cannot discard transfer %s; its lease will expire", self._transfer_id)
        finally:
            self._leg.close()
            await self._slot.aclose()

    async def _watch(self) -> None:
        outcome = "cancelled"
        try:
            async with deadline(self._limits.prefill_timeout_s, f"prefill of transfer {self._transfer_id}"):
                outcome = await self._read_answer()
            if outcome == "done":
                self.answered.set_result(None)
            while outcome == "done" and (item := await self._leg.next()) is not None:
                if self._samples:
                    self.items.put_nowait(item)
                else:
                    self._prefilled(item)
                    self._told_all = True
                if not self._holds_kv:
                    break
        except DeadlineError as error:
            outcome = "late"
            logger.warning("%s", error)
        except RefusedError as error:
            outcome = "refused"
            logger.info("the prefill engine refused transfer %s; trying again: %s", self._transfer_id, error)
        except TandemError as error:
            outcome = "failed"
            self.silent = isinstance(error, SilentError)
            logger.warning(
                "prefill of transfer %s failed; trying again unless decode answers: %s",
                self._transfer_id,
                with_causes(error),
            )
        except Exception:
            outcome = "failed"
            logger.exception("prefill of transfer %s failed; trying again unless decode answers", self._transfer_id)
        finally:
            self._metrics.prefill_legs.labels(outcome).inc()
            if outcome in {"refused", "rejected", "failed"}:
                # No KV exists, its replica has stopped, or the lease will free it.
                self._holds_kv = False
            if outcome in BROKEN and not self.broken.done():
                self.broken.set_result(outcome)
            self._end()

    async def _read_answer(self) -> str:
        # Engines send heartbeats until their answer, not while the call is held for decode.
        silence_s = self._limits.silence_timeout_s
        start = await self._leg.start(silence_s)
        if start.status >= 400:
            return self._rejected(start, await self._leg.next(silence_s))
        if self._samples:
            return await self._read_first_token(start)
        self._prefilled(None)
        return "done"

    async def _read_first_token(self, start: ResponseStart) -> str:
        _, items = await self._leg.rest(start, self._limits.silence_timeout_s, to_first_token=True)
        if not items or not isinstance(items[-1], StreamChunk):
            return self._rejected(start, items)  # an event may report the error, with HTTP 200
        self.start = start
        for item in items:
            self.items.put_nowait(item)
        self._prefilled(None)
        self._prefilled(items[-1])
        self._told_all = True
        return "done"

    def _rejected(self, start: ResponseStart, body: object) -> str:
        level = logging.WARNING if start.status >= 500 else logging.INFO  # decode refuses an invalid request as well
        logger.log(level, "prefill of transfer %s failed: HTTP %d %r", self._transfer_id, start.status, body)
        # Retry after a server error: another engine may accept the request.
        return "failed" if start.status >= 500 else "rejected"
