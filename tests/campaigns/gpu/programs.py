"""The checks that start engines: python -m tests.campaigns.gpu.programs FOLDER NAME DEVICE

Each is a process of its own. Two GPUs get an engine each; on one, both engines share it. The device
`cpu` rehearses the flow.
"""

from __future__ import annotations

import asyncio
import fcntl
import itertools
import json
import os
import random
import re
import statistics
import sys
import time
import urllib.request
from collections import defaultdict
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[3]
TOLERANCE = 5e-3
"""Tolerance of the first token's logprob: Triton multiplies float32 in TF32."""
REQUESTS, AT_ONCE = 32, 8
ROUNDS, WARM_UP, SAMPLED, ANSWER_TOKENS, BLOCK_TOKENS = 8, 2, 16, 9, 128
LENGTHS, SMALL_LENGTHS = (512, 2048, 8192), (130, 700)
# The dimensions of Qwen3-1.7B.
SHAPE = {"hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 16, "vocab_size": 151936}
SHAPE |= {"num_key_value_heads": 8, "num_hidden_layers": 28}
SMALL_SHAPE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "vocab_size": 2048}
SMALL_SHAPE |= {"num_key_value_heads": 2, "num_hidden_layers": 4}
STAGES = ("chunk", "write", "written", "verified", "received")
"""Events of a handover in order; a stage ends with the last such event of a transfer."""


def identity_of_two_shapes(folder: Path, cpu: bool) -> bool:
    """Compare the answers of two engines with one engine's, for two shapes of KV cache.

    float32 on Triton's attention, so that rounding does not hide wrong KV. With two GPUs also TP 1
    to 2.
    """
    # A process that has initialised CUDA cannot be forked.
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    import torch

    from testing.models import gemma3, llama
    from tests.campaigns.shapes.families import Family, run

    shared = {"kv_cache_memory_bytes": 2**28, "gpu_memory_utilization": 0.3}
    block, engine = (32, {}) if cpu else (16, shared | {"attention_backend": "TRITON_ATTN"})
    small, large = {"block_size": block}, {"block_size": 2 * block}
    shapes = {
        f"llama, blocks of {block} to {2 * block}": Family(llama, TOLERANCE, engine, prefill=small, decode=large),
        f"gemma3, blocks of {block}": Family(gemma3, TOLERANCE, engine | small),
    }
    good = True
    for number, (name, family) in enumerate(shapes.items()):
        model = family.build(folder / str(number))
        for tp in [(1, 1), (1, 2)] if torch.accelerator.device_count() > 1 else [(1, 1)]:
            result = asyncio.run(run(family, tp, model, 16, folder / f"{number}-{tp[0]}-{tp[1]}.jsonl"))
            outcome, good = result.identity, good and result.good
            print(
                f"found: {name}, TP {tp[0]} -> {tp[1]}: {outcome.checked - len(outcome.wrong)} of "
                f"{outcome.checked} equal, first-token logprobs within {outcome.worst_logprob:.1e}, "
                f"{result.moved} of {result.movable} prompts' KV moved, "
                f"block pools {'at baseline' if result.clean else 'NOT at baseline'}",
                flush=True,
            )
            print(*outcome.wrong, sep="\n", flush=True)
    return good


def configuration(folder: Path, gpus: int) -> Path:
    """Write gpu.yaml for the demo model on ``gpus`` GPUs; 0: on CPUs."""
    from testing.service_process import write_config

    engine: dict[str, Any] = {"max_model_len": 2048}
    if gpus < 2:
        engine |= {"gpu_memory_utilization": 0.3, "kv_cache_memory_bytes": 2**28}
    role: dict[str, Any] = {"num_cpus": 0.5, "num_gpus": min(1, gpus / 2), "start_attempts": 1}
    if not gpus:
        role["engine"] = {"dtype": "float32", "max_num_batched_tokens": 256}
    router = {"num_cpus": 0.5, "routing": {"policy": "always_remote"}}
    return write_config("gpu.yaml", folder, model="demo", engine=engine, prefill=role, decode=role, router=router)


def the_service_answers(folder: Path, cpu: bool) -> bool:
    """Ask the service under Ray with configs/gpu.yaml, but the demo model, whose answers show wrong
    KV. Requests are concurrent, half of them sampled with top_p.
    """
    from testing.facts import make_prompt
    from testing.service_process import ServiceProcess
    from tests.campaigns.gpu.campaign import gpus

    service = ServiceProcess(configuration(folder, 0 if cpu else len(gpus())), folder)
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
    return right == REQUESTS and not recomputed and not left


def engine_arguments(role: str, cpu: bool) -> dict[str, Any]:
    """Return the role's engine arguments of configs/gpu.yaml, changed for several engines on one
    GPU.
    """
    args = yaml.safe_load((ROOT / "configs" / "gpu.yaml").read_text())["applications"][0]["args"]
    own: dict[str, Any] = {"block_size": BLOCK_TOKENS} | args["engine"] | args[role]["engine"]
    own |= {"load_format": "dummy", "max_num_batched_tokens": 8192, "max_num_seqs": 32}
    if cpu:
        del own["gpu_memory_utilization"]
        return own | {"dtype": "float32", "max_model_len": 2048}
    # torch.compile of this model would take most of the five minutes; the service check has it.
    graphs = {"mode": 0, "cudagraph_mode": "FULL", "cudagraph_capture_sizes": [1, 2, 4, 8, 16]}
    own |= {"enforce_eager": False, "compilation_config": graphs}
    return own | {"gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": 3 * 2**30}


def stages_ms(events: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Return the milliseconds of each stage of one transfer, from its trace events."""
    last: dict[str, float] = {}
    for event in events:
        last[event["event"]] = max(last.get(event["event"], 0.0), event["t"])
    pairs = [(a, b) for a, b in itertools.pairwise(STAGES) if a in last and b in last]
    return {f"{a} -> {b}": 1e3 * (last[b] - last[a]) for a, b in pairs}


def start(arm: str, folder: Path, cpu: bool) -> list[Any]:
    """Return the engines of an arm, with random weights; the decode engine comes last."""
    from transformers import Qwen3Config

    from testing.engines import start_engine
    from tests.campaigns.gpu.campaign import gpus

    model = folder / arm
    Qwen3Config(architectures=["Qwen3ForCausalLM"], **(SMALL_SHAPE if cpu else SHAPE)).save_pretrained(model)
    roles = {"decode": None} if arm == "one_engine" else {"prefill": "kv_producer", "decode": "kv_consumer"}
    devices = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(len(gpus()))))).split(",")
    engines = []
    for number, (role, connector) in enumerate(roles.items()):
        arguments = engine_arguments(role, cpu)
        os.environ["CUDA_VISIBLE_DEVICES"] = devices[number % len(devices)]
        os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(5600 + 10 * number)
        if arm == "nixl_connector":
            arguments["connector"] = "NixlConnector"
        else:
            arguments["transfer"] = {"trace_path": str(folder / "trace")}
        engines.append(start_engine(str(model), 1, connector, **arguments))
    return engines


async def measure(arm: str, engines: list[Any], folder: Path, cpu: bool) -> dict[str, Any]:
    """Measure TTFT in turns with the arms of other processes (a lock on ``folder``)."""
    from testing.engines import Pair, describe, generate
    from testing.trace import read_trace

    trace = folder / "trace"
    trace.touch()
    pair = Pair(engines[0], engines[-1], await describe(engines[0]) if arm == "tandem" else {})
    rng, lengths = random.Random(0), SMALL_LENGTHS if cpu else LENGTHS
    figures: dict[str, Any] = {}

    async def send(length: int, **sampling: Any) -> tuple[float, int]:
        """Return the milliseconds to the first token, and the number of tokens."""
        prompt = [rng.randrange(3, 2000) for _ in range(length)]
        began, own = time.monotonic(), {"logprobs": None, **sampling}
        if arm == "one_engine":
            answer = await generate(pair.decode, prompt, ANSWER_TOKENS, **own)
        else:
            send = pair.together if arm == "tandem" else pair.in_turn
            answer = await send(prompt, ANSWER_TOKENS, decode=own)
        return 1e3 * (answer.token_at[0] - began), len(answer.tokens)

    lock = os.open(folder, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    for length in lengths:
        samples: dict[str, list[float]] = defaultdict(list)
        for number in range(-WARM_UP, ROUNDS):
            seen = trace.stat().st_size
            ttft, _ = await send(length)
            await asyncio.sleep(0.05)
            stages = {"ttft": ttft} | stages_ms(read_trace(trace, seen))
            for name, ms in stages.items() if number >= 0 else ():
                samples[name].append(ms)
        quartiles = {name: statistics.quantiles(values, n=4) for name, values in samples.items()}
        figures |= {f"{length} tokens, {name}, ms": [round(ms, 2) for ms in cuts] for name, cuts in quartiles.items()}
    os.close(lock)
    answers = await asyncio.gather(*(send(lengths[0], temperature=1.0, top_p=0.9, seed=n) for n in range(SAMPLED)))
    figures["at once with top_p"] = sum(count == ANSWER_TOKENS for _, count in answers)
    if arm == "tandem":
        received = [event for event in read_trace(trace) if event["event"] == "received" and event["failure"] is None]
        figures["received"] = len(received)
        figures["sent"] = len(lengths) * (WARM_UP + ROUNDS) + SAMPLED
    return figures


def ttft(arm: str, folder: Path, cpu: bool) -> bool:
    """Measure TTFT over ``one_engine``, or the pair of ``tandem`` or ``nixl_connector``, with the
    engine arguments of configs/gpu.yaml.
    """
    engines = start(arm, folder, cpu)
    try:
        figures = asyncio.run(measure(arm, engines, folder, cpu))
    finally:
        for engine in reversed(engines):
            engine.shutdown()
    shown = "; ".join(f"{name} {cuts[1]}" for name, cuts in figures.items() if "ttft" in name)
    print(f"found: {shown}; {figures['at once with top_p']} of {SAMPLED} at once with top_p")
    print(f"figures: {json.dumps(figures)}")
    return figures["at once with top_p"] == SAMPLED and figures.get("received") == figures.get("sent")


def main(folder: Path, name: str, device: str) -> bool:
    cpu = device == "cpu"
    if name == "the_service_answers":
        return the_service_answers(folder, cpu)
    return identity_of_two_shapes(folder, cpu) if name == "identity_of_two_shapes" else ttft(name, folder, cpu)


if __name__ == "__main__":
    sys.exit(not main(Path(sys.argv[1]), *sys.argv[2:]))
