"""Stages and causes in the logs of an engine's processes."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from actors.engine.startup.start_log import MAX_CAUSE_LINES, STAGE_MESSAGES, root_cause, stage_of

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


def test_the_error_of_a_worker_counts_before_the_engine_cores() -> None:
    log = "\n".join([*traceback(RANK, "safetensors.SafetensorError: incomplete metadata"), *WORKER_FAILED])
    assert root_cause(log) == "safetensors.SafetensorError: incomplete metadata"


def test_lines_of_ranks_that_alternate() -> None:
    pairs = zip(traceback(RANK, "ValueError: no"), traceback(OTHER_RANK, "ValueError: no"), strict=True)
    log = "\n".join([*(line for pair in pairs for line in pair), *WORKER_FAILED])
    assert root_cause(log) == "ValueError: no"


def test_of_chained_exceptions_the_last_counts() -> None:
    chain = ("KeyError: 'x'", "", "During handling of the above exception, another exception occurred:", "")
    again = ("Traceback (most recent call last):", "    h()", "OSError: the model cannot be found", "Check its name.")
    assert (
        root_cause("\n".join(traceback(CORE, *chain, *again))) == "OSError: the model cannot be found\nCheck its name."
    )


def test_a_long_message_is_cut() -> None:
    cause = root_cause("\n".join(traceback(CORE, "ValueError: no", *map(str, range(100)))))
    assert cause is not None
    assert len(cause.splitlines()) == MAX_CAUSE_LINES


def test_a_log_without_an_error() -> None:
    assert (
        root_cause("(EngineCore pid=1) INFO 11-22 17:03:12 [core.py:133] ValueError: only told\nValueError: x") is None
    )


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
