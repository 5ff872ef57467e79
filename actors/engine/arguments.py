"""Derive a vLLM engine's arguments and environment from the settings; check the settings."""

import ast
import difflib
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from configs.settings.auth import VLLM_API_KEY_VARIABLE
from configs.settings.base import ROLES, RoleName, SettingsError
from configs.settings.deployment import PlacementSettings
from configs.settings.service import ServiceSettings

OWNED = {
    "model": "set `model` of the service",
    "served_model_name": "set `served_model_name` of the service",
    "tensor_parallel_size": "set `tensor_parallel_size` of the role",
    "distributed_executor_backend": "set `executor` of the role",
    "kv_transfer_config": "set `transfer` of the service",
    "data_parallel_size": "set `data_parallel_size` of the role",
    **dict.fromkeys(
        (
            "data_parallel_size_local",
            "data_parallel_rank",
            "data_parallel_start_rank",
            "data_parallel_address",
            "data_parallel_rpc_port",
            "data_parallel_backend",
            "data_parallel_hybrid_lb",
            "data_parallel_external_lb",
        ),
        "remove it; all data-parallel ranks of a replica are processes of its actor",
    ),
    "enable_elastic_ep": "remove it; the number of data-parallel ranks of a replica is fixed",
}
"""Engine arguments that users cannot set, and the remedy for the error message."""

_NO_ENDPOINT = "remove it; the router does not serve the endpoints that this argument configures"

WITHOUT_EFFECT = {
    "host": "set `router.http_host`",
    "port": "set `router.http_port`",
    "uds": "set `router.http_port`",
    "api_key": "set `auth.api_keys` or TANDEM_API_KEYS",
    "ssl_keyfile": "set `router.ssl_keyfile`",
    "ssl_certfile": "set `router.ssl_certfile`",
    "ssl_ca_certs": "set `router.ssl_ca_certs`",
    "enable_ssl_refresh": "remove it; the router always loads changed certificate files",
    "ssl_cert_reqs": "set `router.ssl_ca_certs`, which makes client certificates required",
    "ssl_ciphers": "remove it; the router uses OpenSSL's default ciphers with TLS 1.2 or later",
    "allow_credentials": "set `router.allow_credentials`",
    "allowed_origins": "set `router.allowed_origins`",
    "allowed_methods": "set `router.allowed_methods`",
    "allowed_headers": "set `router.allowed_headers`",
    "root_path": "remove the prefix in a proxy in front of the router",
    "uvicorn_log_level": "remove it",
    "disable_uvicorn_access_log": "set `router.access_log`",
    "disable_access_log_for_endpoints": "set `router.access_log`",
    "h11_max_incomplete_event_size": "remove it; the router accepts up to 64 KiB of headers",
    "h11_max_header_count": "remove it; the router accepts up to 64 KiB of headers",
    "disable_fastapi_docs": "remove it; the router serves no API documentation",
    "enable_offline_docs": "remove it; the router serves no API documentation",
    "grpc_port": _NO_ENDPOINT,
    "tokens_only": _NO_ENDPOINT,
    "enable_scale_out": _NO_ENDPOINT,
    "data_parallel_supervisor_port": "set `replicas` of the role",
    "dp_supervisor_probe_interval_s": "set `replicas` of the role",
    "dp_supervisor_probe_timeout_s": "set `replicas` of the role",
    "dp_supervisor_probe_failure_threshold": "set `replicas` of the role",
}
"""Frontend arguments of servers that Tandem does not run, and the remedy for the error message."""

CPU_DEFAULTS = {
    "dtype": "float32",
    "enforce_eager": True,
    "worker_cls": "actors.upstream.cpu_build.vllm_cpu_worker.CpuWorker",
}


@cache
def engine_argument_names() -> frozenset[str]:
    return _fields("engine/arg_utils.py", "AsyncEngineArgs")


@cache
def frontend_argument_names() -> frozenset[str]:
    return _fields("entrypoints/launchers/cli_args.py", "FrontendArgs")


def _fields(module: str, name: str) -> frozenset[str]:
    """Return a vLLM dataclass's public fields, from its source: an import takes 8 s of CPU time."""
    spec = find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise SettingsError("vllm is not installed: run `make install`")
    source = Path(spec.submodule_search_locations[0], module).read_text(encoding="utf-8")
    return frozenset(field for field in fields_in_source(source, name) if not field.startswith("_"))


def fields_in_source(source: str, name: str) -> set[str]:
    """Return the annotated fields of dataclass `name` and of its bases, all in `source`."""
    classes = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}
    found: set[str] = set()
    for base in classes[name].bases:
        found |= fields_in_source(source, ast.unparse(base))
    for node in classes[name].body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            annotation = ast.unparse(node.annotation)
            if "ClassVar" not in annotation and "InitVar" not in annotation:
                found.add(node.target.id)
    return found


def check_arguments(settings: ServiceSettings) -> None:
    """Raise SettingsError with all errors found in `settings` without an import of vLLM.

    vLLM checks the values of its arguments when the engine starts.
    """
    problems = [*_bad_selector("router", settings.router)]
    for i, one in enumerate(settings.each_model().values()):
        where = f"models.{i}." if settings.models else ""
        problems += [where + problem for problem in _model_problems(one)]
    if problems:
        raise SettingsError("\n".join(problems))


def _model_problems(settings: ServiceSettings) -> Iterator[str]:
    engine, frontend = engine_argument_names(), frontend_argument_names()
    misplaced = dict.fromkeys(frontend - engine, "set it under `frontend`") | WITHOUT_EFFECT
    yield from _unknown("engine", settings.engine, engine, misplaced)
    for name in ROLES:
        yield from _unknown(f"{name}.engine", settings.role(name).engine, engine, misplaced)
    misplaced = dict.fromkeys(engine - frontend, "set it under `engine`")
    yield from _unknown("frontend", settings.frontend, frontend, misplaced)
    yield from _useless_frontend(settings)
    lora = all(engine_arguments(settings, role).get("enable_lora") for role in ROLES)
    if settings.allow_runtime_lora_updating and not lora:
        yield "allow_runtime_lora_updating: needs `enable_lora: true` in the engine arguments of both roles"
    for name in ROLES:
        role = settings.role(name)
        if VLLM_API_KEY_VARIABLE in role.environment:
            yield f"{name}.environment.{VLLM_API_KEY_VARIABLE}: cannot be set here; set `auth.api_keys`"
        yield from _bad_selector(name, role)
        if not isinstance(role.replicas, int):
            yield from _bad_autoscaling(f"{name}.replicas", role.replicas)


def _unknown(where: str, given: Collection[str], known: Collection[str], misplaced: Mapping[str, str]) -> Iterator[str]:
    remedies = {**misplaced, **OWNED}
    yield from (f"{where}.{key}: cannot be set here; {remedies[key]}" for key in given if key in remedies)
    yield from _not_among([key for key in given if key not in remedies], known, where, "vLLM")


def _useless_frontend(settings: ServiceSettings) -> Iterator[str]:
    given = settings.frontend
    yield from (f"frontend.{key}: has no effect; {WITHOUT_EFFECT[key]}" for key in given if key in WITHOUT_EFFECT)
    if given.get("enable_auto_tool_choice") and not given.get("tool_call_parser"):
        yield "frontend.enable_auto_tool_choice: needs `tool_call_parser`"
    for name in ROLES:
        if given.get("enable_log_outputs") and not engine_arguments(settings, name).get("enable_log_requests"):
            yield f"frontend.enable_log_outputs: needs `enable_log_requests: true` in the engine arguments of {name}"


def _not_among(given: Iterable[str], known: Collection[str], where: str, whose: str) -> Iterator[str]:
    for key in given:
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            yield f"{where}.{key}: {whose} has no such argument{hint}"


def _bad_selector(where: str, deployment: PlacementSettings) -> Iterator[str]:
    from ray.serve.schema import RayActorOptionsSchema

    try:
        RayActorOptionsSchema(label_selector=deployment.label_selector)
    except ValidationError as error:
        yield f"{where}.label_selector: {error.errors()[0]['msg']}"


def _bad_autoscaling(where: str, replicas: Mapping[str, Any]) -> Iterator[str]:
    from ray.serve.config import AutoscalingConfig

    yield from _not_among(replicas, AutoscalingConfig.model_fields, where, "Ray Serve")
    try:
        AutoscalingConfig(**replicas)
    except ValidationError as error:
        yield from (f"{where}: {problem['msg']}" for problem in error.errors())
        return
    # Engines report the requests that wait in routers. Without a replica none does, so Serve would
    # never start the first one.
    for key in ("min_replicas", "initial_replicas"):
        if replicas.get(key) == 0:
            yield f"{where}.{key}: must be at least 1"


def engine_arguments(settings: ServiceSettings, role: RoleName) -> dict[str, Any]:
    """Return the keyword arguments of AsyncEngineArgs for `role`, without the KV connector."""
    own = settings.role(role)
    defaults = {} if own.num_gpus else CPU_DEFAULTS
    # For `mp` the argument stays unset: vLLM then chooses the executor.
    executor = {"distributed_executor_backend": "ray"} if own.executor == "ray" else {}
    return {
        **defaults,
        **settings.engine,
        **own.engine,
        **executor,
        "model": settings.model_path,
        "served_model_name": list(settings.model_names),
        "tensor_parallel_size": own.tensor_parallel_size,
        **({"data_parallel_size": own.data_parallel_size} if own.data_parallel_size > 1 else {}),
    }


SAMPLING_ARGUMENTS = (
    "generation_config",
    "logits_processors",
    "logprobs_mode",
    "max_logprobs",
    "override_generation_config",
    "reasoning_parser",
    "return_sampling_mask",
    "structured_outputs_config",
)
"""Engine arguments for sampling and output. Prefill samples no first token for a decode engine
whose values differ from its own."""

PROMPT_ARGUMENTS = (
    "max_model_len",
    "media_io_kwargs",
    "mm_processor_kwargs",
    "video_pruning_method",
    "video_pruning_rate",
)
"""Engine arguments that may change the prompt of a request; `max_model_len` may truncate it. If the
roles build different prompts, CannotResumeError ends a stream after prefill's first token."""


def why_no_first_token(settings: ServiceSettings) -> str | None:
    """Return why a prefill engine cannot sample the first token of decode's answers, or None."""
    prefill, decode = engine_arguments(settings, "prefill"), engine_arguments(settings, "decode")
    if prefill.get("speculative_config") or decode.get("speculative_config"):
        return "with speculative decoding, a step may generate several tokens"
    for name in (*SAMPLING_ARGUMENTS, *PROMPT_ARGUMENTS):
        if prefill.get(name) != decode.get(name):
            return f"prefill.engine.{name} differs from decode.engine.{name}"
    if settings.allow_runtime_lora_updating:
        return "after a client has loaded an adapter, the two engines may briefly have different adapters of one name"
    if settings.store.enabled:
        return "sampling by prefill has not been tested with the KV store"
    return None


def engine_environment(settings: ServiceSettings, role: RoleName) -> dict[str, str]:
    """Return the environment variables of the actor of `role`, which its processes inherit."""
    own = settings.role(role)
    # Routers check the API keys. With VLLM_API_KEY, an engine would answer their calls with 401.
    environment = {"VLLM_NO_USAGE_STATS": "1", VLLM_API_KEY_VARIABLE: ""}
    if not own.num_gpus:
        environment |= settings.cpu.environment()
        if engine_arguments(settings, role).get("enforce_eager"):
            # Otherwise vLLM's sampler compiles a helper at the first request with logprobs, which
            # takes many seconds.
            environment["TORCHDYNAMO_DISABLE"] = "1"
    if settings.allow_runtime_lora_updating:
        # vLLM asks its LoRA resolvers for unknown models only with this variable.
        environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    if Path(settings.model_path).is_dir():
        environment["HF_HUB_OFFLINE"] = "1"
    return environment | own.environment
