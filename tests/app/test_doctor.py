"""`doctor` reports no problem on a working machine, and the one problem of another."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from actors.upstream.cpu_build import vllm_cpu_kernels
from actors.upstream.cpu_build.vllm_cpu_kernels import CpuFeatures
from app.doctor import configuration, machine, store
from app.doctor.__main__ import CHECKS, main
from app.doctor.configuration import check_readable
from app.doctor.transfer import check_transfer
from app.installation import PACKAGES
from app.run import read
from configs.settings.parsing import parse_settings
from configs.settings.service import DEMO_MODEL_DIR, ServiceSettings
from connectors.transport import selftest
from testing.models import deepseek_v2

AMX, AVX2 = CpuFeatures(amx=True, avx512=True), CpuFeatures(amx=False, avx512=False)
LOCAL = Path(__file__).resolve().parents[2] / "configs" / "local.yaml"


@pytest.fixture
def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@pytest.fixture
def config_file(tmp_path: Path, free_port: int) -> Callable[..., str]:
    """Write local.yaml with changed settings, or two-models.yaml with those of its second model."""

    def write(file: str = "local.yaml", **changes: Any) -> str:
        config = yaml.safe_load(LOCAL.with_name(file).read_text())
        args = config["applications"][0]["args"]
        args["router"]["http_port"] = changes.pop("port", free_port)
        own = args["models"][1] if "models" in args else args
        for key, value in changes.items():
            own[key] = {**own.get(key, {}), **value} if isinstance(value, dict) else value
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump(config))
        return str(path)

    return write


def failures(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith("FAIL")]


def test_a_healthy_machine(config_file: Callable[..., str], capsys: pytest.CaptureFixture[str]) -> None:
    """All checks pass, including a real transfer."""
    status = main(["--config", config_file()])
    output = capsys.readouterr().out
    assert (status, failures(output)) == (0, []), output
    for check in {"python", "config", *CHECKS} - {"gpus", "engines", "temporary", "tls", "store"}:
        assert f"ok    {check} " in output
    assert "16 MiB between two processes" in output


MLX5 = {"decode": {"environment": {"UCX_NET_DEVICES": "mlx5_77:1"}}}
RANGE = {"prefill": {"environment": {"UCX_TCP_PORT_RANGE": "2000"}}}
NO_TCP = {"decode": {"environment": {"UCX_TLS": "posix,self"}}}
"""Shared memory alone, which cannot detect a peer's death."""
SECOND = "two-models.yaml"


@pytest.mark.parametrize(
    ("file", "changes", "message"),
    [
        (
            "local.yaml",
            {"transfer": {"backends": ["UCX", "TCPX"]}},
            "transfer .* no backend TCPX.* set transfer.backends to",
        ),
        ("local.yaml", {"transfer": {"backends": ["GDS"]}}, r"transfer .*'GDS'\].* install the libraries of GDS"),
        ("local.yaml", NO_TCP, "transfer .*the receiver.* check the UCX_ variables"),
        ("local.yaml", {"decode": {"replica": 2}}, "config .* decode.replica: no such setting.* correct the file"),
        ("local.yaml", {"engine": {"max_modle_len": 1}}, "config .* engine.max_modle_len: vLLM has no such argument"),
        ("local.yaml", {"model": "/nowhere/at/all"}, "model .* there is no config.json in '/nowhere/at/all'"),
        ("local.yaml", MLX5, "ucx .* decode: .* mlx5_77:1"),
        ("local.yaml", {"model": "/nowhere", "transfer": {"devices": ["lo"]}}, "model .* '/nowhere'"),
        ("local.yaml", RANGE, "ports .* '2000' is not a range"),
        (SECOND, MLX5, r"ucx .* models\.1\.decode: .* mlx5_77:1"),
        (SECOND, RANGE, "ports .* '2000' is not a range"),
        (SECOND, NO_TCP, "transfer .* {second}: the receiver"),
    ],
)
def test_one_problem(
    config_file: Callable[..., str],
    capsys: pytest.CaptureFixture[str],
    file: str,
    changes: dict[str, Any],
    message: str,
) -> None:
    """The doctor prints one problem, which names the key or the model, and its remedy."""
    path = config_file(file, **changes)
    if file == SECOND:
        message = message.format(second=list(read(Path(path))[1].each_model().values())[1].model_name)
    skipped = ["python", "kernels", *([] if message.startswith("transfer") else ["transfer"])]
    assert main(["--config", path, "--skip", *skipped]) == 1
    output = capsys.readouterr().out
    assert len(failures(output)) == 1
    found = output[output.index("FAIL") :].replace("\n", " ")
    assert re.match(f"FAIL  {message}", found), found


def test_a_transfer_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check also reports a process that hangs before NIXL starts."""
    (tmp_path / "sitecustomize.py").write_text("import time; time.sleep(3600)")
    monkeypatch.setattr(selftest, "START_S", 0.1)
    settings = parse_settings({"decode": {"environment": {"PYTHONPATH": str(tmp_path)}}})
    (finding,) = check_transfer(settings)
    assert finding.what == "the receiver sent no result within 0.1 s"
    assert finding.remedy.startswith("check the UCX_ variables")


def test_a_port_that_is_taken(config_file: Callable[..., str], capsys: pytest.CaptureFixture[str]) -> None:
    """The ports are those of the service, the side channel and an engine's data-parallel ranks."""
    with contextlib.ExitStack() as stack:
        listeners = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(3)]
        http, side, rank = (int(listener.getsockname()[1]) for listener in listeners)
        changed = config_file(
            port=http,
            transfer={"side_channel_host": None, "side_channel_port": side},
            decode={"rpc_host": "127.0.0.1", "rpc_port": rank - 1, "data_parallel_size": 2},
        )
        assert main(["--config", changed, "--skip", "transfer", "model"]) == 1
    output = capsys.readouterr().out
    # Other programs may have the port below `rank` or the one above `side`.
    assert {http, side, rank} <= {int(line.split(":")[1]) for line in failures(output)}
    for setting in ("router.http_port", "transfer.side_channel_port", "decode.rpc_port"):
        assert f"or change {setting}" in output


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Return a copy of the demo model, to be damaged."""
    return Path(shutil.copytree(DEMO_MODEL_DIR, tmp_path / "model"))


@pytest.mark.parametrize(
    ("call", "ok"),
    [
        ("'%d %b %Y'", True),
        ('"%Y-%m-%d"', True),
        ("'%H:%M'", False),
        ('"%Y-%m-%dT%X"', False),
        ("'%-I %p'", False),
        ("format", False),
    ],
)
def test_a_chat_template_that_renders_the_time(checkpoint: Path, call: str, ok: bool) -> None:
    """The two legs of a request would render different prompts; a date differs at midnight only."""
    template = {"chat_template": "{{ strftime_now(" + call + ") }}"}
    (checkpoint / "tokenizer_config.json").write_text(json.dumps(template), encoding="utf-8")
    found = list(configuration.check_template(parse_settings({"model": str(checkpoint)})))
    assert (found == []) == ok


def test_a_model_that_cannot_be_read(checkpoint: Path) -> None:
    """The checkpoint is truncated, a Git LFS pointer, without weights, or without valid JSON."""

    def finding() -> str:
        (found,) = check_readable(parse_settings({"model": str(checkpoint)}))
        return "" if found.ok else found.what

    (weights,) = checkpoint.glob("*.safetensors")
    whole = weights.read_bytes()
    assert finding() == ""
    for damaged, problem in ((whole[:100], "is truncated"), (b"version https://git-lfs.github.com/1", "is a Git LFS")):
        weights.write_bytes(damaged)
        assert f"{weights.name}: {problem}" in finding()
    weights.unlink()
    assert "no weights" in finding()
    weights.mkdir()
    assert f"{weights.name}: Is a directory" in finding()
    weights.rmdir()
    weights.write_bytes(whole)
    (checkpoint / "config.json").write_text("{")
    assert "config.json: is not JSON" in finding()


@pytest.mark.parametrize(
    ("engine", "decode", "features", "reasons"),
    [
        # Latent attention in float32, the default without a GPU, on a CPU with AMX.
        ({}, {}, AMX, ["prefill: vLLM's MLA kernel", "decode: vLLM's MLA kernel"]),
        ({}, {"dtype": "bfloat16"}, AMX, ["prefill: vLLM's MLA kernel"]),
        ({"attention_backend": "CPU_MLA"}, {}, AMX, []),
        ({}, {}, AVX2, []),
        # vLLM's own error comes when the engine starts.
        ({"kv_cache_dtype": "fp8"}, {}, AVX2, ["prefill: a KV cache of fp8", "decode: a KV cache of fp8"]),
    ],
)
def test_a_model_without_a_kernel(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    engine: dict[str, Any],
    decode: dict[str, Any],
    features: CpuFeatures,
    reasons: list[str],
) -> None:
    monkeypatch.setattr(vllm_cpu_kernels, "cpu_features", lambda: features)
    model = deepseek_v2(tmp_path)
    engine = {"skip_tokenizer_init": True} | engine
    settings = parse_settings({"model": model, "engine": engine, "decode": {"engine": decode}})
    found = list(configuration.check_kernels(settings))
    assert len(found) == 2
    wrong = [one for one in found if not one.ok]
    assert [one.what.startswith(reason) for one, reason in zip(wrong, reasons, strict=True)] == [True] * len(reasons)
    assert all(one.remedy for one in wrong)


def test_a_model_that_vllm_refuses(tmp_path: Path) -> None:
    """vLLM's own reason, before an engine starts; nothing if another check reports a missing
    model.
    """
    settings = parse_settings({"model": deepseek_v2(tmp_path), "engine": {"max_model_len": 10**6}})
    assert [one.ok for one in configuration.check_kernels(settings)] == [False, False]
    assert list(configuration.check_kernels(parse_settings({"model": str(tmp_path / "none")}))) == []
    assert list(configuration.check_kernels(parse_settings({"model": "nobody/nothing"}))) == []


def test_few_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hard limit counts: each process raises its soft limit to it."""
    monkeypatch.setattr(machine.resource, "getrlimit", lambda _: (1024, 4096))
    (finding,) = machine.check_open_files(ServiceSettings())
    assert (finding.what, finding.ok) == ("a process may open 4,096 files; a router may need 5,120", False)
    (finding,) = machine.check_open_files(parse_settings({"router": {"max_ongoing_sequences": 3000}}))
    assert finding.ok


LONG = "/" + "x" * 60


@pytest.mark.parametrize(
    ("check", "variables", "failed"),
    [
        (machine.check_home, {"HOME": "/none"}, ["HOME: /none is not a directory"]),
        (machine.check_home, {"VLLM_CACHE_ROOT": "{tmp}/new/cache"}, []),
        # As in a container with a read-only root. /proc stands for it: root can write elsewhere.
        (machine.check_home, {"XDG_CACHE_HOME": "/proc/self/cache"}, ["XDG_CACHE_HOME: /proc/self/cache cannot be"]),
        (machine.check_temporary_directory, {"RAY_TMPDIR": "/proc/self"}, ["/proc/self cannot be written"]),
        # The path of a socket of Ray has at most 107 bytes; RAY_TMPDIR precedes TMPDIR.
        (machine.check_temporary_directory, {"TMPDIR": LONG}, [f"{LONG}: 61 bytes long"]),
        (machine.check_temporary_directory, {"TMPDIR": LONG, "RAY_TMPDIR": "/tmp"}, []),
    ],
)
def test_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, check: Any, variables: dict[str, str], failed: list[str]
) -> None:
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value.format(tmp=tmp_path))
    found = [one.what for one in check() if not one.ok]
    assert [one.startswith(text) for one, text in zip(found, failed, strict=True)] == [True] * len(failed), found


def test_a_library_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM would report it only at an engine's start. Engines with GPUs do not need it."""
    monkeypatch.setattr(machine, "NUMA", "libnuma-not.so.1")
    (finding,) = machine.check_libraries(ServiceSettings())
    assert ("libnuma-not.so.1" in finding.what, finding.ok) == (True, False)
    gpus = {"num_gpus": 1}
    assert list(machine.check_libraries(parse_settings({"prefill": gpus, "decode": gpus}))) == []


def test_another_release_of_a_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Versions are compared with those that Tandem requires."""
    monkeypatch.setitem(PACKAGES, "Nothing", ("not-there",))
    monkeypatch.setattr(machine, "RELEASES", {"Ray": "1.0.0", "Nothing": "1"})
    found = [one for one in machine.check_python() if not one.ok]
    assert [one.what.split()[0] for one in found] == ["Ray", "Nothing"]
    assert "install Ray 1.0.0" in found[0].remedy


def test_a_store_that_fits(tmp_path: Path) -> None:
    """The check creates no folder; the store creates it at its first start."""
    folder = tmp_path / "new" / "store"
    settings = parse_settings({"store": {"path": str(folder), "disk_gib": 1e-6, "staging_mib": 1}})
    found = list(store.check_store(settings))
    assert [one.ok for one in found] == [True, True], found
    assert f"{folder}: 0.0 GiB stored, room for " in found[0].what
    assert list(tmp_path.iterdir()) == []
    (off,) = store.check_store(ServiceSettings())
    assert str(off).startswith("ok    store         off: ")


def test_a_store_that_cannot_work(tmp_path: Path) -> None:
    """The folder or the sizes of the store are wrong: owner, permissions, path, budget, staging."""
    (tmp_path / "others").mkdir()
    (tmp_path / "others" / "thesis.tex").touch()
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "file").touch()
    cases: list[tuple[dict[str, Any], str, str]] = [
        ({"path": str(tmp_path / "others")}, "contains 'thesis.tex'", "set store.path"),
        ({"path": str(tmp_path / "open")}, "all users of this host may write", "set store.path"),
        ({"path": str(tmp_path / "file" / "store")}, "store cannot be used: Not a directory", "set store.path"),
        ({"path": str(tmp_path / "large"), "disk_gib": 1e9}, "store.disk_gib 1e+09", "lower store.disk_gib"),
        ({"memory_gib": 1e9}, "store.memory_gib 1e+09", "lower store.memory_gib"),
        ({"memory_gib": 1e-3, "staging_mib": 2**20}, "the staging of two engines needs", "lower store.staging_mib"),
    ]
    for settings, what, remedy in cases:
        (failed,) = [one for one in store.check_store(parse_settings({"store": settings})) if not one.ok]
        assert what in failed.what
        assert remedy in failed.remedy
