"""TTFT over one engine, over Tandem's pair or over NixlConnector's, with the arguments of
configs/gpu.yaml.

    python -m tests.campaigns.gpu.pairs FOLDER one_engine|tandem|nixl_connector --device cuda:0

The model has the dimensions of Qwen3-1.7B and random weights. Two GPUs get an engine each; on one,
both engines share it. Arms in several processes measure in turns (a lock on FOLDER). A CPU
rehearses the flow with a small model.
"""

from __future__ import annotations

import asyncio
import fcntl
import itertools
import json
import os
import random
import statistics
import sys
import time
import uuid
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[3]
REQUESTS, WARM_UP, AT_ONCE, ANSWER_TOKENS, BLOCK_TOKENS = 8, 2, 16, 9, 128
LENGTHS, SMALL_LENGTHS = (512, 2048, 8192), (130, 700)
SHAPE = {"hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 16, "vocab_size": 151936}
SHAPE |= {"num_key_value_heads": 8, "num_hidden_layers": 28}
SMALL_SHAPE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "vocab_size": 2048}
SMALL_SHAPE |= {"num_key_value_heads": 2, "num_hidden_layers": 4}
STAGES = ("chunk", "write", "written", "verified", "received")
"""Events of a handover in order; a stage ends with the last such event of a transfer."""


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
    """Return the engines of an arm; the decode engine comes last."""
    from transformers import Qwen3Config
    from vllm.config import KVTransferConfig

    from testing.engines import start_engine
    from tests.campaigns.gpu.__main__ import gpus

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
            arguments["kv_transfer_config"] = KVTransferConfig(
                kv_connector="NixlConnector", kv_role=connector, kv_load_failure_policy="recompute"
            )
        own = connector if arm == "tandem" else None
        engines.append(start_engine(str(model), 1, own, transfer={"trace_path": str(folder / "trace")}, **arguments))
    return engines


async def measure(arm: str, engines: list[Any], folder: Path, cpu: bool) -> dict[str, Any]:
    from testing.engines import describe
    from testing.legs import leg
    from testing.sequential_proxy import PRODUCE
    from testing.trace import read_trace

    prefill, decode, trace = engines[0], engines[-1], folder / "trace"
    trace.touch()
    address = await describe(prefill) if arm == "tandem" else {}
    rng, lengths = random.Random(0), SMALL_LENGTHS if cpu else LENGTHS
    figures: dict[str, Any] = {}

    async def send(length: int, **sampling: Any) -> tuple[float, int]:
        """Return the milliseconds to the first token, and the number of tokens."""
        prompt = [rng.randrange(3, 2000) for _ in range(length)]
        began, transfer_id, transfer = time.monotonic(), uuid.uuid4().hex, None
        first_leg: asyncio.Future[Any] = asyncio.ensure_future(asyncio.sleep(0))
        if arm == "nixl_connector":
            transfer = (await leg(prefill, prompt, 1, PRODUCE)).output.kv_transfer_params
        elif arm == "tandem":
            transfer = address | {"transfer_id": transfer_id}
            produce = {"do_remote_decode": True, "transfer_id": transfer_id}
            first_leg = asyncio.ensure_future(leg(prefill, prompt, 1, produce))
        answer = await leg(decode, prompt, ANSWER_TOKENS, transfer, **sampling)
        await first_leg
        return 1e3 * (answer.first_token_at - began), len(answer.output.outputs[0].token_ids)

    lock = os.open(folder, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    for length in lengths:
        samples: dict[str, list[float]] = defaultdict(list)
        for number in range(-WARM_UP, REQUESTS):
            seen = trace.stat().st_size
            ttft, _ = await send(length)
            await asyncio.sleep(0.05)
            stages = {"ttft": ttft} | stages_ms(read_trace(trace, seen))
            for name, ms in stages.items() if number >= 0 else ():
                samples[name].append(ms)
        quartiles = {name: statistics.quantiles(values, n=4) for name, values in samples.items()}
        figures |= {f"{length} tokens, {name}, ms": [round(ms, 2) for ms in cuts] for name, cuts in quartiles.items()}
    os.close(lock)
    answers = await asyncio.gather(*(send(lengths[0], temperature=1.0, top_p=0.9, seed=n) for n in range(AT_ONCE)))
    figures["at once with top_p"] = sum(count == ANSWER_TOKENS for _, count in answers)
    if arm == "tandem":
        received = [event for event in read_trace(trace) if event["event"] == "received" and event["failure"] is None]
        figures["received"] = len(received)
        figures["sent"] = len(lengths) * (WARM_UP + REQUESTS) + AT_ONCE
    return figures


def main(folder: Path, arm: str, cpu: bool) -> None:
    engines = start(arm, folder, cpu)
    try:
        figures = asyncio.run(measure(arm, engines, folder, cpu))
    finally:
        for engine in reversed(engines):
            engine.shutdown()
    shown = "; ".join(f"{name} {cuts[1]}" for name, cuts in figures.items() if "ttft" in name)
    print(f"found: {shown}; {figures['at once with top_p']} of {AT_ONCE} at once with top_p")
    print(f"figures: {json.dumps(figures)}")
    sys.exit(figures["at once with top_p"] < AT_ONCE or figures.get("received") != figures.get("sent"))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[-1] == "cpu")
