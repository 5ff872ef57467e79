"""The prefill leg's life in the router: watched from its dispatch to the end of the handover."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

from actors.errors import DeadlineError, RefusedError
from actors.router.leg import Leg, deadline
from actors.telemetry.latency_breakdown import LegTimestamps
from actors.telemetry.router_metrics import RouterMetrics
from connectors.errors import TandemError

logger = logging.getLogger(__name__)


BROKEN = frozenset({"refused", "rejected", "failed", "late"})
"""Outcomes after which no KV, or not all of it, comes from this leg. `refused`: the engine takes no more calls;
`rejected`: it has found the request to be a bad one."""

Discard = Callable[[str], Awaitable[None]]
"""Tells the prefill replicas that nobody will fetch a transfer's KV; bounded, and does not raise."""

Prefilled = Callable[[object], None]
"""Is told that the prompt is computed (None), and then the body of the answer, if there is one."""


class PrefillLeg:
    """Owns the task that reads the leg. `answered` is done when the prompt is computed, `broken` when the leg ends
    before its time.

    A broken leg does not fail the request: while decode has not begun to answer, the router tries another prefill
    replica, or asks decode to serve it alone, which is sooner than decode's connector can learn of it.

    A leg that ends before its handover may leave finished KV behind that no decode engine has heard of: decode has
    refused the request, or the client left before decode's engine had it. So it is discarded before the leg is closed.
    """

    def __init__(
        self,
        leg: Leg,
        transfer_id: str,
        timeout_s: float,
        metrics: RouterMetrics,
        discard: Discard,
        prefilled: Prefilled,
        slot: AsyncExitStack,
    ) -> None:
        """Gives `slot` back when the leg has ended."""
        self.broken: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.answered: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._leg = leg
        self._transfer_id = transfer_id
        self._timeout_s = timeout_s
        self._metrics = metrics
        self._discard = discard
        self._prefilled = prefilled
        self._slot = slot
        self._holds_kv = True
        self._told_all = False
        """Whether the body of its answer has come: nothing more is wanted of it."""
        self._ending: asyncio.Task[None] | None = None
        self._task = asyncio.create_task(self._watch(), name=f"prefill-leg-{transfer_id}")

    @property
    def timestamps(self) -> LegTimestamps:
        """Without timings until prefill has answered."""
        return self._leg.timestamps

    @property
    def accounted(self) -> bool:
        """Whether prefill has answered, or will not any more."""
        return self.answered.done() or self._task.done()

    async def account(self, at_most_s: float) -> None:
        """Wait until it is `accounted`, or for `at_most_s`."""
        waited_for: set[asyncio.Future[None]] = {self.answered, self._task}
        await asyncio.wait(waited_for, timeout=at_most_s, return_when=asyncio.FIRST_COMPLETED)

    def delivered(self) -> None:
        """The handover is done: nothing is held here for decode any more."""
        self._holds_kv = False

    def release(self, answers_soon: bool) -> None:
        """The leg need not count as ongoing any more, if its KV has been `delivered`.

        On a busy machine decode's first token overtakes prefill's answer. That has the times and the number of tokens
        from which costs are learnt, so the leg ends when it is there, or with the request. But where it does not answer
        soon, as decode has done without its KV, it is aborted.
        """
        if not self._holds_kv and (self._told_all or not answers_soon):
            self._task.cancel()
            self._end()

    async def close(self) -> None:
        """End the leg wherever it is; a prefill that still runs is aborted."""
        self._task.cancel()
        await asyncio.wait({self._task, self._end()})

    def _end(self) -> asyncio.Task[None]:
        """The leg's end, once, in a task of its own: whoever waits for it may be cancelled."""
        if self._ending is None:
            self._ending = asyncio.create_task(self._end_leg(), name=f"prefill-leg-ends-{self._transfer_id}")
        return self._ending

    async def _end_leg(self) -> None:
        try:
            if self._holds_kv and await self._leg.accepted():
                await self._discard(self._transfer_id)
        except Exception:
            logger.exception("transfer %s cannot be discarded: its lease will end it", self._transfer_id)
        finally:
            self._leg.close()
            await self._slot.aclose()

    async def _watch(self) -> None:
        outcome = "cancelled"
        try:
            async with deadline(self._timeout_s, f"prefill of transfer {self._transfer_id}"):
                outcome = await self._read_answer()
            if outcome == "done":
                self.answered.set_result(None)
            while outcome == "done" and (item := await self._leg.next()) is not None:
                self._prefilled(item)
                self._told_all = True
                if not self._holds_kv:
                    break
        except DeadlineError as error:
            outcome = "late"
            logger.warning("%s", error)
        except RefusedError as error:
            outcome = "refused"
            logger.info("prefill of transfer %s: %s", self._transfer_id, error)
        except TandemError as error:
            outcome = "failed"
            logger.warning("prefill of transfer %s failed: %s", self._transfer_id, error)
        except Exception:
            outcome = "failed"
            logger.exception("prefill of transfer %s failed", self._transfer_id)
        finally:
            self._metrics.prefill_legs.labels(outcome).inc()
            if outcome in {"refused", "rejected", "failed"}:
                # Nothing, or a replica that is gone; if not, its lease ends. Decode need not wait for a broadcast.
                self._holds_kv = False
            if outcome in BROKEN and not self.broken.done():
                self.broken.set_result(outcome)
            self._end()

    async def _read_answer(self) -> str:
        start = await self._leg.start()
        if start.status < 400:
            self._prefilled(None)
            return "done"
        body = await self._leg.next()
        level = logging.WARNING if start.status >= 500 else logging.INFO  # decode refuses a bad request too
        logger.log(level, "prefill of transfer %s: HTTP %d %r", self._transfer_id, start.status, body)
        # An engine that refuses for its own sake says nothing of the request: another one may take it.
        return "failed" if start.status >= 500 else "rejected"
