"""Run Ray Serve LLM's own prefill/decode application until Ctrl-C.

    build/ray-llm/bin/python -m testing.ray_llm MODEL PORT ENGINE_ARGUMENTS [CONNECTOR]

One prefill and one decode replica on the CPU. ``CONNECTOR`` is the ``kv_transfer_config`` of both,
NixlConnector's if not given; all other settings are Ray's defaults. Ray 2.60 pins vLLM 0.29, which
has no CPU build, so this is Ray's code with Tandem's vLLM.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from testing.environment import ENVIRONMENT
from testing.ports import free_port
from testing.signals import interrupt_on_signals
from testing.vllm_server import ROOT, stop

CPUS = 8
"""Resources that Ray assumes: its deployments request one each, and are idle in turn."""

READY = "ray serve llm: ready"
START_S = 400.0
POLL_S = 0.5
"""Interval between reads of the log of a process that takes minutes to start."""

PYTHON = "build/ray-llm/bin/python"
"""Python with the package that Ray Serve LLM needs besides Tandem's (Makefile)."""


def config(model: str, engine: Mapping[str, Any], transfer: Mapping[str, Any], role: str) -> dict[str, Any]:
    return {
        "model_loading_config": {"model_id": "demo", "model_source": model},
        "engine_kwargs": {**engine, "kv_transfer_config": {"kv_role": role, **transfer}},
        "deployment_config": {"num_replicas": 1, "autoscaling_config": None},
        "accelerator_config": {"kind": "cpu"},
        "placement_group_config": {"bundles": [{"CPU": 1}]},
    }


def run(model: str, port: int, engine: Mapping[str, Any], transfer: Mapping[str, Any]) -> None:
    """Run on a Ray cluster of this process, at `port`."""
    import ray
    from ray import serve
    from ray.serve.llm import build_pd_openai_app

    ray.init(address="local", include_dashboard=False, num_cpus=CPUS, log_to_driver=False)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        roles = ("prefill_config", "kv_producer"), ("decode_config", "kv_consumer")
        app = build_pd_openai_app({name: config(model, engine, transfer, role) for name, role in roles})
        serve.run(app, name="peer")
        interrupt_on_signals()
        print(READY, flush=True)
        signal.pause()
    finally:
        serve.shutdown()
        ray.shutdown()


def start(
    folder: Path, model: str, engine: Mapping[str, Any], transfer: Mapping[str, Any]
) -> tuple[subprocess.Popen[bytes], str]:
    """Start the application in its own Ray cluster, and wait for its engines. Return its URL too.

    Raises RuntimeError with its log's end.
    """
    port, path = free_port(), folder / f"{transfer['kv_connector']}.log"
    line = [PYTHON, "-m", "testing.ray_llm", model, str(port), json.dumps(engine), json.dumps(transfer)]
    environment = os.environ | ENVIRONMENT | {"PYTHONPATH": str(ROOT)}
    with path.open("wb") as log:
        process = subprocess.Popen(
            line, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
    give_up_at = time.monotonic() + START_S
    # The application answers /v1/models long before it has an engine.
    while READY not in path.read_text(errors="replace"):
        if process.poll() is not None or time.monotonic() > give_up_at:
            stop([process])
            raise RuntimeError(f"Ray Serve LLM did not start:\n{path.read_text(errors='replace')[-3000:]}")
        time.sleep(POLL_S)
    return process, f"http://127.0.0.1:{port}"


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        model, port, *options = sys.argv[1:]
        engine, transfer = [*map(json.loads, options), {"kv_connector": "NixlConnector"}][:2]
        run(model, int(port), engine, transfer)
