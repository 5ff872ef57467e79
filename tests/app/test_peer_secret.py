"""Which secret the engines share: the operator's, or one of the Ray cluster that outlives every build."""

import pickle

import pytest
import ray
from pydantic import SecretStr

from actors.engine import kv_transfer_config
from app.main import build
from app.peer_secret import with_secret
from configs.reference import reference
from configs.settings import PEER_SECRET_VARIABLE, ServiceSettings, SettingsError, parse_settings
from connectors.vllm_hma.config import parse_config

SECRET = "what nobody else knows"
SUPERVISOR = "what the actor has made up"


def secret_of(settings: ServiceSettings) -> str:
    assert settings.transfer.secret is not None
    return settings.transfer.secret.get_secret_value()


def deployed(application) -> dict[str, ServiceSettings]:
    """The settings that each role's replicas are started with, by deployment."""
    router = application._bound_deployment
    return {
        bound._bound_deployment.name: bound._bound_deployment.init_args[0]
        for bound in router.init_args
        if hasattr(bound, "_bound_deployment")
    }


@pytest.fixture(scope="module")
def cluster():
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    monkeypatch.delenv(PEER_SECRET_VARIABLE, raising=False)


def test_every_build_in_a_cluster_has_one_secret(cluster):
    """Both roles, and a build in another process after a change of settings, as `serve deploy` makes it."""

    @ray.remote
    def built(args: dict) -> dict[str, str]:
        application = build(ServiceSettings.model_validate(args))
        return {name: secret_of(settings) for name, settings in deployed(application).items()}

    first, second = ray.get([built.remote({}), built.remote({"router": {"request_timeout_s": 1}})])
    assert first.keys() == {"Prefill", "Decode"}
    assert len({*first.values(), *second.values()}) == 1
    assert len(first["Prefill"]) == 64


def test_settings_then_environment_then_cluster(monkeypatch):
    """The operator's word goes first, the configuration's before the environment's."""
    assert len(secret_of(with_secret(ServiceSettings()))) == 64
    monkeypatch.setenv(PEER_SECRET_VARIABLE, SECRET)
    assert secret_of(with_secret(ServiceSettings())) == SECRET
    assert secret_of(with_secret(parse_settings({"transfer": {"secret": SECRET + "!"}}))) == SECRET + "!"


def test_a_secret_that_can_be_guessed_is_refused(monkeypatch):
    """By the name of the key or of the variable, without repeating it."""
    with pytest.raises(SettingsError, match=r"transfer.secret: .* at least 16") as raised:
        parse_settings({"transfer": {"secret": "hunter2"}})
    assert "hunter2" not in str(raised.value)
    monkeypatch.setenv(PEER_SECRET_VARIABLE, "hunter2")
    with pytest.raises(SettingsError, match=f"{PEER_SECRET_VARIABLE}: must have at least 16") as raised:
        with_secret(ServiceSettings())
    assert "hunter2" not in str(raised.value)


def test_the_secret_reaches_the_connector_and_no_log():
    """vLLM's configuration carries it into the engine's processes; printed, both show stars."""
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
    """The page is the same wherever it is written."""
    without = reference()
    monkeypatch.setenv(PEER_SECRET_VARIABLE, SECRET)
    assert reference() == without
