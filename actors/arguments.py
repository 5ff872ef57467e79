"""From settings to the arguments of one vLLM engine, with names checked against the installed vLLM."""

import dataclasses
import difflib
from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from configs.settings import PlacementSettings, RoleName, ServiceSettings, SettingsError

OWNED = {
    "model": "set `model` of the service",
    "served_model_name": "set `served_model_name` of the service",
    "tensor_parallel_size": "set `tensor_parallel_size` of the role",
    "kv_transfer_config": "set `transfer` of the service",
    # The address that a prefill replica gives is that of one engine core; with several, KV would wait in another.
    "data_parallel_size": "set `replicas` of the role",
}
"""Engine arguments that have a setting of their own, and where."""

CPU_DEFAULTS = {"dtype": "float32", "enforce_eager": True, "worker_cls": "actors.cpu_worker.CpuWorker"}
"""What an engine without a GPU starts with unless the settings say otherwise."""


@cache
def engine_argument_names() -> frozenset[str]:
    """Names that vLLM's AsyncEngineArgs takes (imports vLLM, which takes seconds)."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    return frozenset(field.name for field in dataclasses.fields(AsyncEngineArgs) if not field.name.startswith("_"))


@cache
def frontend_argument_names() -> frozenset[str]:
    """Names that vLLM's OpenAI layer takes (imports vLLM, which takes seconds)."""
    from vllm.entrypoints.launchers.cli_args import FrontendArgs

    return frozenset(field.name for field in dataclasses.fields(FrontendArgs))


def check_arguments(settings: ServiceSettings) -> None:
    """Raise SettingsError naming every argument that vLLM does not have and every selector that Ray cannot read."""
    engine, frontend = engine_argument_names(), frontend_argument_names()
    problems = [
        *_unknown("engine", settings.engine, engine),
        *_unknown("prefill.engine", settings.prefill.engine, engine),
        *_unknown("decode.engine", settings.decode.engine, engine),
        *_unknown("prefill.frontend", settings.prefill.frontend, frontend),
        *_unknown("decode.frontend", settings.decode.frontend, frontend),
        *_bad_selector("prefill", settings.prefill),
        *_bad_selector("decode", settings.decode),
        *_bad_selector("router", settings.router),
    ]
    if problems:
        raise SettingsError("\n".join(problems))


def _unknown(where: str, given: Mapping[str, Any], known: Collection[str]) -> list[str]:
    problems = []
    for key in given:
        if key in OWNED:
            problems.append(f"{where}.{key}: not here; {OWNED[key]}")
        elif key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            problems.append(f"{where}.{key}: vLLM has no such argument{hint}")
    return problems


def _bad_selector(where: str, deployment: PlacementSettings) -> list[str]:
    """Ray's own rules for labels, by way of Serve's schema."""
    from pydantic import ValidationError
    from ray.serve.schema import RayActorOptionsSchema

    try:
        RayActorOptionsSchema(label_selector=deployment.label_selector)
    except ValidationError as error:
        return [f"{where}.label_selector: {error.errors()[0]['msg']}"]
    return []


def engine_arguments(settings: ServiceSettings, role: RoleName) -> dict[str, Any]:
    """Keyword arguments of AsyncEngineArgs for `role`, without the KV connector."""
    own = settings.role(role)
    defaults = {} if own.num_gpus else CPU_DEFAULTS
    return {
        **defaults,
        **settings.engine,
        **own.engine,
        "model": settings.model_path,
        "served_model_name": [settings.model_name],
        "tensor_parallel_size": own.tensor_parallel_size,
    }


def engine_environment(settings: ServiceSettings, role: RoleName) -> dict[str, str]:
    """Environment variables of the actor of `role`; its engine processes inherit them."""
    own = settings.role(role)
    environment = {"VLLM_NO_USAGE_STATS": "1"}
    if not own.num_gpus:
        environment |= settings.cpu.environment()
        if engine_arguments(settings, role).get("enforce_eager"):
            # vLLM's sampler compiles a helper at the first request with logprobs, for many seconds.
            environment["TORCHDYNAMO_DISABLE"] = "1"
    if Path(settings.model_path).is_dir():
        environment["HF_HUB_OFFLINE"] = "1"
    return environment | own.environment
