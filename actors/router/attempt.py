"""One attempt at a request: a call to one engine, its slots, and what both report."""

import asyncio
import logging
import time
from dataclasses import asdict, replace
from functools import partial
from http import HTTPStatus
from typing import Self

from actors.engine_pool.engine_call import EngineCall
from actors.engine_pool.engines import EnginePool
from actors.engine_pool.slots import Slot
from actors.policy.choice import Decision
from actors.policy.loads import InflightRequest
from actors.policy.prompts import Prompt
from actors.request import Call, FirstTokenChunk, PrefillReport, ResponseStart, StreamChunk
from actors.router.client_request import ClientRequest
from actors.router.model_router import ModelRouter
from actors.rpc.messages import PrefillOrder
from actors.telemetry.latency_breakdown import CallTimes, RequestTimestamps
from actors.telemetry.router_metrics import Pair
from configs.settings.base import RoleName

logger = logging.getLogger(__name__)

LATE_S = 1.0
"""Timeout in seconds for the end of a call that has sent its answer; prefill's report may follow it
(`ANSWER_S` in `actors/engine/split_call.py`).
"""

COUNTED_AS = {"computed": "done", "full": "refused", "leaving": "refused", "silent": "failed"}
"""Outcomes of `tandem_prefill_legs`, where they differ from those of reports."""


class Attempt:
    """A call to a decode engine, which may call prefill engines; or to a prefill engine alone.

    `close` ends it, and so does an error in a `with` block. If the routing decision names replicas,
    the planner counts the attempt before it has slots: concurrent decisions then take each other
    into account.
    """

    start: ResponseStart
    items: list[StreamChunk | bytes]
    call: EngineCall
    pair: Pair

    def __init__(self, model: ModelRouter, prompt: Prompt, decision: Decision, failed_prefill: set[str]) -> None:
        """`failed_prefill` is shared: an attempt adds the prefill replicas that fail it."""
        self.decision = decision
        self.began_at = self.slots_at = time.monotonic()
        """Monotonic times at which the attempt began and at which it had its slots."""
        self._repeated = 0
        self.prompt_tokens: int | None = None
        """Number of tokens of the prompt, if the prefill engine reports it; else None."""
        self.sampled_by: RoleName = "decode"
        """Role of the engine whose first token the client receives."""
        self.accounted = asyncio.Event()
        """Set once prefill's timings have arrived or can no longer arrive."""
        self.is_open = False
        """Whether an answer has started."""
        self._model = model
        self._planner = model.planner
        self._prompt = prompt
        self._failed_prefill = failed_prefill
        self._slot: tuple[EnginePool, Slot] | None = None
        """Slot of the call, with its pool."""
        self._prefill_slot: Slot | None = None
        """Slot on the engine that decode calls; None after the handover."""
        self._report: PrefillReport | None = None
        """Last report about a prefill engine."""
        self._computed: PrefillReport | None = None
        self._tried_s = 0.0
        """Time from decode's acceptance to the beginning of its last try, without the first one."""
        self._inflight: InflightRequest | None = None
        self._answered = False
        self._delivered = False
        self._late: asyncio.TimerHandle | None = None
        if decision.decode:
            self._tell_planner(next(iter(decision.prefill), None), decision.decode[0])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.close()

    @property
    def local_reason(self) -> str | None:
        """Reason of the routing decision if decode serves the request alone, else None."""
        return self.decision.reason if self.decision.local else None

    @property
    def on_prefill(self) -> str | None:
        """Prefill replica of an attempt without a decode engine, else None."""
        return self.pair.prefill if self.pair.decode is None else None

    @property
    def transfers(self) -> bool:
        """True if prefill has computed the prompt, and decode has not sampled a token."""
        return not self._delivered and self._report is not None and self._report.outcome == "computed"

    def take(self, pool: EnginePool, slot: Slot) -> Slot:
        """Own the slot of the call; `close` gives it back."""
        self._slot = (pool, slot)
        if pool is self._model.decode:
            self._tell_planner(next(iter(self.decision.prefill), None), slot.replica_id)
        elif self.decision.decode:
            self._tell_planner(slot.replica_id, self.decision.decode[0])
        return slot

    def take_prefill(self, slot: Slot) -> None:
        """Own the slot of the prefill engine that decode will call."""
        self._prefill_slot = slot
        self._tell_planner(slot.replica_id)

    def serve_locally(self, reason: str) -> None:
        """Replace the decision: decode serves the request alone."""
        self._give_back_prefill()
        self.decision = self.decision._replace(route="local", reason=reason, prefill=(), chosen=None, other=None)
        self._model.metrics.decisions.labels("local", reason).inc()
        self._tell_planner(None)

    def send(self, call: Call, order: PrefillOrder | None = None) -> None:
        """Send the call on its slot."""
        assert self._slot is not None, "call `take` first"
        pool, slot = self._slot
        self.slots_at = time.monotonic()
        self._repeated = sum(map(len, call.replay_log))
        if order is None:
            self.accounted.set()
        self.call = pool.dispatch(slot, call, self, order)

    def _tell_planner(self, prefill: str | None, decode: str | None = None) -> None:
        """Report the engines to the planner, in place of those reported before.

        ``prefill``  prefill replica; None if decode serves the attempt alone
        ``decode``   decode replica; None: unchanged
        """
        decode = decode or self.pair.decode
        assert decode is not None
        self.pair = Pair(prefill, decode)
        if self._inflight is None or (self._inflight.decode, self._inflight.prefill) != (decode, prefill):
            if self._inflight is not None:
                self._planner.ended(self._inflight, _now(), broken=True)
            self._inflight = self._planner.begin(self._prompt, decode, prefill, _now())
        if self._slot is not None and self._slot[0] is self._model.decode:
            self._planner.admitted(self._inflight)

    def reported(self, report: PrefillReport) -> None:
        """Apply a report of the decode engine: to slots, policy, metrics and timestamps."""
        before, self._report = self._report, report
        if report.outcome == "alone":
            self._tried_s = report.tried_s
            self._give_back_prefill()
            self.accounted.set()
            if not self.is_open:
                self.serve_locally(report.message)
            return
        if before is not None and before.replica != report.replica:
            self._tried_s = report.tried_s
            if before.outcome in ("failed", "silent", "late"):
                self._model.metrics.retries.labels("prefill", COUNTED_AS.get(before.outcome, before.outcome)).inc()
        slot, prefill = self._prefill_slot, self._model.prefill
        if slot is not None:
            if slot.replica_id != report.replica:
                prefill.move(slot, report.replica)
            prefill.record(slot, report.outcome, report.ongoing)
        match report.outcome:
            case "accepted":
                if not self._delivered:
                    self._tell_planner(report.replica)
                return
            case "computed":
                self._computed = report
                self.prompt_tokens = report.prompt_tokens
                if self._inflight is not None:
                    self._planner.prefilled(self._inflight, _now(), report.prompt_tokens)
            case "full" | "leaving":
                pass
            case outcome:
                level = logging.INFO if outcome == "rejected" else logging.WARNING  # decode refuses it as well
                logger.log(level, "prefill replica %s: %s: %s", report.replica, outcome, report.message)
                if not self._delivered:
                    same = self._model.prefill.same_replica(report.replica)
                    self._failed_prefill.update(same if outcome == "failed" else {report.replica})
                    if outcome != "rejected":
                        self._planner.failed(report.replica, _now(), outcome == "silent")
        if before is None or (before.replica, before.outcome) != (report.replica, "computed"):
            self._model.metrics.prefill_legs.labels(COUNTED_AS.get(report.outcome, report.outcome)).inc()
        if self._delivered:
            self.accounted.set()

    def sampled(self) -> None:
        """Give back the prefill slot: decode has sampled its first token, so it has the KV."""
        self._delivered = True
        self._give_back_prefill()
        if self._report is not None and self._report is self._computed:
            self.accounted.set()
        if self._inflight is not None:
            self._planner.handed_over(self._inflight)
            if self.is_open and self.start.streams and not self._answered:
                self._opened()

    async def open(self, silence_s: float, to_first_token: bool = False) -> None:
        """Wait for the start of the answer, and report it to the planner unless it is an error.

        The time of the first token is known, and reported, for streams only. Raises the errors of
        `EngineCall.open`.
        """
        self.start, self.items = await self.call.open(silence_s, to_first_token)
        self.is_open = True
        if self.start.status >= HTTPStatus.BAD_REQUEST:
            return
        if any(isinstance(item, FirstTokenChunk) for item in self.items):
            self.sampled_by = "prefill"  # decode may not have the KV yet
            if not self._delivered:
                return
        if not self.start.streams:
            self.sampled()
        self._opened()

    def opened_on_prefill(self, slot: Slot, start: ResponseStart, items: list[StreamChunk | bytes]) -> None:
        """Keep the start of an answer from prefill alone.

        When the attempt ends, the planner no longer assumes the prompt in decode's prefix cache.
        """
        self.sampled_by = "prefill"
        self.start, self.items = start, items
        self.pair = Pair(slot.replica_id, None)
        self.is_open = True
        if self._inflight is not None:
            self._planner.prefilled(self._inflight, _now())

    def explain(self) -> str:
        """Return the decision, and the engines that served the request, as JSON.

        `received_kv`: true if decode received prefill's KV; false after a failed transfer or by a
        local route; null without timings of decode.
        """
        timings = self.call.times.timings if self.sampled_by == "decode" else None
        served = asdict(self.pair) | {"received_kv": None if timings is None else timings.received_kv}
        return self.decision.explain(served=served)

    def timestamps(self, request: ClientRequest, tried_at: float) -> RequestTimestamps:
        """Return the times of `request`, whose first attempt began at `tried_at`.

        The clocks of hosts differ: prefill's call begins with decode's last try.
        """
        decode, report, prefill = self.call.times, self._computed, None
        if self._tried_s:
            decode = replace(decode, sent_at=decode.sent_at + self._tried_s)
        if report is not None and report.replica == self.pair.prefill:
            sent_at = decode.reached_at
            prefill = CallTimes(sent_at, sent_at + report.took_s, report.timings)
        elif self.pair.prefill is not None and self.pair.decode is not None:
            prefill = CallTimes(decode.sent_at, decode.answered_at, None)
        by_prefill = self.sampled_by == "prefill"
        return RequestTimestamps(
            arrived_at=request.arrived_at,
            read_at=request.read_at,
            tried_at=tried_at,
            retried_at=decode.sent_at if self._tried_s else self.began_at,
            slots_at=self.slots_at,
            decode=decode,
            prefill=None if by_prefill else prefill,
            streams=self.start.streams,
            by_prefill=by_prefill,
        )

    def report_end(self, tokens: int = 0, interrupted: bool = False) -> None:
        """Report the end of this attempt to the planner, which ignores repeated reports.

        ``tokens``       number of tokens of decode's answer
        ``interrupted``  whether another attempt continues the answer
        """
        if self._inflight is not None:
            ended = partial(self._planner.ended, self._inflight, _now(), tokens, self._repeated)
            ended(broken=not self._answered, interrupted=interrupted)

    def close(self, tokens: int = 0, complete: bool = False) -> None:
        """Cancel the running call, give back its slots, and report the end as `report_end` does.

        ``complete``  whether the call has sent its answer: it then ends by itself, within LATE_S
        """
        if self._slot is not None:
            # The client of a complete answer may send its next request before the call has ended.
            (pool, slot), self._slot = self._slot, None
            pool.give_back(slot)
        if complete and not self.call.over:
            self.call.reader = partial(self._close_late, tokens)
            self._late = asyncio.get_running_loop().call_later(LATE_S, self._close_late, tokens)
            return
        if self._late is not None:
            self._late.cancel()
        if hasattr(self, "call"):
            self.call.reader = None
            self.call.cancel()
        if self._prefill_slot is not None and self._report is not None:
            if self._report.outcome == "accepted":
                self._model.metrics.prefill_legs.labels("cancelled").inc()
            if self._report.outcome in ("accepted", "computed"):
                self._model.metrics.discards.inc()
        self._give_back_prefill()
        self.accounted.set()
        self.report_end(tokens)

    def _close_late(self, tokens: int) -> None:
        try:
            self.close(tokens)
        except Exception:  # would close the connection, with the calls of others
            logger.exception("cannot record the end of a request")

    def _opened(self) -> None:
        self._answered = True
        if self._inflight is not None:
            if any(isinstance(item, StreamChunk) for item in self.items):
                self._planner.computed(self._inflight)
            if self.start.streams:
                self._planner.opened(self._inflight, _now())

    def _give_back_prefill(self) -> None:
        slot, self._prefill_slot = self._prefill_slot, None
        if slot is not None:
            self._model.prefill.give_back(slot)


def _now() -> float:
    return asyncio.get_running_loop().time()
