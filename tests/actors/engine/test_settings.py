"""A wrong configuration is refused by the name of its key, before anything starts."""

import pickle

import pytest
from pydantic import BaseModel

from actors.engine.arguments import (
    WITHOUT_EFFECT,
    check_arguments,
    engine_arguments,
    engine_environment,
    frontend_argument_names,
    why_no_first_token,
)
from app.main import build
from configs.reference import SECTIONS
from configs.settings.base import SettingsError
from configs.settings.kv import KVStoreSettings, TransferSettings
from configs.settings.parsing import parse_settings
from connectors.vllm_hma.config import parse_config
from testing.serve_objects import deployment_of, replica_config_of


@pytest.mark.parametrize(
    ("args", "key"),
    [
        ({"prefill": {"replicas": 0}}, "prefill.replicas"),
        ({"decode": {"tensor_parallel_size": "many"}}, "decode.tensor_parallel_size"),
        ({"transfer": {"lease_s": 0}}, "transfer.lease_s"),
        ({"transfer": {"lease": 5}}, "transfer.lease"),
        ({"transfer": {"alive_s": 20}}, "alive_s"),
        ({"router": {"request_timeout_s": float("inf")}}, "router.request_timeout_s"),
        ({"transfer": {"side_channel_port": 5600}, "prefill": {"replicas": 2}}, "prefill.placement"),
        ({"decode": {"data_parallel_size": 2, "executor": "ray", "num_gpus": 2}}, "data_parallel_size must be 1"),
        ({"decode": {"data_parallel_size": 2, "rpc_port": 65535}}, "would listen on port 65536"),
        ({"prefill": {"data_parallel_size": 2}, "store": {"path": "/disk"}}, "prefill.data_parallel_size must be 1"),
        ({"transfer": {"side_channel_host": "127.0.0.1", "side_channel_port": 5600}}, "side_channel_port must be 0"),
        ({"transfer": {"side_channel_port": 5600}, "decode": {"replicas": {"max_replicas": 2}}}, "decode.placement"),
        ({"decode": {"executor": "ray"}}, "executor `ray` needs one GPU for each rank"),
        ({"decode": {"executor": "ray", "num_gpus": 1, "tensor_parallel_size": 2}}, "tensor_parallel_size, 2, instead"),
        ({"decode": {"executor": "ray", "num_gpus": 1, "placement": "apart"}}, "must be `any` for executor `ray`"),
        ({"decode": {"executor": "uni"}}, "decode.executor"),
        ({"store": {"path": "disk"}}, "path: must be an absolute path, not 'disk'"),
        ({"router": {"ssl_certfile": "a"}}, "ssl_certfile and ssl_keyfile must be set together"),
        ({"router": {"ssl_ca_certs": "a"}}, "ssl_ca_certs needs ssl_certfile and ssl_keyfile"),
        ({"router": {"ssl_certfile": "a", "ssl_keyfile": "b", "http_port": None}}, "ssl_certfile needs http_port"),
    ],
)
def test_a_wrong_setting_is_named(args, key):
    """The error has one line per key, without pydantic's own text."""
    with pytest.raises(SettingsError) as raised:
        parse_settings(args)
    assert key in str(raised.value)
    assert "pydantic" not in str(raised.value)
    assert len(str(raised.value).splitlines()) == 1


def test_what_was_meant():
    """All wrong keys at once, each with a similar setting at its path."""
    args = {
        "modle": "x",
        "decode": {"replica": 2, "frontend": {"chat_template": "x"}},
        "router": {"zzz": 1, "routing": {"polici": "x"}},
    }
    with pytest.raises(SettingsError) as raised:
        parse_settings(args)
    problems = dict(line.split(": ", 1) for line in str(raised.value).splitlines())
    assert {key: text.rpartition("did you mean ")[2] for key, text in problems.items()} == {
        "modle": "model?",
        "decode.replica": "replicas?",
        "decode.frontend": "set `frontend` beside `prefill` and `decode`: both roles render the prompt",
        "router.routing.polici": "policy?",
        "router.zzz": "no such setting",
    }


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            {"engine": {"max_modle_len": 1}},
            "engine.max_modle_len: vLLM has no such argument; did you mean max_model_len?",
        ),
        ({"decode": {"engine": {"qqq": 1}}}, "decode.engine.qqq: vLLM has no such argument"),
        (
            {"prefill": {"engine": {"tensor_parallel_size": 2}}},
            "prefill.engine.tensor_parallel_size: cannot be set here",
        ),
        ({"engine": {"kv_transfer_config": {}}}, "engine.kv_transfer_config: cannot be set here; set `transfer`"),
        (
            {"decode": {"engine": {"data_parallel_size": 2}}},
            "decode.engine.data_parallel_size: cannot be set here; set `data_parallel_size` of the role",
        ),
        (
            {"engine": {"data_parallel_rank": 1}},
            "engine.data_parallel_rank: cannot be set here; remove it; all data-parallel ranks of a replica",
        ),
        ({"engine": {"enable_elastic_ep": True}}, "engine.enable_elastic_ep: cannot be set here"),
        ({"frontend": {"tool_parser": "x"}}, "frontend.tool_parser: vLLM has no such argument"),
        (
            {"decode": {"engine": {"tool_call_parser": "hermes"}}},
            "decode.engine.tool_call_parser: cannot be set here; set it under `frontend`",
        ),
        ({"engine": {"port": 80}}, "engine.port: cannot be set here; set `router.http_port`"),
        (
            {"frontend": {"reasoning_parser": "x"}},
            "frontend.reasoning_parser: cannot be set here; set it under `engine`",
        ),
        ({"frontend": {"model": "x"}}, "frontend.model: cannot be set here; set `model` of the service"),
        ({"frontend": {"ssl_certfile": "a.pem"}}, "frontend.ssl_certfile: has no effect; set `router.ssl_certfile`"),
        (
            {"frontend": {"allowed_origins": ["*"]}},
            "frontend.allowed_origins: has no effect; set `router.allowed_origins`",
        ),
        ({"frontend": {"port": 80}}, "frontend.port: has no effect; set `router.http_port`"),
        ({"frontend": {"api_key": ["x"]}}, "frontend.api_key: has no effect; set `auth.api_keys`"),
        ({"frontend": {"enable_auto_tool_choice": True}}, "frontend.enable_auto_tool_choice: needs `tool_call_parser`"),
        (
            {"frontend": {"enable_log_outputs": True}, "decode": {"engine": {"enable_log_requests": True}}},
            "frontend.enable_log_outputs: needs `enable_log_requests: true` in the engine arguments of prefill$",
        ),
        (
            {"decode": {"environment": {"VLLM_API_KEY": "x"}}},
            "decode.environment.VLLM_API_KEY: cannot be set here; set `auth.api_keys`",
        ),
        ({"decode": {"label_selector": {"tandem/role": "a b"}}}, "decode.label_selector: .*Invalid label selector"),
        ({"router": {"label_selector": {"-": "x"}}}, "router.label_selector: .*Invalid label key"),
    ],
)
def test_an_argument_that_vllm_or_ray_refuses_is_named_with_its_role(args, message):
    """The names are checked against the installed vLLM, before any engine starts."""
    with pytest.raises(SettingsError, match="^" + message.replace("?", "\\?")):
        check_arguments(parse_settings(args))


def test_arguments_without_effect_are_arguments_of_vllm():
    """A name that vLLM drops would otherwise stay in the list."""
    assert WITHOUT_EFFECT.keys() <= frontend_argument_names()


def test_a_roles_engine_arguments_win():
    """Arguments of one role take precedence over those of both, and these over the defaults."""
    settings = parse_settings(
        {
            "model": "m",
            "engine": {"max_model_len": 100, "block_size": 64},
            "decode": {"engine": {"block_size": 128}, "tensor_parallel_size": 2},
        }
    )
    assert engine_arguments(settings, "decode") == {
        "dtype": "float32",
        "enforce_eager": True,
        "worker_cls": "actors.upstream.cpu_build.vllm_cpu_worker.CpuWorker",
        "max_model_len": 100,
        "block_size": 128,
        "model": "m",
        "served_model_name": ["m"],
        "tensor_parallel_size": 2,
    }
    assert engine_arguments(settings, "prefill")["block_size"] == 64


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        ({}, None),
        ({"prefill": {"engine": {"max_num_seqs": 4}}, "decode": {"engine": {"block_size": 32}}}, None),
        ({"engine": {"logprobs_mode": "raw_logits"}}, None),
        ({"decode": {"engine": {"logprobs_mode": "raw_logits"}}}, "prefill.engine.logprobs_mode differs"),
        ({"decode": {"engine": {"speculative_config": {"method": "ngram"}}}}, "speculative decoding"),
        ({"prefill": {"engine": {"mm_processor_kwargs": {"max_pixels": 9}}}}, "prefill.engine.mm_processor_kwargs"),
        ({"prefill": {"engine": {"max_model_len": 512}}}, "prefill.engine.max_model_len differs"),
        ({"store": {"memory_gib": 1}}, "KV store"),
        ({"allow_runtime_lora_updating": True}, "different adapters"),
    ],
)
def test_which_engines_sample_first_tokens(args, reason):
    """Prefill may sample only if both roles turn the same request into the same token and
    events.
    """
    found = why_no_first_token(parse_settings(args))
    assert found is None if reason is None else reason in str(found)


def test_an_engines_environment(tmp_path):
    """No API key, which the actor could inherit from its node; CPU variables without a GPU only;
    no hub for a local model only.
    """
    settings = parse_settings({"model": "org/name", "prefill": {"num_gpus": 1, "data_parallel_size": 2}})
    prefill, decode = (engine_environment(settings, role) for role in ("prefill", "decode"))
    assert prefill["VLLM_API_KEY"] == decode["VLLM_API_KEY"] == ""
    assert (prefill.get("VLLM_CPU_KVCACHE_SPACE"), decode["VLLM_CPU_KVCACHE_SPACE"]) == (None, "1")
    assert "HF_HUB_OFFLINE" not in decode
    assert engine_environment(parse_settings({"model": str(tmp_path)}), "decode")["HF_HUB_OFFLINE"] == "1"
    arguments = {role: engine_arguments(settings, role) for role in ("prefill", "decode")}
    assert {"dtype", "data_parallel_size"} & arguments["prefill"].keys() == {"data_parallel_size"}
    assert {"dtype", "data_parallel_size"} & arguments["decode"].keys() == {"dtype"}


def test_transfer_and_store_settings_are_the_connectors():
    """Service and connector have the same keys and defaults; the store is off by default."""
    assert parse_config(TransferSettings().connector_config("127.0.0.1")) == parse_config({})
    assert KVStoreSettings().connector_config() == {}
    ours = parse_config(KVStoreSettings(path="/disk").connector_config())
    assert ours == parse_config({"store": {"path": "/disk"}})
    assert ours.store is not None
    assert ours.store.path == "/disk"


def test_replicas_go_where_the_settings_say():
    """Serve's own deployment objects carry the labels and the spread."""
    selector = {"tandem/role": "decode"}
    settings = parse_settings(
        {
            "transfer": {"side_channel_port": 5600},
            "decode": {"replicas": 2, "label_selector": selector, "placement": "apart"},
            "router": {"label_selector": {"tandem/role": "router"}},
        }
    )
    router = deployment_of(build(settings))
    prefill, decode = map(deployment_of, router.init_args[1][0][:2])
    placed = [
        (one.ray_actor_options["label_selector"], replica_config_of(one).max_replicas_per_node)
        for one in (router, prefill, decode)
    ]
    assert placed == [({"tandem/role": "router"}, None), ({}, None), (selector, 1)]


@pytest.mark.parametrize("model", [model for _, model, _ in SECTIONS], ids=lambda model: model.__name__)
def test_settings_pickled_by_an_older_release_get_new_defaults(model: type[BaseModel]) -> None:
    """Serve keeps the arguments of its last build; pods of a new image unpickle them."""
    for name in model.model_fields:
        older = model()
        del older.__dict__[name]
        assert pickle.loads(pickle.dumps(older)) == model()
