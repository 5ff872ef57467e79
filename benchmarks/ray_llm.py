"""Run Ray Serve LLM's own prefill/decode application until Ctrl-C, for comparison.

    build/ray-llm/bin/python -m benchmarks.ray_llm MODEL PORT ENGINE_ARGUMENTS

One prefill and one decode replica on the CPU with NixlConnector; all other settings are Ray's
defaults. Ray 2.60 pins vLLM 0.29, which has no CPU build, so this is Ray's code with Tandem's vLLM.
"""

from __future__ import annotations

import json
import signal
import sys
from contextlib import suppress
from typing import Any

import ray
from ray import serve
from ray.serve.llm import build_pd_openai_app

from testing.signals import interrupt_on_signals

CPUS = 8
"""Resources that Ray assumes: its deployments request one each, and are idle in turn."""

READY = "ray serve llm: ready"


def config(model: str, role: str, engine: dict[str, Any]) -> dict[str, Any]:
    return {
        "model_loading_config": {"model_id": "demo", "model_source": model},
        "engine_kwargs": engine | {"kv_transfer_config": {"kv_connector": "NixlConnector", "kv_role": role}},
        "deployment_config": {"num_replicas": 1, "autoscaling_config": None},
        "accelerator_config": {"kind": "cpu"},
        "placement_group_config": {"bundles": [{"CPU": 1}]},
    }


def run(model: str, port: int, engine: dict[str, Any]) -> None:
    ray.init(address="local", include_dashboard=False, num_cpus=CPUS, log_to_driver=False)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        roles = ("prefill_config", "kv_producer"), ("decode_config", "kv_consumer")
        app = build_pd_openai_app({name: config(model, role, engine) for name, role in roles})
        serve.run(app, name="peer")
        interrupt_on_signals()
        print(READY, flush=True)
        signal.pause()
    finally:
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        run(sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3]))
