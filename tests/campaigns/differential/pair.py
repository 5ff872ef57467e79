"""Start both sides: the service (prefill and decode engine, router), and one vLLM server, with
equal arguments.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from configs.settings.service import DEMO_MODEL_DIR, DEMO_SERVED_NAME
from testing.adapters import lora_adapter
from testing.models import damaged
from testing.ports import free_port
from testing.programs import Program, module
from testing.servers import API_SERVER
from testing.service_process import ServiceProcess, write_config
from tests.campaigns.differential.model import thinking_model

ADAPTER = "tandem-lora"
"""The name under which clients ask for the adapter."""

BLOCK_TOKENS = 32
ENGINE: dict[str, Any] = {
    "max_model_len": 2048,
    "block_size": BLOCK_TOKENS,
    "max_num_batched_tokens": 256,
    "max_num_seqs": 16,
    "scheduling_policy": "priority",
    "enable_lora": True,
    "max_lora_rank": 8,
    "max_loras": 2,
    "max_logprobs": 20,
    # Reads reasoning only where a request says `thinking`, so that the other chats are not taken
    # for it.
    "reasoning_parser": "deepseek_v3",
}
SINGLE: dict[str, Any] = {"max_num_batched_tokens": ENGINE["max_num_seqs"] * ENGINE["max_model_len"]}
"""Settings of the single server only: each step has room for all waiting prompts.

vLLM's CPU worker crashes on a seeded request whose prompt takes two steps; Tandem's does not
(`actors/upstream/cpu_build/vllm_cpu_worker.py`).
"""

FRONTEND: dict[str, Any] = {
    "enable_prompt_tokens_details": True,
    "enable_auto_tool_choice": True,
    "tool_call_parser": "hermes",
}


@dataclass
class PairOfServers:
    """The service and the single server; ``frontend`` are arguments of the OpenAI layer."""

    folder: Path
    model: Path
    single_model: Path
    first_token: str = "decode"
    tp: str = "1:1"
    decode_replicas: int = 1
    frontend: dict[str, Any] = field(default_factory=lambda: FRONTEND)
    service: ServiceProcess = field(init=False)
    _single: Program = field(init=False)
    _port: int = field(default_factory=free_port)

    @property
    def single_url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Start the service, then the single server; wait until both answer."""
        adapter = lora_adapter(self.folder / "adapter", DEMO_MODEL_DIR)
        prefill_tp, decode_tp = map(int, self.tp.split(":"))
        config = write_config(
            "local.yaml",
            self.folder,
            engine=ENGINE,
            frontend={**self.frontend, "lora_modules": [{"name": ADAPTER, "path": str(adapter)}]},
            router={"client_priority": True, "first_token": self.first_token},
            prefill={"tensor_parallel_size": prefill_tp},
            decode={"tensor_parallel_size": decode_tp, "replicas": self.decode_replicas},
            model=str(self.model),
            served_model_name=DEMO_SERVED_NAME,
        )
        self.service = ServiceProcess(config, self.folder)
        # One side after the other: engines that start at once starve a small machine's Serve.
        self.service.start()
        self._single = module(self.folder / "single.log", *self._single_arguments(adapter))
        self._single.until_up(f"{self.single_url}/health")

    def check_single(self) -> None:
        """Raise RuntimeError, with the end of the log, if the single server has ended."""
        if self._single.process.poll() is not None:
            raise RuntimeError(f"the single server has ended, so its answers are missing:\n{self._single.said[-5000:]}")

    def stop(self) -> None:
        if hasattr(self, "_single"):
            self._single.stop()
        if hasattr(self, "service"):
            self.service.stop()

    def _single_arguments(self, adapter: Path) -> list[str]:
        return [
            API_SERVER,
            *("--model", str(self.single_model), "--served-model-name", DEMO_SERVED_NAME),
            *("--host", "127.0.0.1", "--port", str(self._port), "--dtype", "float32", "--enforce-eager"),
            *(word for name, value in (ENGINE | SINGLE | self.frontend).items() for word in _option(name, value)),
            *("--lora-modules", json.dumps({"name": ADAPTER, "path": str(adapter)})),
        ]


def _option(name: str, value: Any) -> list[str]:
    flag = f"--{name.replace('_', '-')}"
    return [flag] if value is True else [flag, str(value)]


@contextmanager
def pair_of_servers(folder: Path, damage: float = 0.0, **options: Any) -> Iterator[PairOfServers]:
    """Run both sides; with ``damage`` the single server has another checkpoint."""
    model = single = thinking_model(folder)
    if damage:
        single = Path(damaged(str(model), damage))
    pair = PairOfServers(folder, model, single, **options)
    try:
        pair.start()
        yield pair
    finally:
        pair.stop()
