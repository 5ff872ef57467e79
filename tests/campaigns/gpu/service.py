"""The service under Ray with configs/gpu.yaml.

    python -m tests.campaigns.gpu.service FOLDER --device cuda:0

Only the model is another one: the demo model, whose answers show wrong KV. On one GPU both engines
share it. Requests are concurrent, half of them sampled with top_p.
"""

from __future__ import annotations

import json
import random
import re
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from testing.service_process import ServiceProcess, write_config

REQUESTS, AT_ONCE = 32, 8


def configuration(folder: Path, gpus: int) -> Path:
    """Write gpu.yaml for the demo model on ``gpus`` GPUs; 0: on CPUs."""
    engine: dict[str, Any] = {"max_model_len": 2048}
    if gpus < 2:
        engine |= {"gpu_memory_utilization": 0.3, "kv_cache_memory_bytes": 2**28}
    role: dict[str, Any] = {"num_cpus": 0.5, "num_gpus": min(1, gpus / 2), "start_attempts": 1}
    if not gpus:
        role["engine"] = {"dtype": "float32", "max_num_batched_tokens": 256}
    router = {"num_cpus": 0.5, "routing": {"policy": "always_remote"}}
    return write_config("gpu.yaml", folder, model="demo", engine=engine, prefill=role, decode=role, router=router)


def main(folder: Path, device: str) -> None:
    from testing.facts import make_prompt
    from tests.campaigns.gpu.__main__ import gpus

    service = ServiceProcess(configuration(folder, 0 if device == "cpu" else len(gpus())), folder)
    # The model knows these answers, each token with more than the half that top_p leaves.
    prompts = [make_prompt(random.Random(32 + number), 3) for number in range(REQUESTS)]

    def is_right(number: int) -> bool:
        sampling = {"temperature": 0.5, "top_p": 0.5, "seed": number} if number % 2 else {"temperature": 0}
        body = {"model": "tandem-demo", "prompt": prompts[number].text, "max_tokens": 8} | sampling
        request = urllib.request.Request(
            f"{service.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            text = json.load(answer)["choices"][0]["text"]
            return answer.headers["x-tandem-route"] == "remote" and text.strip().startswith(prompts[number].answer)

    service.start()
    try:
        with ThreadPoolExecutor(AT_ONCE) as pool:
            right = sum(pool.map(is_right, range(REQUESTS)))
        with urllib.request.urlopen(f"{service.url}/metrics", timeout=20) as metrics:
            counts = re.findall(r'kv_requests_total\{[^}]*outcome="recomputed"[^}]*\} (\S+)', metrics.read().decode())
        recomputed = sum(map(float, counts))
    finally:
        left = len(service.stop())
    print(f"found: {right} of {REQUESTS} answers right, {recomputed:g} recomputed, {left} processes left")
    sys.exit(right < REQUESTS or recomputed > 0 or left > 0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[-1])
