"""Ray Serve autoscaling policies: `ScaleTogether` for both roles, `ScaleByOngoing` for one.

Serve (2.60) aggregates each metric over `look_back_period_s`, calls the policy about ten times a
second, and applies the delays, factors and bounds of each role's autoscaling_config to the result.
"""

import logging
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

from ray.serve.config import AutoscalingContext

from actors.autoscaling.replica_counts import (
    Bounds,
    DecodeLoad,
    PrefillLoad,
    decode_need,
    prefill_need,
    settle,
    together,
)
from configs.settings.parsing import parse_scaling

logger = logging.getLogger("ray.serve")

POLICY = "actors.autoscaling.policy:ScaleTogether"
ROLE_POLICY = "actors.autoscaling.policy:ScaleByOngoing"

LoadT = TypeVar("LoadT", PrefillLoad, DecodeLoad)


class ScaleTogether:
    """Policy that scales `Prefill` and `Decode` together, but not the deployments of `models`."""

    def __init__(self, **policy_kwargs: Any) -> None:
        self._settings = parse_scaling(policy_kwargs)
        self._decided: tuple[int, int] | None = None

    def __call__(self, contexts: Mapping[Any, AutoscalingContext]) -> tuple[dict[Any, int], dict[Any, dict[str, Any]]]:
        """Return the number of replicas by deployment id, and no state. Called by Serve.

        An exception would end the loop of Serve's controller over all applications
        (`ApplicationStateManager.update`).
        """
        by_name = {context.deployment_name: (key, context) for key, context in contexts.items()}
        if "Prefill" not in by_name or "Decode" not in by_name:
            return {}, {}
        (prefill_id, prefill), (decode_id, decode) = by_name["Prefill"], by_name["Decode"]
        needs = (
            prefill_need(_loads(prefill, PrefillLoad), _queued(prefill), self._settings),
            decode_need(_loads(decode, DecodeLoad), _queued(decode), self._settings),
        )
        bounds = _bounds(prefill), _bounds(decode)
        wanted = settle(needs[0], bounds[0], self._settings), settle(needs[1], bounds[1], self._settings)
        decided = together(*wanted, *bounds, self._settings)
        if decided != self._decided:
            self._decided = decided
            logger.info(
                "autoscaling: the load needs %s prefill and %s decode replicas (?: not measured); requesting %d and %d",
                *map(_shown, needs),
                *decided,
            )
        return dict(zip((prefill_id, decode_id), decided, strict=True)), {}


class ScaleByOngoing:
    """Scales one deployment to `target_ongoing_requests` sequences per replica.

    Serve's default policy counts requests itself: zero here, as requests bypass Serve.
    """

    def __call__(self, context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
        """Return the number of replicas, not rounded, and no state. Called by Serve."""
        ongoing = _metric(context, "ongoing")
        if not ongoing or context.config is None:
            return context.target_num_replicas, {}
        wanted = (sum(ongoing) + _queued(context)) / context.config.get_target_ongoing_requests()
        return max(wanted, 1.0), {}


def _queued(context: AutoscalingContext) -> float:
    # All routers report their queue to each replica.
    return max(_metric(context, "queued"), default=0.0)


def _metric(context: AutoscalingContext, name: str) -> list[float]:
    reported = (context.aggregated_metrics or {}).get(name, {})
    return [float(reported[one]) for one in context.running_replicas if one in reported]


def _loads(context: AutoscalingContext, kind: type[LoadT]) -> list[LoadT]:
    names = [field.name for field in fields(kind)]
    by_name = {name: (context.aggregated_metrics or {}).get(name, {}) for name in names}
    replicas = [one for one in context.running_replicas if any(one in values for values in by_name.values())]
    return [kind(**{name: float(values.get(one, 0.0)) for name, values in by_name.items()}) for one in replicas]


def _bounds(context: AutoscalingContext) -> Bounds:
    return Bounds(
        context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas, context.target_num_replicas
    )


def _shown(need: float | None) -> str:
    return "?" if need is None else f"{need:.2f}"
