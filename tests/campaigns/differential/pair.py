"""Start both sides: the service (prefill and decode engine, router), and one vLLM server, with
equal arguments.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.settings.service import DEMO_MODEL_DIR, DEMO_SERVED_NAME
from testing.adapters import lora_adapter
from testing.models import damaged
from testing.ports import free_port
from testing.programs import Program, start_module
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


@dataclass(frozen=True)
class PairOfServers:
    service: ServiceProcess
    single: Program
    single_url: str
    first_token: str

    def check_single(self) -> None:
        """Raise RuntimeError, with the end of the log, if the single server has ended."""
        if self.single.process.poll() is not None:
            raise RuntimeError(
                f"the single server has ended; its answers are missing. End of its log:\n{self.single.output[-4000:]}"
            )


@contextmanager
def pair_of_servers(
    folder: Path,
    damage: float = 0.0,
    first_token: str = "decode",
    tp: str = "1:1",
    decode_replicas: int = 1,
    frontend: dict[str, Any] = FRONTEND,
) -> Iterator[PairOfServers]:
    """Run both sides. With ``damage`` the single server has another checkpoint.

    ``frontend``  arguments of the OpenAI layer
    """
    model = thinking_model(folder)
    adapter = lora_adapter(folder / "adapter", DEMO_MODEL_DIR)
    prefill_tp, decode_tp = map(int, tp.split(":"))
    config = write_config(
        "local.yaml",
        folder,
        engine=ENGINE,
        frontend={**frontend, "lora_modules": [{"name": ADAPTER, "path": str(adapter)}]},
        router={"client_priority": True, "first_token": first_token},
        prefill={"tensor_parallel_size": prefill_tp},
        decode={"tensor_parallel_size": decode_tp, "replicas": decode_replicas},
        model=str(model),
        served_model_name=DEMO_SERVED_NAME,
    )
    port = free_port()
    single_model = damaged(str(model), damage) if damage else str(model)
    arguments = [
        *("--model", single_model, "--served-model-name", DEMO_SERVED_NAME),
        *("--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager"),
        *(word for name, value in (ENGINE | SINGLE | frontend).items() for word in _option(name, value)),
        *("--lora-modules", json.dumps({"name": ADAPTER, "path": str(adapter)})),
    ]
    service = ServiceProcess(config, folder)
    with ExitStack() as stack:
        # One side after the other: engines that start at once starve a small machine's Serve.
        service.start()
        stack.callback(service.stop)
        single = start_module(folder / "single.log", API_SERVER, *arguments)
        stack.callback(single.stop)
        single.wait_until_up(f"http://127.0.0.1:{port}/health")
        yield PairOfServers(service, single, f"http://127.0.0.1:{port}", first_token)


def _option(name: str, value: Any) -> list[str]:
    flag = f"--{name.replace('_', '-')}"
    return [flag] if value is True else [flag, str(value)]
