"""The service under Ray with configs/gpu.yaml: `python -m tests.campaigns.gpu.service FOLDER`.

Only the model is another one: the demo model, whose answers show wrong KV. On one GPU both engines
share it. Requests are concurrent, half of them sampled with top_p.
"""

from __future__ import annotations

import argparse
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
    args["engine"] |= {"max_model_len": 2048}
    if gpus < 2:
        args["engine"] |= {"gpu_memory_utilization": 0.3, "kv_cache_memory_bytes": 2**28}
    if not gpus:
        args["engine"] = {"max_model_len": 2048}
    for role in ("prefill", "decode"):
        args[role] |= {"num_cpus": 0.5, "start_attempts": 1} | ({"num_gpus": 0.5} if gpus == 1 else {})
        if not gpus:
            del args[role]["num_gpus"]
    args["router"] |= {"num_cpus": 0.5, "routing": {"policy": "always_remote"}}
    path = folder / "service.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="cuda:0")
    options = parser.parse_args()
    from testing.facts import make_prompt
    from testing.service_process import ServiceProcess
    from tests.campaigns.gpu.__main__ import gpus

    count = 0 if options.device == "cpu" else len(gpus())
    service = ServiceProcess(configuration(options.folder, count), options.folder)
    service.start()
    try:
        prompts = [make_prompt(random.Random(number), 3) for number in range(REQUESTS)]

        def ask(number: int) -> str:
            sampling = {"temperature": 0.5, "top_p": 0.5, "seed": number} if number % 2 else {"temperature": 0}
            body = {"model": "tandem-demo", "prompt": prompts[number].text, "max_tokens": 8} | sampling
            request = urllib.request.Request(
                f"{service.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=120) as answer:
                route = answer.headers["x-tandem-route"]
                return f"{route} {json.load(answer)['choices'][0]['text'].strip()}"

        with ThreadPoolExecutor(AT_ONCE) as pool:
            answers = list(pool.map(ask, range(REQUESTS)))
        right = sum(
            answer.startswith(f"remote {prompt.answer}") for answer, prompt in zip(answers, prompts, strict=True)
        )
        with urllib.request.urlopen(f"{service.url}/metrics", timeout=20) as metrics:
            counted = re.findall(r'kv_requests_total\{[^}]*outcome="(\w+)"[^}]*\} (\S+)', metrics.read().decode())
        recomputed = sum(float(value) for outcome, value in counted if outcome == "recomputed")
    finally:
        left = service.stop()
    print(
        f"found: {right} of {REQUESTS} answers right over both engines, {recomputed:g} recomputed, "
        f"{len(left)} processes left"
    )
    print(f"figures: {json.dumps({'right': right, 'recomputed': recomputed})}")
    sys.exit(right < REQUESTS or recomputed > 0 or len(left) > 0)


if __name__ == "__main__":
    main()
