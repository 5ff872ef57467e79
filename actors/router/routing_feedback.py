"""Connects the routing policy to a router: supplies the time, the replica lists and outcomes."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet

from actors.policy.decision import Decision
from actors.policy.planner import Planner
from actors.router.client_request import ClientRequest
from actors.telemetry.router_metrics import RouterMetrics
from configs.settings.router import RoutingSettings

logger = logging.getLogger(__name__)

LEARN_DELAY_S = 0.01
"""Delay before measured costs update the policy, so that the update delays no first token."""


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


Ongoing = Callable[[], Mapping[str, int] | None]
"""Returns the ongoing requests of each replica of a role; None while the replicas are unknown."""


class RoutingFeedback:
    """Chooses route and replicas of requests, and reports failures to the policy."""

    def __init__(self, settings: RoutingSettings, metrics: RouterMetrics, prefill: Ongoing, decode: Ongoing) -> None:
        self._prefill = prefill
        self._decode = decode
        self.planner = Planner(settings, Deferred())
        """Receives the outcome of each attempt (`Attempt` in `dispatch/attempt.py`)."""
        self._metrics = metrics

    def reconfigure(self, settings: RoutingSettings) -> None:
        """Apply new settings to later requests."""
        self.planner.reconfigure(settings)

    def decide(
        self,
        request: ClientRequest,
        whole: str | None,
        failed_prefill: AbstractSet[str],
        failed_decode: AbstractSet[str],
    ) -> Decision:
        """Return route and replicas of `request`; `whole` is a reason for local, or None."""
        decision = self.planner.decide(
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

    def failed(self, replica: str, silent: bool = False) -> None:
        """Report that a call to `replica` failed; `silent` is whether it sent nothing."""
        self.planner.failed(replica, _now(), silent)


def _now() -> float:
    return asyncio.get_running_loop().time()
