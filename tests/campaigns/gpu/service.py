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

import yaml

ROOT = Path(__file__).resolve().parents[3]
REQUESTS, AT_ONCE = 32, 8


def configuration(folder: Path, gpus: int) -> Path:
    """Write gpu.yaml for the demo model on ``gpus`` GPUs; 0: on CPUs."""
    document = yaml.safe_load((ROOT / "configs" / "gpu.yaml").read_text())
    args = document["applications"][0]["args"]
    args["model"] = "demo"
    args["engine"]["max_model_len"] = 2048
    if gpus == 1:
        args["engine"] |= {"gpu_memory_utilization": 0.3, "kv_cache_memory_bytes": 2**28}
    elif not gpus:
        args["engine"] = {"max_model_len": 2048, "max_num_batched_tokens": 256}
        args["prefill"]["engine"] = args["decode"]["engine"] = {}
    for role in ("prefill", "decode"):
        args[role] |= {"num_cpus": 0.5, "num_gpus": min(1, gpus / 2), "start_attempts": 1}
    args["router"] |= {"num_cpus": 0.5, "routing": {"policy": "always_remote"}}
    path = folder / "service.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def main(folder: Path, device: str) -> None:
    from testing.facts import make_prompt
    from testing.service_process import ServiceProcess
    from tests.campaigns.gpu.__main__ import gpus

    service = ServiceProcess(configuration(folder, 0 if device == "cpu" else len(gpus())), folder)
    prompts = [make_prompt(random.Random(number), 3) for number in range(REQUESTS)]

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
