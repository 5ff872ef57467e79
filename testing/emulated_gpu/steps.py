"""One step on the emulated GPU, in a process of its own: python -m testing.emulated_gpu.steps STEP

Each sends prompts through a prefill and a decode engine, and compares the answers with the decode
engine's own.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

EAGER: dict[str, Any] = {
    "attention_backend": "TRITON_ATTN",
    "block_size": 16,
    "max_model_len": 1024,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 128,
    # Both engines share the GPU.
    "kv_cache_memory_bytes": 2**26,
    "gpu_memory_utilization": 0.3,
}
GRAPHS = {
    "enforce_eager": False,
    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL", "cudagraph_capture_sizes": [1, 2]},
}
TOLERANCE = 5e-3
"""Tolerance of a logprob: Triton multiplies float32 in TF32."""
TOKENS = 3
STORE, STORED_S = "store", 10.0
STREAMS, STREAM_TOKENS = "streams", 16
DOCTOR = "doctor"


@dataclass(frozen=True)
class Step:
    """A pair of engines of one model.

    ``prefill``     arguments of the prefill engine alone
    ``lengths``     tokens of each prompt
    ``concurrent``  whether all prompts are sent at once
    ``devices``     value of CUDA_VISIBLE_DEVICES of each engine
    ``cached``      whether the references use the decode engine's prefix cache: they compute the
                    last token alone, as after a transfer
    """

    model: str
    engine: dict[str, Any] = field(default_factory=dict)
    prefill: dict[str, Any] = field(default_factory=dict)
    lengths: tuple[int, ...] = (33, 200)
    concurrent: bool = False
    devices: tuple[str, str] = ("0", "0")
    preempts: bool = False
    cached: bool = False
    tolerance: float = TOLERANCE


# Enough blocks for each prompt, not for all.
TIGHT = {"num_gpu_blocks_override": 20, "scheduler_reserve_full_isl": False, "max_model_len": 256}
MLA = {"attention_backend": "TRITON_MLA", "dtype": "half", "enable_prefix_caching": True}
STEPS: dict[str, Step] = {
    "full-attention": Step("llama"),
    "sliding-window": Step("gemma3"),
    "mamba": Step("falcon_h1"),
    # vLLM's MLA for GPUs has no float32. In half precision, one engine's logprobs differ by up to
    # 0.02 between chunks of 32 and 128 tokens, and by 0.01 where the prefix is cached. The same
    # computation from the same KV has the same result.
    "mla": Step("deepseek_v2", MLA, lengths=(33, 193), cached=True, tolerance=0.0),
    "preemption": Step("llama", prefill=TIGHT, lengths=(180, 190, 200, 210), concurrent=True, preempts=True),
    "two-devices": Step("llama", lengths=(33,), devices=("0", "1")),
    "cuda-graphs": Step("llama", GRAPHS, lengths=(33,)),
}


async def run(step: Step, folder: Path) -> str:
    from testing import models
    from testing.engines import Pair, describe, generate, start_engine
    from testing.identity import difference, random_prompt
    from testing.trace import read_trace

    build: Callable[[Path], str] = getattr(models, step.model)
    model, engines = build(folder / "model"), []
    try:
        for role, own, device in zip(("kv_producer", "kv_consumer"), (step.prefill, {}), step.devices, strict=True):
            os.environ["CUDA_VISIBLE_DEVICES"] = device
            # The interpreter may keep the progress thread waiting for longer than 30 s.
            transfer = {"trace_path": str(folder / f"{role}.jsonl"), "progress_s": 600.0, "lease_s": 1200.0}
            engines.append(start_engine(model, 1, role, transfer=transfer, **(EAGER | step.engine | own)))
        prefill, decode = engines
        pair = Pair(prefill, decode, await describe(prefill))
        prompts = [random_prompt(length, seed) for seed, length in enumerate(step.lengths)]
        references = [await generate(decode, prompt, TOKENS) for prompt in prompts]
        if step.cached:
            references = [await generate(decode, prompt, TOKENS) for prompt in prompts]
            assert [one.cached_tokens for one in references] == [len(prompt) - 1 for prompt in prompts]
            await decode.reset_prefix_cache()
        if step.concurrent:
            answers = await asyncio.gather(*(pair.together(prompt, TOKENS) for prompt in prompts))
        else:
            answers = [await pair.together(prompt, TOKENS) for prompt in prompts]
        wrong = [found for r, a in zip(references, answers, strict=True) if (found := difference(r, a, step.tolerance))]
        received = [e for e in read_trace(folder / "kv_consumer.jsonl") if e["event"] == "received"]
        moved = sum(event["failure"] is None for event in received)
        runs = sum(e["runs"] for e in read_trace(folder / "kv_producer.jsonl") if e["event"] == "write")
        clean = all([await engine.reset_prefix_cache() for engine in engines])
        found = (
            f"{len(prompts) - len(wrong)} of {len(prompts)} equal, KV of {moved} moved in {runs} runs, "
            f"block pools {'at baseline' if clean else 'NOT at baseline'}"
        )
        preempted = sum("preempted" in (event["failure"] or "") for event in received)
        if step.preempts:
            found += f", {preempted} transfers aborted by a preemption"
        if step.preempts:
            assert preempted, f"{found}: the pool should be too small"
        else:
            assert moved == len(prompts), found
        assert clean, found
        assert not wrong, "; ".join((found, *wrong))
        return found
    finally:
        for engine in reversed(engines):
            engine.shutdown()


async def store(folder: Path) -> str:
    """Store a prompt's KV from one engine, and load it into the next."""
    from testing import models
    from testing.engines import generate, start_engine
    from testing.identity import difference, random_prompt

    model, prompt = models.llama(folder / "model"), random_prompt(100, 0)
    settings = {"path": str(folder / "store"), "chunk_tokens": 16, "always_load": True, "load_s": 60.0}
    answers = []
    for _ in range(2):
        engine = start_engine(model, 1, "kv_producer", transfer={"store": settings}, **EAGER)
        answers.append(await generate(engine, prompt, TOKENS))
        # Writes end in the background.
        await asyncio.sleep(STORED_S)
        engine.shutdown()
    first, second = answers
    loaded, wrong = second.cached_tokens, difference(first, second, TOLERANCE)
    found = f"{loaded} of {len(prompt)} tokens loaded, {wrong or 'answers equal'}"
    assert loaded == 96, found
    assert wrong is None, found
    return found


async def streams(folder: Path) -> str:
    """End streams at random steps; continue them on another engine, in each of Tandem's ways."""
    from actors.upstream.vllm_forced_tokens import FORCED_TOKENS, ForcedTokensV2
    from connectors.protocol.params import EMITTED_TOKENS
    from testing import models
    from testing.engines import SUPERVISOR, run_or_move, start_engine
    from testing.identity import random_prompt
    from testing.trace import read_trace

    model, trace, draw = models.gemma3(folder / "model"), folder / "trace.jsonl", random.Random(0)
    transfer = {"supervisor": SUPERVISOR, "progress_s": 600.0, "lease_s": 1200.0, "trace_path": str(trace)}
    forced = [f"{ForcedTokensV2.__module__}:{ForcedTokensV2.__name__}"]
    source, target = (
        start_engine(model, 1, "kv_consumer", transfer=transfer, logits_processors=forced, **EAGER) for _ in range(2)
    )
    seeded: dict[str, Any] = {"temperature": 1.0, "seed": 7, "presence_penalty": 0.5, "repetition_penalty": 1.2}
    wrong, ended = [], []
    for name, sampling in (("greedy", dict[str, Any]()), ("seeded", seeded)):
        prompt = random_prompt(100, 1)
        whole, _ = await run_or_move(source, prompt, {}, STREAM_TOKENS, **sampling)
        for way in ("moved", "one prefill", "replayed"):
            at = draw.randint(2, STREAM_TOKENS - 4)
            sent = whole[:at]
            extra: dict[str, Any] = {FORCED_TOKENS: sent}
            if way == "one prefill":
                extra = {EMITTED_TOKENS: sent[:-1], FORCED_TOKENS: sent[-1:]}
            elif way == "moved":
                sent, params = await run_or_move(source, prompt, {}, STREAM_TOKENS, at, **sampling)
                extra = {EMITTED_TOKENS: sent, "kv_transfer_params": params}
            more, _ = await run_or_move(target, prompt, extra, STREAM_TOKENS, **sampling)
            answer = [*extra.get(EMITTED_TOKENS, ()), *more]
            ended.append(f"{name} {way} at {len(sent)}")
            if answer != whole:
                wrong.append(f"{ended[-1]}: {answer} instead of {whole}")
    received = [event["failure"] for event in read_trace(trace) if event["event"] == "received"]
    clean = all([await engine.reset_prefix_cache() for engine in (source, target)])
    for engine in (source, target):
        engine.shutdown()
    runner = source.vllm_config.use_v2_model_runner
    found = f"V2 runner: {runner}; {len(ended) - len(wrong)} of {len(ended)} equal ({', '.join(ended)})"
    assert not wrong, "; ".join((found, *wrong))
    assert runner, found
    assert received == [None] * 2, f"{found}, {received}"
    assert clean, f"{found}, block pools NOT at baseline"
    return found


def doctor() -> str:
    """Run ``tandem doctor``, whose second transfer is between two processes' device memory."""
    from app.doctor.__main__ import examine

    # The configuration's model is on the hub.
    findings = [one for one in examine(Path("configs/gpu.yaml"), ["model"]) if one.check in ("gpus", "transfer")]
    found = "; ".join(one.what for one in findings)
    assert all(one.ok for one in findings), "; ".join(map(str, findings))
    assert "GPU memory: sender and receiver" in found, found
    return found


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        try:
            name, where = sys.argv[1], Path(folder)
            if name == DOCTOR:
                found = doctor()
            else:
                others = {STORE: store, STREAMS: streams}
                found = asyncio.run(others[name](where) if name in others else run(STEPS[name], where))
            print("FOUND", found, flush=True)
        except AssertionError as error:
            print("FOUND", " ".join(str(error).split()), flush=True)
            raise
    return 0


if __name__ == "__main__":
    sys.exit(main())
