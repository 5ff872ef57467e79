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
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from testing.environment import ENVIRONMENT
from testing.ports import free_port
from testing.programs import ROOT, Program
from testing.signals import interrupt_on_signals

CPUS = 8
"""Resources that Ray assumes: its deployments request one each, and are idle in turn."""

READY = "ray serve llm: ready"
START_S = 400.0
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


def start(folder: Path, model: str, engine: Mapping[str, Any], transfer: Mapping[str, Any]) -> tuple[Program, str]:
    """Start the application in its own Ray cluster, and wait for its engines. Return its URL too.

    Raises RuntimeError with its log's end.
    """
    port, log = free_port(), folder / f"{transfer['kv_connector']}.log"
    command = [PYTHON, "-m", "testing.ray_llm", model, str(port), json.dumps(engine), json.dumps(transfer)]
    program = Program(command, log, os.environ | ENVIRONMENT | {"PYTHONPATH": str(ROOT)})
    # The application answers /v1/models long before it has an engine.
    program.wait_until(READY, START_S)
    return program, f"http://127.0.0.1:{port}"


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        model, port, *options = sys.argv[1:]
        engine, transfer = [*map(json.loads, options), {"kv_connector": "NixlConnector"}][:2]
        run(model, int(port), engine, transfer)
