"""The start of an engine: stages and causes in its logs, its reports, and variables of GPUs."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import vllm.envs

from actors.engine.startup import start_progress
from actors.engine.startup.gpu_defaults import SAMPLER, START_LIMIT, START_LIMIT_S, set_gpu_defaults
from actors.engine.startup.start_log import MAX_CAUSE_LINES, STAGE_MESSAGES, EngineReport, root_cause, stage_of
from actors.engine.startup.start_progress import StartProgress, StartWatch
from actors.errors import EngineStartError
from actors.upstream import ray_private

CORE = "(EngineCore pid=10) ERROR 11-22 17:03:12 [core.py:1214] "
RANK = "(Worker_TP0 pid=11) ERROR 11-22 17:03:11 [multiproc_executor.py:885] "
OTHER_RANK = "(Worker_TP1 pid=12) ERROR 11-22 17:03:11 [multiproc_executor.py:885] "


def traceback(prefix: str, *ends: str) -> list[str]:
    lines = ["failed to start.", "Traceback (most recent call last):", '  File "x.py", line 1, in f', "    g()", *ends]
    return [prefix + line for line in lines]


WORKER_FAILED = traceback(CORE, "Exception: WorkerProc initialization failed due to an exception in a background one.")


@pytest.mark.parametrize(
    ("line", "stage"),
    [
        (
            "(EngineCore pid=1) INFO 11-22 17:03:12 [core.py:133] Initializing a V1 LLM engine (v0.32.0) …",
            "engine core",
        ),
        ("(Worker pid=1) INFO 11-22 17:03:38 [cpu_model_runner.py:68] Starting to load model /m...", "loading weights"),
        ("(EngineCore pid=1) INFO 1 [kv_cache_utils.py:1] GPU KV cache size: 349,525 tokens, Maximum …", "KV cache"),
        ("(EngineCore pid=1) INFO 1 [kv_cache_utils.py:1] kv cache group sizes (128, 128)", None),
    ],
)
def test_stages(line: str, stage: str | None) -> None:
    assert stage_of(line) == stage


def test_the_installed_vllm_logs_these_messages() -> None:
    """vLLM's sources contain the messages that mark the stages of a start."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent / "v1"
    found = ["worker/cpu_model_runner.py", "worker/gpu_model_runner.py", "core/kv_cache_utils.py", "engine/core.py"]
    sources = "".join((folder / path).read_text() for path in found)
    # One of the messages starts with the device, as an argument.
    assert all(message in sources for message in STAGE_MESSAGES)


NO = "ValueError: no"
CHAIN = ("KeyError: 'x'", "", "During handling of the above exception, another exception occurred:", "")
AGAIN = ("Traceback (most recent call last):", "    h()", "OSError: the model cannot be found", "Check its name.")


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        ([*traceback(RANK, "safetensors.SafetensorError: bad"), *WORKER_FAILED], "safetensors.SafetensorError: bad"),
        ([line for pair in zip(traceback(RANK, NO), traceback(OTHER_RANK, NO), strict=True) for line in pair], NO),
        (traceback(CORE, *CHAIN, *AGAIN), "OSError: the model cannot be found\nCheck its name."),
        (traceback(CORE, NO, *map(str, range(100))), "\n".join([NO, *map(str, range(MAX_CAUSE_LINES - 1))])),
        (["(EngineCore pid=1) INFO 11-22 17:03:12 [core.py:133] ValueError: only told", "ValueError: x"], None),
    ],
    ids=["a worker's before the core's", "two ranks in turns", "the last of a chain", "a long message", "no error"],
)
def test_the_cause_of_a_failed_start(log: list[str], cause: str | None) -> None:
    assert root_cause("\n".join(log)) == cause


SERVE_LOG = """
import logging, os, sys
from logging.handlers import MemoryHandler
from ray.serve._private.logging_utils import configure_component_logger
from ray.serve.schema import LoggingConfig
configure_component_logger(
    component_name="component", component_id="id", max_bytes=10**6, backup_count=1, buffer_size=1,
    logging_config=LoggingConfig(logs_dir=sys.argv[1]),
)
from actors.engine.startup.serve_log import keep_serve_log
if sys.argv[2] == "kept":
    keep_serve_log()
import vllm.logger
from vllm.config.logging import LoggingConfig
vllm.logger.configure_logging(LoggingConfig())
logging.getLogger("ray.serve").info("after vLLM's start")
(handler,) = [one for one in logging.getLogger("ray.serve").handlers if isinstance(one, MemoryHandler)]
print(handler.target and handler.target.baseFilename)
"""


@pytest.mark.parametrize("kept", [True, False])
def test_serves_log_works_after_vllm_has_configured_logging(tmp_path: Path, kept: bool) -> None:
    """Without `keep_serve_log`, Serve would end the replica after a restart of the Ray head."""
    arguments = [str(tmp_path), "kept" if kept else "closed"]
    done = subprocess.run([sys.executable, "-c", SERVE_LOG, *arguments], capture_output=True, text=True, check=True)
    (path,) = tmp_path.glob("*.log")
    assert done.stdout.splitlines()[-1] == (str(path) if kept else "None")
    assert ("after vLLM's start" in path.read_text()) is kept


class Store:
    """Replacement of `ray.experimental.internal_kv`."""

    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}

    def _internal_kv_put(self, key: bytes, value: bytes, overwrite: bool, namespace: bytes) -> None:
        assert namespace == ray_private.NAMESPACE
        self.values[key] = value

    def _internal_kv_exists(self, key: bytes, namespace: bytes) -> bool:
        return key in self.values

    def _internal_kv_get(self, key: bytes, namespace: bytes) -> bytes | None:
        return self.values.get(key)

    def _internal_kv_list(self, prefix: bytes, namespace: bytes) -> list[bytes]:
        return [key for key in self.values if key.startswith(prefix)]

    def _internal_kv_del(self, key: bytes, namespace: bytes, del_by_prefix: bool = False) -> None:
        for one in [one for one in self.values if one == key or (del_by_prefix and one.startswith(key))]:
            del self.values[one]


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    store = Store()
    monkeypatch.setattr(ray_private, "internal_kv", store)
    return store


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "worker-1.out"
    path.write_text("(EngineCore pid=1) ERROR 11-22 17:03:12 [core.py:1] ValueError: of an earlier replica\n")
    monkeypatch.setattr(start_progress, "own_logs", lambda: [path])
    monkeypatch.setattr(start_progress, "POLL_S", 0.01)
    return path


def test_stages_of_a_start(store: Store, log: Path) -> None:
    watch = StartWatch()
    watch.open()
    with StartProgress("prefill", "r1"):
        assert [one.stage for one in watch.reports()] == ["importing vLLM"]
        with log.open("a", encoding="utf-8") as file:
            file.write("INFO Starting to load model x...\n")
        until = time.monotonic() + 10
        while [one.stage for one in watch.reports()] != ["loading weights"]:
            assert time.monotonic() < until
            time.sleep(0.01)
    name = str(log.with_name("prefill-r1.out"))
    assert watch.reports() == [EngineReport("prefill", "ready", None, name)]
    assert Path(name).read_text(encoding="utf-8") == log.read_text(encoding="utf-8")
    watch.close()
    assert store.values == {}


def test_a_failed_start_reports_and_raises_its_cause(store: Store, log: Path) -> None:
    StartWatch().open()

    def fail() -> None:
        with StartProgress("decode", "r1"):
            with log.open("a", encoding="utf-8") as file:
                file.write("(EngineCore pid=2) ERROR 11-22 17:03:12 [core.py:1] ValueError: the cause\n")
            raise RuntimeError("Engine core initialization failed. See root cause above.")

    with pytest.raises(EngineStartError, match=r"^the decode engine did not start: ValueError: the cause\nfull log: "):
        fail()
    assert json.loads(store.values[b"start/decode/r1"])["error"] == "ValueError: the cause"


def test_an_error_of_the_actor_itself(store: Store, log: Path) -> None:
    with pytest.raises(EngineStartError, match="did not start: OSError: no such model"), StartProgress("decode", "r1"):
        raise OSError("no such model")


def test_nothing_is_reported_where_no_launcher_watches(store: Store, log: Path) -> None:
    with StartProgress("prefill", "r1"):
        pass
    assert store.values == {}


def install(folder: Path, *names: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_text("#!/bin/sh\n")
        (folder / name).chmod(0o755)


@pytest.mark.parametrize(
    ("tools", "cuda", "cache", "given", "sampler"),
    [
        ((), None, False, None, "0"),
        (("ninja",), None, False, None, "0"),
        (("nvcc", "ninja"), None, False, None, None),
        (("nvcc", "ninja"), "other", False, None, "0"),
        (("ninja",), "cuda", False, None, None),
        ((), None, True, None, None),
        ((), None, False, "1", "1"),
    ],
    ids=["nothing", "no compiler", "compiler", "CUDA_HOME without one", "CUDA_HOME", "jit cache", "the user's choice"],
)
def test_flashinfer_samples_only_where_it_can_be_compiled(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tools: tuple[str, ...],
    cuda: str | None,
    cache: bool,
    given: str | None,
    sampler: str | None,
) -> None:
    """Without a compiler, the first request with `top_p` would end the engine."""
    install(tmp_path / "bin", *tools)
    install(tmp_path / "cuda" / "bin", "nvcc")
    monkeypatch.setattr("actors.engine.startup.gpu_defaults.CUDA", tmp_path / "none")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    for variable in ("CUDA_HOME", "CUDA_PATH", SAMPLER, START_LIMIT):
        monkeypatch.setenv(variable, "")  # restored after the test, also if the code sets it
        monkeypatch.delenv(variable)
    if cuda:
        monkeypatch.setenv("CUDA_HOME", str(tmp_path / cuda))
    if cache:
        (tmp_path / "packages" / "flashinfer_jit_cache").mkdir(parents=True)
        monkeypatch.syspath_prepend(tmp_path / "packages")
    if given:
        monkeypatch.setenv(SAMPLER, given)
    set_gpu_defaults()
    assert os.environ.get(SAMPLER) == sampler
    assert START_LIMIT_S == vllm.envs.VLLM_ENGINE_READY_TIMEOUT_S
    monkeypatch.setenv(START_LIMIT, "60")
    set_gpu_defaults()
    assert vllm.envs.VLLM_ENGINE_READY_TIMEOUT_S == 60
