"""Run vLLM's OpenAI server in its own process.

The server starts as a module, because the CPU build has no working `vllm` command.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil

from testing.environment import ENVIRONMENT

ROOT = Path(__file__).resolve().parents[1]
START_TIMEOUT_S = 240.0


def start_module(
    folder: Path, name: str, arguments: Sequence[str], environment: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start ``python -m`` in its own session, with its output in ``folder/name.log``."""
    with (folder / f"{name}.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", *arguments],
            cwd=ROOT,
            env=os.environ | ENVIRONMENT | dict(environment or {}),
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def start_vllm(
    folder: Path,
    name: str,
    model: str,
    port: int,
    transfer: Mapping[str, Any],
    environment: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """Start a server with a KV connector; the served model name is ``demo``."""
    arguments = [
        "vllm.entrypoints.openai.api_server",
        *("--model", model, "--served-model-name", "demo", "--host", "127.0.0.1", "--port", str(port)),
        *("--dtype", "float32", "--enforce-eager", "--block-size", "32", "--max-num-batched-tokens", "256"),
        *("--max-model-len", "4096", "--max-num-seqs", "16", "--no-enable-prefix-caching"),
        *("--kv-transfer-config", json.dumps(transfer)),
    ]
    return start_module(folder, name, arguments, environment)


def wait_until_up(url: str, process: subprocess.Popen[bytes], folder: Path) -> None:
    """Wait until ``url`` answers 200.

    Raises RuntimeError with the ends of all logs in ``folder`` if ``process`` ends or
    START_TIMEOUT_S passes first.
    """
    give_up_at = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < give_up_at:
        if process.poll() is not None:
            break
        try:
            if httpx.get(url, timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.5)
    logs = "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')[-3000:]}" for path in folder.glob("*.log"))
    raise RuntimeError(f"{url} did not answer:\n{logs}")


def stop(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Terminate the processes; kill those of them and their descendants left after 30 s."""
    family = [member for process in processes for member in _family(process.pid)]
    for process in processes:
        process.terminate()
    _, left = psutil.wait_procs(family, timeout=30)
    for process in left:
        process.kill()


def _family(pid: int) -> list[psutil.Process]:
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []
