"""Engines and routing state of one model in a router."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from actors.engine_pool.engines import EnginePool, Slot
from actors.router.routing_feedback import RoutingFeedback
from actors.telemetry.router_metrics import RouterMetrics


@dataclass(frozen=True)
class Fleet:
    """Engines and routing state of one model, shared by all its requests.

    ``discard``  asks the prefill replica of a slot to free the KV of a transfer, given by its id
    """

    prefill: EnginePool
    decode: EnginePool
    metrics: RouterMetrics
    feedback: RoutingFeedback
    discard: Callable[[Slot, str], Awaitable[None]]
