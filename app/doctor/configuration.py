"""Checks of the configuration, and of the model on this machine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from actors.engine.arguments import engine_arguments
from actors.engine.chat_template import REMEDY, renders_time
from app.doctor import Finding
from app.run import check_model, read
from configs.settings.base import ROLES, RoleName, SettingsError
from configs.settings.service import ServiceSettings

WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
FIRST_BYTES = 4096


def check_config(path: Path) -> tuple[list[Finding], dict[str, Any], ServiceSettings]:
    """Return the findings, the Serve config in `path` and Tandem's settings in it.

    For an invalid file, return an empty config and the default settings.
    """
    try:
        config, settings = read(path)
    except SettingsError as error:
        remedy = "correct the file; docs/configuration.md lists every key"
        return [Finding("config", f"{path}: {line}", remedy) for line in str(error).splitlines()], {}, ServiceSettings()
    return [Finding("config", f"{path} is valid")], config, settings


def check_readable(settings: ServiceSettings) -> Iterator[Finding]:
    """Check that a model directory has `config.json` and weights, all readable (`_unreadable`).

    Does not detect that some of several weight files are missing. For a hub id, check that this
    machine's hub cache has `config.json`, or, unless HF_HUB_OFFLINE is set, that the hub has the
    model.
    """
    try:
        check_model(settings)
    except SettingsError as error:
        yield Finding("model", str(error), "set `model` to a directory with a checkpoint, or to a hub id")
        return
    folder = Path(settings.model_path)
    yield from _directory(folder) if folder.is_dir() else _hub(settings.model_path)


def _directory(folder: Path) -> Iterator[Finding]:
    weights = sorted(path for pattern in WEIGHTS for path in folder.glob(pattern))
    if not weights:
        yield Finding(
            "model", f"{folder}: no weights ({', '.join(WEIGHTS)})", "copy the complete checkpoint to this directory"
        )
        return
    unreadable = [
        f"{path.name}: {error}" for path in (folder / "config.json", *weights) if (error := _unreadable(path))
    ]
    if unreadable:
        yield Finding(
            "model",
            f"{folder}: {'; '.join(unreadable)}",
            "copy the files again, and make them readable for the user that serves",
        )
        return
    yield Finding("model", f"{folder}: {len(weights)} weight files are readable")


def check_template(settings: ServiceSettings) -> Iterator[Finding]:
    """Check that the chat template does not render the time. Yields nothing for a hub id."""
    folder = Path(settings.model_path)
    if folder.is_dir() and renders_time(_template(folder, settings.frontend.get("chat_template"))):
        yield Finding("model", f"{folder}: the chat template renders the time, so chats transfer no KV", REMEDY)


def _template(folder: Path, given: str | None) -> str:
    """Return the chat template `given` (path or text), else a checkpoint's; empty without one.

    Several templates are joined.
    """
    with suppress(OSError):  # no such file, or a text
        return Path(given or folder / "chat_template.jinja").read_text(encoding="utf-8", errors="replace")
    if given:
        return given
    with suppress(OSError, ValueError):
        return str(json.loads((folder / "tokenizer_config.json").read_bytes()).get("chat_template"))
    return ""


def _unreadable(path: Path) -> str | None:
    """Return the reason why a checkpoint file is unreadable or visibly incomplete, else None.

    Detects Git LFS pointers, safetensors files that end within their header, and a `config.json`
    that is not JSON. Reads the first FIRST_BYTES of the file, or all of `config.json`.
    """
    try:
        with path.open("rb") as file:
            head = file.read(FIRST_BYTES)
    except OSError as error:
        return error.strerror or str(error)
    if head.startswith(b"version https://git-lfs"):
        return "is a Git LFS pointer, not the file; fetch the file with `git lfs pull`"
    if path.suffix == ".safetensors":
        header_bytes = int.from_bytes(head[:8], "little")
        if len(head) < 8 or 8 + header_bytes > path.stat().st_size:
            return "is truncated"
    if path.name == "config.json":
        try:
            json.loads(path.read_bytes())
        except ValueError as error:
            return f"is not JSON: {error}"
    return None


def _hub(model: str) -> Iterator[Finding]:
    from huggingface_hub import HfApi, constants, try_to_load_from_cache

    if isinstance(try_to_load_from_cache(model, "config.json"), str):
        yield Finding("model", f"{model}: config.json is in this machine's hub cache")
        return
    if constants.HF_HUB_OFFLINE:
        yield Finding(
            "model",
            f"{model} is not in the hub cache, and HF_HUB_OFFLINE is set",
            "download the model, or unset HF_HUB_OFFLINE",
        )
        return
    try:
        HfApi().model_info(model, timeout=10)
    except Exception as error:  # huggingface_hub also passes on the errors of its HTTP library
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        yield Finding(
            "model",
            f"{model}: cannot be fetched from the hub: {reason}",
            "check the name, the network and HF_TOKEN, or use a path",
        )
        return
    yield Finding("model", f"{model} is available on the hub")


def check_kernels(settings: ServiceSettings) -> Iterator[Finding]:
    """Check that vLLM's CPU kernels can run the model with the arguments of each role without GPUs.

    Yields nothing for a model whose `config.json` is not on this machine.
    """
    if not _has_configuration(settings.model_path):
        return
    for role in ROLES:
        if not settings.role(role).num_gpus:
            yield _kernels(settings, role)


def _has_configuration(model: str) -> bool:
    from huggingface_hub import try_to_load_from_cache

    if Path(model).is_dir():
        return _unreadable(Path(model) / "config.json") is None
    return not Path(model).is_absolute() and isinstance(try_to_load_from_cache(model, "config.json"), str)


def _kernels(settings: ServiceSettings, role: RoleName) -> Finding:
    from vllm.engine.arg_utils import AsyncEngineArgs

    try:
        arguments = AsyncEngineArgs(**engine_arguments(settings, role))
        model = arguments.create_model_config()
    except Exception as error:  # vLLM and transformers raise various errors for a model or an argument
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        return Finding(
            "kernels",
            f"{role}: vLLM refuses the model or an argument: {reason}",
            "change `model` or the engine's arguments",
        )
    backend = arguments.attention_backend or arguments.attention_config.backend
    from actors.upstream.cpu_build.vllm_cpu_kernels import engine_problem

    problem = engine_problem(model, backend, arguments.kv_cache_dtype, arguments)
    if problem is not None:
        return Finding("kernels", f"{role}: {problem.reason}", problem.remedy)
    return Finding("kernels", f"{role}: vLLM's CPU kernels run the model in {str(model.dtype).removeprefix('torch.')}")
