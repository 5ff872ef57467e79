"""Connects the routing policy to a router: supplies time and replica lists, and reports what became
of each request."""

import asyncio
import json
import logging
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING

from actors.policy.decision import Decision
from actors.policy.inflight import InflightRequest
from actors.policy.planner import Planner
from actors.policy.prompts import Prompt
from actors.request import StreamChunk
from actors.telemetry.router_metrics import RouterMetrics
from configs.settings import RoutingSettings

if TYPE_CHECKING:
    from actors.router.client_request import ClientRequest

logger = logging.getLogger(__name__)

LEARN_DELAY_S = 0.01
"""Delay after which measured costs are applied, all together, so that no first token waits for it."""


class Deferred:
    """Runs callables together after LEARN_DELAY_S."""

    def __init__(self) -> None:
        self._given: list[Callable[[], None]] = []

    def __call__(self, do: Callable[[], None]) -> None:
        if not self._given:
            asyncio.get_running_loop().call_later(LEARN_DELAY_S, self._do_all)
        self._given.append(do)

    def _do_all(self) -> None:
        given, self._given = self._given, []
        for do in given:
            try:
                do()
            except Exception:
                logger.exception("cannot apply measured costs")


class AttemptFeedback:
    """Reports one attempt to the policy: both legs, or decode alone.

    It counts from the decision, before slots are taken: concurrent requests must see each other.
    Call `sent` first and `ended` in any case.
    """

    def __init__(self, planner: Planner, prompt: Prompt, decision: Decision) -> None:
        self._planner = planner
        self._prompt = prompt
        self._inflight: InflightRequest | None = None
        if decision.decode:
            self.sent(decision.decode[0], next(iter(decision.prefill), None))
        self._tokens = 0
        self._answered = False
        self._prefilled_at: float | None = None

    def sent(self, decode: str, prefill: str | None) -> None:
        """Report the replicas that the legs were sent to."""
        if self._inflight is not None:
            if (self._inflight.decode, self._inflight.prefill) == (decode, prefill):
                return
            self._planner.ended(self._inflight, _now(), broken=True)
        self._inflight = self._planner.begin(self._prompt, decode, prefill, _now())

    def prefilled(self, body: object) -> None:
        """Report that the prompt is computed (None), or the body of prefill's answer, whose usage
        has the token count."""
        if self._prefilled_at is None:
            self._prefilled_at = _now()
        if body is not None:
            self._tell_prefilled(_prompt_tokens(body))

    def opened(self, streams: bool) -> None:
        """Report that decode has started to answer. Only a stream shows when the first token came."""
        self._answered = True
        self._tell_prefilled()
        if streams and self._inflight is not None:
            self._planner.opened(self._inflight, _now())

    def passed_on(self, item: object) -> None:
        """Count the tokens of an item that is passed on to the client."""
        if isinstance(item, StreamChunk):
            self._tokens += sum(map(len, item.groups))

    def ended(self) -> None:
        """Report the end of the attempt."""
        self._tell_prefilled()
        if self._inflight is not None:
            self._planner.ended(self._inflight, _now(), self._tokens, broken=not self._answered)

    def _tell_prefilled(self, prompt_tokens: int | None = None) -> None:
        """Report the prompt once, with its token count if that has arrived."""
        if self._prefilled_at is not None and self._inflight is not None:
            self._planner.prefilled(self._inflight, self._prefilled_at, prompt_tokens)


Ongoing = Callable[[], Mapping[str, int] | None]
"""Returns the ongoing requests of each replica of a role; None while the replicas are unknown."""


class RoutingFeedback:
    """Decides where requests go, and reports their outcome to the policy."""

    def __init__(self, settings: RoutingSettings, metrics: RouterMetrics, prefill: Ongoing, decode: Ongoing) -> None:
        self._prefill = prefill
        self._decode = decode
        self._planner = Planner(settings, Deferred())
        self._metrics = metrics

    def reconfigure(self, settings: RoutingSettings) -> None:
        """Apply new settings to later requests."""
        self._planner.reconfigure(settings)

    def decide(
        self,
        request: "ClientRequest",
        whole: str | None,
        failed_prefill: AbstractSet[str],
        failed_decode: AbstractSet[str],
    ) -> Decision:
        """Return where `request` goes; `whole` is the reason why decode must serve all of it, if
        there is one."""
        decision = self._planner.decide(
            request.prompt,
            self._prefill(),
            self._decode(),
            _now(),
            whole=whole,
            session=request.session,
            avoid=failed_prefill | failed_decode,
            prefill_failed=bool(failed_prefill),
        )
        self._metrics.decisions.labels(decision.route, decision.reason).inc()
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug("decision %s", decision.explain())
        return decision

    def failed(self, replica: str) -> None:
        """Report that a call to `replica` failed."""
        self._planner.failed(replica, _now())

    def begin(self, request: "ClientRequest", decision: Decision) -> AttemptFeedback:
        """Start an attempt at `request` as decided."""
        return AttemptFeedback(self._planner, request.prompt, decision)


def _now() -> float:
    return asyncio.get_running_loop().time()


def _prompt_tokens(answer: object) -> int | None:
    """Return the prompt's token count from a completion's usage, or None."""
    if not isinstance(answer, bytes):
        return None
    try:
        tokens = json.loads(answer)["usage"]["prompt_tokens"]
    except (ValueError, KeyError, TypeError):
        return None
    return tokens if type(tokens) is int and tokens > 0 else None
