"""The policy as Serve finds, calls and bounds it: Serve's own autoscaling state, reports,
contexts.
"""

import time
from dataclasses import asdict

import pytest
from ray.serve._private.autoscaling_state import ApplicationAutoscalingState
from ray.serve._private.common import DeploymentID, ReplicaID, ReplicaMetricReport, TimeStampedValue
from ray.serve._private.config import DeploymentConfig, ReplicaConfig
from ray.serve._private.deployment_info import DeploymentInfo
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy
from ray.serve.schema import ServeApplicationSchema

from actors.autoscaling.policy import POLICY, ROLE_POLICY
from actors.autoscaling.replica_counts import DecodeLoad, PrefillLoad
from configs.settings.base import SettingsError

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
        """Report each load from one replica, a second ago."""
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


def test_both_roles_from_what_each_lacks():
    """Prefill has 2.0 engines of work and decode 3.0: through pickle, Serve's means, delays and
    bounds.
    """
    application = Application()
    application.report(PREFILL, PrefillLoad(10_000, 1000, 2000, 500))
    application.report(DECODE, DecodeLoad(kv_use=1.0, running=10), DecodeLoad(kv_use=0.5, running=5))
    assert application.decide() == {"Prefill": 2, "Decode": 3}


def test_bounds_are_serves():
    """The load needs eight engines, and the limit is three."""
    application = Application(max_replicas=3)
    application.report(PREFILL, PrefillLoad(70_000, 1000, 2000, 500))
    application.report(DECODE, DecodeLoad(kv_use=0.1, running=1))
    assert application.decide() == {"Prefill": 3, "Decode": 1}


def test_decode_grows_with_prefill():
    """Eight prefill engines feed two decode engines before decode reports any load."""
    application = Application()
    application.report(PREFILL, PrefillLoad(70_000, 1000, 2000, 500))
    application.report(DECODE, DecodeLoad(kv_use=0.1, running=1))
    assert application.decide() == {"Prefill": 8, "Decode": 2}


def test_delays_are_serves():
    """A short load changes nothing within `upscale_delay_s`."""
    application = Application(upscale_delay_s=600)
    application.report(PREFILL, PrefillLoad(70_000, 1000, 2000, 500))
    application.report(DECODE, DecodeLoad())
    assert application.decide() == {"Prefill": 1, "Decode": 1}


def test_replicas_that_say_nothing_change_nothing():
    """Before the first report, and while one role is unknown, nothing changes."""
    application = Application()
    assert application.decide() == {"Prefill": 1, "Decode": 1}
    application.report(PREFILL, None, None)
    application.report(DECODE, None, None, None)
    assert application.decide() == {"Prefill": 2, "Decode": 3}


def test_replicas_that_are_idle_are_given_back():
    """Idle replicas are removed: their reports show no load, and their capacity."""
    application = Application()
    application.report(PREFILL, *[PrefillLoad(0, 0, 2000, 500)] * 3)
    application.report(DECODE, *[DecodeLoad()] * 3)
    assert application.decide() == {"Prefill": 1, "Decode": 1}


def test_an_application_without_both_roles_is_left_alone():
    """No decision and no exception: one would stop the controller's work for every application."""
    application = Application(scaled=(DECODE,))
    application.report(DECODE, DecodeLoad(kv_use=1.0, running=1))
    assert application.state.get_decision_num_replicas({DECODE: 1}) == {}


def test_a_wrong_key_is_refused_where_serve_makes_the_policy():
    """A wrong key is refused by name when Serve creates the policy."""
    with pytest.raises(SettingsError, match="tpot: no such setting"):
        Application(policy_kwargs={"tpot": 1})


def test_the_name_in_a_config_file():
    """Serve's schema accepts the policy as documented."""
    schema = ServeApplicationSchema(
        import_path="app.main:build", autoscaling_policy={"policy_function": POLICY, "policy_kwargs": TARGETS}
    )
    assert AutoscalingPolicy(**schema.autoscaling_policy).get_policy()(**TARGETS)


def test_prompts_that_wait_in_routers_count():
    """All routers tell each engine their queue, so the policy takes the largest report, not the
    sum.
    """
    application = Application()
    busy = asdict(PrefillLoad(0, 1000, 2000, 500))
    application.report(DECODE, DecodeLoad(kv_use=0.1))
    application.report(PREFILL, busy | {"queued": 0.0}, busy | {"queued": 0.0})
    assert application.decide()["Prefill"] == 2
    application.report(PREFILL, busy | {"queued": 100.0}, busy | {"queued": 40.0})
    assert application.decide()["Prefill"] == 7, "100 prompts of 500 tokens in 10 s are 5,000 tokens a second more"


def test_requests_that_wait_for_decode_count():
    """Each role is scaled by its own queue: 10 requests wait for decode, none for prefill."""
    application = Application()
    full, busy = asdict(DecodeLoad(kv_use=1.0, running=10)), asdict(PrefillLoad(0, 1000, 2000, 500))
    application.report(PREFILL, busy | {"queued": 0.0})
    application.report(DECODE, full | {"queued": 0.0})
    assert application.decide() == {"Prefill": 1, "Decode": 2}
    application.report(DECODE, full | {"queued": 10.0})
    assert application.decide() == {"Prefill": 1, "Decode": 4}


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
