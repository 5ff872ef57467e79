"""Several models in one configuration: what each gets, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from actors.engine.arguments import check_arguments, engine_arguments
from app.main import build
from configs.settings.base import SettingsError
from configs.settings.parsing import parse_settings
from testing.serve_objects import deployment_of

MODELS: list[dict[str, Any]] = [
    {"model": "org/a", "served_model_name": ["a", "a-latest"], "engine": {"max_model_len": 100}},
    {"model": "org/b", "prefill": {"replicas": 2}, "frontend": {"enable_auto_tool_choice": False}},
]


def test_each_model_is_a_service_of_its_own() -> None:
    settings = parse_settings({"models": MODELS, "cpu": {"kv_cache_gib": 3}})
    each = settings.each_model()
    assert list(each) == ["-a", "-org-b"]
    a, b = each.values()
    assert (a.model_names, b.model_names) == (("a", "a-latest"), ("org/b",))
    assert engine_arguments(a, "decode")["served_model_name"] == ["a", "a-latest"]
    assert (a.engine, b.engine) == ({"max_model_len": 100}, {})
    assert (a.prefill.replicas, b.prefill.replicas) == (1, 2)
    assert {one.cpu.kv_cache_gib for one in each.values()} == {3}
    assert not any(one.models for one in each.values())


def test_one_model_stays_as_it_is() -> None:
    settings = parse_settings({"model": "org/a", "served_model_name": "a"})
    assert settings.each_model() == {"": settings}
    assert engine_arguments(settings, "prefill")["served_model_name"] == ["a"]


@pytest.mark.parametrize(
    ("args", "deployments"),
    [({}, [("Prefill", "Decode", ())]), (None, [("Prefill-a", "Decode-a", ("a", "a-latest")), "b"])],
)
def test_the_deployments_of_a_service(args: dict[str, Any] | None, deployments: list[Any]) -> None:
    """Deployments of a single model have the names that configurations refer to."""
    settings = parse_settings({"models": MODELS} if args is None else args)
    models = deployment_of(build(settings)).init_args[1]
    found = [(*(deployment_of(bound).name for bound in one[:2]), one.names) for one in models]
    if args is None:
        deployments[1] = ("Prefill-org-b", "Decode-org-b", ("org/b",))
    assert found == deployments


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"models": MODELS, "engine": {}}, "^engine: .*`models`"),
        ({"models": MODELS, "model": "demo"}, "^model: .*`models`"),
        ({"models": [{"served_model_name": ["x", "x"]}]}, "each only once"),
        ({"models": [{"served_model_name": []}]}, "at least one name"),
        ({"models": [{}, {}]}, "tandem-demo"),
        (
            {"models": [{"model": name, "frontend": {"lora_modules": [{"name": "x", "path": "/x"}]}} for name in "ab"]},
            "name x",
        ),
        ({"models": [{"frontend": {"lora_modules": ["sql"]}}]}, "`name=path`"),
        ({"frontend": {"lora_modules": [{"lora_name": "x", "lora_path": "/x"}]}}, "`name=path`"),
        ({"frontend": {"lora_modules": "x=/x"}}, "list of `name=path`"),
        (
            {"models": [{"served_model_name": "x/y"}, {"served_model_name": "x y"}]},
            "Prefill-x-y",
        ),
        ({"models": [{"modle": "x"}]}, "models.0.modle: .* model"),
        ({"models": [{"prefill": {"replica": 1}}]}, "models.0.prefill.replica: .* replicas"),
        (
            {"models": [{}, {"served_model_name": "b", "decode": {"replicas": 2, "rpc_port": 7}}]},
            "models.1.decode.placement .*`apart`",
        ),
    ],
)
def test_refused_settings(args: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        parse_settings(args)


def test_adapters_as_on_vllms_command_line() -> None:
    settings = parse_settings(
        {"frontend": {"lora_modules": ["a=/x=1", {"name": "b", "path": "/y", "base_model_name": "c"}]}}
    )
    assert settings.frontend["lora_modules"] == [
        {"name": "a", "path": "/x=1"},
        {"name": "b", "path": "/y", "base_model_name": "c"},
    ]
    assert settings.adapter_names == ("a", "b")


def test_arguments_are_checked_for_each_model() -> None:
    models = [MODELS[0], MODELS[1] | {"engine": {"max_model_length": 1}, "allow_runtime_lora_updating": True}]
    with pytest.raises(SettingsError) as caught:
        check_arguments(parse_settings({"models": models}))
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("models.1.engine.max_model_length: vLLM has no such argument")
    assert lines[1].startswith("models.1.allow_runtime_lora_updating: needs `enable_lora: true`")


def test_yaml_reads_an_unquoted_off_as_false() -> None:
    assert parse_settings({"router": {"request_log": False}}).router.request_log == "off"
