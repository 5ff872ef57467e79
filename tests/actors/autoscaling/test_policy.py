"""The policy as Serve finds, calls and bounds it, in Serve's own autoscaling state."""

import time
from dataclasses import asdict

import pytest
from ray.serve._private.autoscaling_state import ApplicationAutoscalingState
from ray.serve._private.common import DeploymentID, ReplicaID, ReplicaMetricReport, TimeStampedValue
from ray.serve._private.config import DeploymentConfig, ReplicaConfig
from ray.serve._private.deployment_info import DeploymentInfo
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

from actors.autoscaling.policy import POLICY, ROLE_POLICY
from actors.autoscaling.replica_counts import DecodeLoad, PrefillLoad

PREFILL, DECODE = (DeploymentID(name=name, app_name="tandem") for name in ("Prefill", "Decode"))
AT_ONCE = {"upscale_delay_s": 0, "downscale_delay_s": 0, "min_replicas": 1, "max_replicas": 8}
TARGETS = {"prefill_busy": 0.5, "catch_up_s": 10, "kv_use": 0.5, "tpot_s": 0.05, "slack": 0.2}


class Application:
    """Return Serve's state of an application, and the replicas that it considers running."""

    def __init__(self, scaled=(PREFILL, DECODE), policy_kwargs=TARGETS, **config):
        self.state = ApplicationAutoscalingState("tandem")
        if policy_kwargs is not None:
            self.state.register(AutoscalingPolicy(policy_function=POLICY, policy_kwargs=policy_kwargs))
        self.running = {}
        for deployment in scaled:
            info = DeploymentInfo(
                deployment_config=DeploymentConfig(autoscaling_config=AutoscalingConfig(**(AT_ONCE | config))),
                replica_config=ReplicaConfig.create(lambda: None),
                start_time_ms=0,
                deployer_job_id="",
            )
            self.state.register_deployment(deployment, info, 1)

    def report(self, deployment, *loads):
        replicas = [ReplicaID(str(number), deployment) for number in range(len(loads))]
        self.running[deployment] = len(replicas)
        self.state.update_running_replica_ids(deployment, replicas)
        then = time.time() - 1
        for replica, load in zip(replicas, loads, strict=True):
            values = load if isinstance(load, dict) else asdict(load) if load is not None else {}
            metrics = {name: [TimeStampedValue(then, value)] for name, value in values.items()}
            self.state.record_request_metrics_for_replica(ReplicaMetricReport(replica, metrics, then))

    def decide(self):
        decided = self.state.get_decision_num_replicas({PREFILL: 1, DECODE: 1} | self.running)
        return {one.name: n for one, n in decided.items()}


BUSY = PrefillLoad(0, 1000, 2000, 500)
FLOODED = PrefillLoad(70_000, 1000, 2000, 500)
FULL = DecodeLoad(kv_use=1.0, running=10)
HALF = DecodeLoad(kv_use=0.5, running=5)
CALM = DecodeLoad(kv_use=0.1, running=1)


def queued(load, requests: float) -> dict[str, float]:
    return asdict(load) | {"queued": requests}


@pytest.mark.parametrize(
    ("config", "prefill", "decode", "decided"),
    [
        # Prefill has 2.0 engines of work and decode 3.0.
        ({}, [PrefillLoad(10_000, 1000, 2000, 500)], [FULL, HALF], (2, 3)),
        # The load needs eight engines; bounds and delays are Serve's.
        ({"max_replicas": 3}, [FLOODED], [CALM], (3, 1)),
        ({"upscale_delay_s": 600}, [FLOODED], [DecodeLoad()], (1, 1)),
        # Eight prefill engines feed two decode engines before decode reports any load.
        ({}, [FLOODED], [CALM], (8, 2)),
        # Before the first report, and while one role is unknown, nothing changes.
        ({}, [], [], (1, 1)),
        ({}, [None, None], [None, None, None], (2, 3)),
        # Idle replicas are removed: their reports show no load, and their capacity.
        ({}, [PrefillLoad(0, 0, 2000, 500)] * 3, [DecodeLoad()] * 3, (1, 1)),
        # All routers tell each engine their queue, so the largest report counts, not the sum: 100
        # prompts of 500 tokens in 10 s are 5,000 tokens a second more.
        ({}, [queued(BUSY, 0.0)] * 2, [CALM], (2, 1)),
        ({}, [queued(BUSY, 100.0), queued(BUSY, 40.0)], [CALM], (7, 2)),
        # Each role is scaled by its own queue.
        ({}, [queued(BUSY, 0.0)], [queued(FULL, 0.0)], (1, 2)),
        ({}, [queued(BUSY, 0.0)], [queued(FULL, 10.0)], (1, 4)),
    ],
)
def test_both_roles(config, prefill, decode, decided):
    """Through pickle, Serve's means, delays and bounds."""
    application = Application(**config)
    application.report(PREFILL, *prefill)
    application.report(DECODE, *decode)
    assert application.decide() == dict(zip(("Prefill", "Decode"), decided, strict=True))


def test_an_application_without_both_roles_is_left_alone():
    """No decision and no exception: one would stop the controller's work for every application."""
    application = Application(scaled=(DECODE,))
    application.report(DECODE, FULL)
    assert application.state.get_decision_num_replicas({DECODE: 1}) == {}


@pytest.mark.parametrize(
    ("ongoing", "queued", "wanted"),
    [([8, 8], 0, 4), ([8, 0], 0, 2), ([1], 0, 1), ([4, 4], 9, 5), ([64], 64, 8), ([None, None, None], 0, 3)],
)
def test_a_role_without_the_applications_policy(ongoing, queued, wanted):
    """One replica per four requests: what Serve's own policy does with requests that it counts."""
    policy = {"policy": {"policy_function": ROLE_POLICY}, "target_ongoing_requests": 4}
    application = Application(scaled=(DECODE,), policy_kwargs=None, **policy)
    loads = [None if one is None else {"ongoing": float(one), "queued": float(queued)} for one in ongoing]
    application.report(DECODE, *loads)
    assert application.state.get_decision_num_replicas({DECODE: len(ongoing)}) == {DECODE: wanted}
