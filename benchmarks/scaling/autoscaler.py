"""Serve's own autoscaling state (2.60) on the simulation's clock."""

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from ray.serve._private import autoscaling_state
from ray.serve._private.common import (
    RUNNING_REQUESTS_KEY,
    DeploymentHandleSource,
    DeploymentID,
    HandleMetricReport,
    ReplicaID,
    ReplicaMetricReport,
    TimeStampedValue,
)
from ray.serve._private.config import DeploymentConfig, ReplicaConfig
from ray.serve._private.constants import (
    RAY_SERVE_AUTOSCALING_METRIC_RECORD_INTERVAL_FACTOR,
    RAY_SERVE_HANDLE_AUTOSCALING_METRIC_PUSH_INTERVAL_S,
)
from ray.serve._private.deployment_info import DeploymentInfo
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

ROLES = ("Prefill", "Decode")


@dataclass
class Clock:
    """Replacement of `time` in Serve's modules."""

    now_s: float = 0.0

    def time(self) -> float:
        return self.now_s

    def monotonic(self) -> float:
        return self.now_s


@dataclass(frozen=True)
class Policy:
    """A policy, by its name in the results."""

    name: str
    application: Mapping[str, Any] | None = None  # its part of Serve's config file
    targets: tuple[float, float] = (2.0, 2.0)  # `target_ongoing_requests` of each role


@dataclass
class _Series:
    keep_s: float
    points: defaultdict[str, deque[TimeStampedValue]] = field(default_factory=lambda: defaultdict(deque))

    def add(self, values: Mapping[str, float], now_s: float) -> None:
        for name, value in values.items():
            self.points[name].append(TimeStampedValue(now_s, value))
        for points in self.points.values():
            while points and points[0].timestamp < now_s - self.keep_s:
                points.popleft()

    def snapshot(self) -> dict[str, list[TimeStampedValue]]:
        return {name: list(points) for name, points in self.points.items() if points}


class Autoscaler:
    """One application under `policy`; `config` is the autoscaling_config of both roles."""

    def __init__(self, policy: Policy, config: Mapping[str, Any], clock: Clock) -> None:
        self._clock = clock
        self._ids = {role: DeploymentID(name=role, app_name="tandem") for role in ROLES}
        self._state = autoscaling_state.ApplicationAutoscalingState("tandem")
        if policy.application is not None:
            self._state.register(AutoscalingPolicy(**policy.application))
        for role, target in zip(ROLES, policy.targets, strict=True):
            own = AutoscalingConfig(**config, target_ongoing_requests=target)
            info = DeploymentInfo(
                deployment_config=DeploymentConfig(autoscaling_config=own),
                replica_config=ReplicaConfig.create(lambda: None),
                start_time_ms=0,
                deployer_job_id="",
            )
            self._state.register_deployment(self._ids[role], info, own.min_replicas)
        self.record_every_s = own.look_back_period_s * RAY_SERVE_AUTOSCALING_METRIC_RECORD_INTERVAL_FACTOR
        self.push_every_s = RAY_SERVE_HANDLE_AUTOSCALING_METRIC_PUSH_INTERVAL_S
        self._keep_s = own.look_back_period_s
        self._replicas: dict[tuple[str, int], _Series] = {}
        self._handles = {role: _Series(self._keep_s) for role in ROLES}

    def record(self, role: str, queued: int, ongoing: Mapping[int, int], stats: Mapping[int, Any]) -> None:
        now_s = self._clock.now_s
        running = {f"running {number}": float(count) for number, count in ongoing.items()}
        self._handles[role].add({"queued": float(queued), **running}, now_s)
        for number, values in stats.items():
            self._replicas.setdefault((role, number), _Series(self._keep_s)).add(values, now_s)

    def push(self, role: str, running: Sequence[int]) -> None:
        ids = self.knows(role, running)
        now_s = self._clock.now_s
        for number, replica in ids.items():
            series = self._replicas.get((role, number))
            if series is not None:
                self._state.record_request_metrics_for_replica(ReplicaMetricReport(replica, series.snapshot(), now_s))
        handle = self._handles[role].snapshot()
        by_replica = {
            replica.to_full_id_str(): handle[f"running {number}"]
            for number, replica in ids.items()
            if f"running {number}" in handle
        }
        self._state.record_request_metrics_for_handle(
            HandleMetricReport(
                deployment_id=self._ids[role],
                handle_id=f"router {role}",
                actor_id="router",
                handle_source=DeploymentHandleSource.REPLICA,
                queued_requests=handle.get("queued", []),
                metrics={RUNNING_REQUESTS_KEY: by_replica},
                timestamp=now_s,
            )
        )

    def knows(self, role: str, running: Sequence[int]) -> dict[int, ReplicaID]:
        """The controller observes starting and stopping replicas without a report."""
        ids = {number: ReplicaID(str(number), self._ids[role]) for number in running}
        self._state.update_running_replica_ids(self._ids[role], list(ids.values()))
        return ids

    def decide(self, targets: Mapping[str, int]) -> dict[str, int]:
        decided = self._state.get_decision_num_replicas({self._ids[role]: count for role, count in targets.items()})
        return {one.name: count for one, count in decided.items()}


@contextmanager
def simulated_time(clock: Clock) -> Iterator[None]:
    """Make Serve's autoscaling modules read `clock` instead of the real time."""
    with (
        patch("ray.serve._private.autoscaling_state.time", clock),
        patch("ray.serve.autoscaling_policy.time", clock),
    ):
        yield
