"""Connect the routing policy to a router: supply the time and the replicas' load."""

import asyncio
import logging
from collections.abc import Callable
from collections.abc import Set as AbstractSet

from actors.engine_pool.engines import EnginePool
from actors.policy.decision import Decision
from actors.policy.planner import Planner
from actors.router.client_request import ClientRequest
from actors.telemetry.router_metrics import RouterMetrics
from configs.settings.router import RoutingSettings

logger = logging.getLogger(__name__)

LEARN_DELAY_S = 0.01
"""Delay in seconds before measured costs update the policy.

Otherwise the update would delay the first token of the request from which the costs come.
"""


class Deferred:
    """Queue that runs its callables at once, LEARN_DELAY_S after the first, and logs their
    errors.
    """

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
                logger.exception("cannot update the routing policy with a measured cost; ignoring the measurement")


class RoutingFeedback:
    """Connection of a router to the routing policy, for decisions and for reports of failures."""

    def __init__(
        self, settings: RoutingSettings, metrics: RouterMetrics, prefill: EnginePool, decode: EnginePool
    ) -> None:
        self._prefill = prefill
        self._decode = decode
        self.planner = Planner(settings, Deferred())
        """Routing policy; `Attempt` (`dispatch/attempt.py`) reports each outcome to it."""
        self._metrics = metrics

    def reconfigure(self, settings: RoutingSettings) -> None:
        """Apply new settings to later decisions."""
        self.planner.reconfigure(settings)

    def decide(
        self,
        request: ClientRequest,
        whole: str | None,
        failed_prefill: AbstractSet[str],
        failed_decode: AbstractSet[str],
    ) -> Decision:
        """Decide route and replicas of `request`, and count the decision.

        ``whole``           reason why decode must serve the whole request, or None
        ``failed_prefill``  prefill replicas that must not be chosen
        ``failed_decode``   decode replicas that must not be chosen
        """
        identities = self._prefill.identities() | self._decode.identities()
        decision = self.planner.decide(
            request.prompt,
            self._prefill.ongoing(),
            self._decode.ongoing(),
            _now(),
            whole=whole,
            session=request.session,
            avoid=failed_prefill | failed_decode,
            prefill_failed=bool(failed_prefill),
            stores=self._prefill.stores() | self._decode.stores(),
            identities=identities if len(set(identities.values())) > 1 else {},
        )
        self._metrics.decisions.labels(decision.route, decision.reason).inc()
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug("decision %s", decision.explain())
        return decision

    def failed(self, replica: str, silent: bool = False) -> None:
        """Report that a call to `replica` failed.

        ``silent``  whether the replica sent nothing for `silence_timeout_s`
        """
        self.planner.failed(replica, _now(), silent)


def _now() -> float:
    return asyncio.get_running_loop().time()
