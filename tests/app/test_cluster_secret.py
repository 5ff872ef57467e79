"""The engines' shared secret: the operator's, or one of the Ray cluster that outlives every
build.
"""

import pickle

import pytest
import ray
from pydantic import SecretStr
from ray.serve import Application

from actors.engine.vllm_engine import kv_transfer_config
from app.main import build
from configs.reference import reference
from configs.settings.base import SettingsError
from configs.settings.kv import PEER_SECRET_VARIABLE
from configs.settings.parsing import parse_settings
from configs.settings.service import ServiceSettings
from connectors.vllm_hma.config import parse_config
from testing.serve_objects import deployment_of

SECRET = "what nobody else knows"
SUPERVISOR = "what the actor has made up"


def secret_of(settings: ServiceSettings) -> str:
    assert settings.transfer.secret is not None
    return settings.transfer.secret.get_secret_value()


def deployed(application) -> dict[str, ServiceSettings]:
    """Return the settings that each role's replicas derive from their arguments, by deployment."""
    router = deployment_of(application)
    deployments = [deployment_of(bound) for bound in router.init_args[1][0] if isinstance(bound, Application)]
    return {one.name: one.init_args[0].with_secret(one.init_args[1]) for one in deployments}


@pytest.fixture(scope="module")
def cluster():
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    monkeypatch.delenv(PEER_SECRET_VARIABLE, raising=False)


def test_every_build_in_a_cluster_has_one_secret(cluster):
    """Both roles have one secret, also after `serve deploy` builds the changed settings in another
    process.
    """

    @ray.remote
    def built(args: dict) -> dict[str, str]:
        application = build(ServiceSettings.model_validate(args))
        return {name: secret_of(settings) for name, settings in deployed(application).items()}

    first, second = ray.get([built.remote({}), built.remote({"router": {"request_timeout_s": 1}})])
    assert first.keys() == {"Prefill", "Decode"}
    assert len({*first.values(), *second.values()}) == 1
    assert len(first["Prefill"]) == 64


@pytest.mark.parametrize(
    ("setting", "of_build", "of_replica", "secret"),
    [
        (None, None, None, None),
        (None, SECRET, SECRET, SECRET),
        # Serve builds the application in a task on any node, on Kubernetes the head's pod, which
        # has no secrets.
        (None, None, SECRET, SECRET),
        (None, SECRET, None, SECRET),
        (SECRET, None, SECRET + "!", SECRET),
    ],
)
def test_settings_then_environment_then_cluster(
    monkeypatch: pytest.MonkeyPatch,
    setting: str | None,
    of_build: str | None,
    of_replica: str | None,
    secret: str | None,
) -> None:
    """The operator's secret comes first, the configuration's before the environment's."""
    if of_build:
        monkeypatch.setenv(PEER_SECRET_VARIABLE, of_build)
    application = build(parse_settings({"transfer": {"secret": setting}} if setting else {}))
    monkeypatch.delenv(PEER_SECRET_VARIABLE, raising=False)
    if of_replica:
        monkeypatch.setenv(PEER_SECRET_VARIABLE, of_replica)
    (found,) = {secret_of(settings) for settings in deployed(application).values()}
    assert found == secret if secret else len(found) == 64


def test_a_secret_that_can_be_guessed_is_refused(monkeypatch):
    """The error names the key or the variable, without the secret."""
    with pytest.raises(SettingsError, match=r"transfer.secret: .* at least 16") as raised:
        parse_settings({"transfer": {"secret": "hunter2"}})
    assert "hunter2" not in str(raised.value)
    monkeypatch.setenv(PEER_SECRET_VARIABLE, "hunter2")
    with pytest.raises(SettingsError, match=f"{PEER_SECRET_VARIABLE}: must have at least 16") as raised:
        build(ServiceSettings())
    assert "hunter2" not in str(raised.value)


def test_the_secret_reaches_the_connector_and_no_log():
    """vLLM's configuration carries it into the engine's processes; its representation shows
    stars.
    """
    settings = parse_settings({"transfer": {"secret": SECRET}})
    config = kv_transfer_config(settings, "decode", "127.0.0.1", SUPERVISOR)
    assert pickle.loads(pickle.dumps(config)).kv_connector_extra_config["secret"] == SECRET
    assert parse_config(config.kv_connector_extra_config).believes(SUPERVISOR)
    for shown in (repr(config), str(config), repr(settings), str(settings), settings.model_dump_json()):
        assert SUPERVISOR not in shown
        assert SECRET not in shown
        assert "*****" in shown
    assert isinstance(settings.transfer.secret, SecretStr)


def test_the_reference_shows_no_environment(monkeypatch):
    """The page does not depend on the environment in which it is written."""
    without = reference()
    monkeypatch.setenv(PEER_SECRET_VARIABLE, SECRET)
    assert reference() == without
