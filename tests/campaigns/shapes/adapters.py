"""Requests over three LoRA adapters and the base model, eight at a time: every answer must be
its own adapter's.

    python -m tests.campaigns.shapes.adapters [--requests 500] [--pairs 1:1,1:2]

(``make adapters``). The same prompts go to every adapter, so KV of another adapter would be taken
for one's own if keys did not tell them apart. There is one adapter slot more than adapters
(``vllm_cpu_kernels.py``). The reference is the decode engine alone. Every tenth request names an
adapter that prefill has not: under that prefill computes with the base model, or with an adapter of
other content.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm.lora.request import LoRARequest

from testing import fork_server
from testing.adapters import RANK, lora_adapter
from testing.engines import Answer, Pair, describe, generate, start_engine
from testing.identity import MAX_TOKENS, difference, prompts
from testing.models import llama
from testing.trace import read_trace

CONCURRENCY = 8
PROMPTS = 24
LONGEST = 400
ADAPTERS = 4
ENGINE = {"enable_lora": True, "max_lora_rank": RANK, "max_loras": ADAPTERS + 1}


@dataclass(frozen=True)
class Case:
    """A prompt and the adapters that decode and prefill use for it; None: the base model."""

    prompt: int
    decode: LoRARequest | None
    prefill: LoRARequest | None

    @property
    def shared(self) -> bool:
        # vLLM compares adapters by name.
        return _path(self.decode) == _path(self.prefill)


@dataclass(frozen=True)
class Result:
    """``moved`` of ``movable`` requests received KV; ``recomputed`` of ``strangers`` did not.

    ``alike``: prompts whose adapters give the base model's answer, which could hide a mistake.
    """

    checked: int
    wrong: tuple[str, ...]
    moved: int
    movable: int
    recomputed: int
    strangers: int
    alike: int
    clean: bool

    @property
    def good(self) -> bool:
        complete = (self.moved, self.recomputed) == (self.movable, self.strangers)
        return not self.wrong and complete and self.alike == 0 and self.clean


def cases(count: int, folder: Path, model: str) -> list[Case]:
    """Return `count` random requests, of which every tenth names an adapter that prefill does not
    have.
    """
    made = [
        LoRARequest(f"adapter-{number}", number, str(lora_adapter(folder / f"adapter-{number}", Path(model), number)))
        for number in range(1, ADAPTERS + 1)
    ]
    stranger = made.pop()
    impostor = LoRARequest(
        stranger.lora_name, stranger.lora_int_id, str(lora_adapter(folder / "impostor", Path(model), 9))
    )
    rng = random.Random(5)
    todo = []
    for number in range(count):
        adapter = rng.choice([None, *made])
        case = Case(rng.randrange(PROMPTS), adapter, adapter)
        todo.append(case if number % 10 else Case(case.prompt, stranger, rng.choice([None, impostor])))
    return todo


async def run(todo: Sequence[Case], model: str, tp: tuple[int, int], trace: Path) -> Result:
    """Start a pair and send all requests through it, ``CONCURRENCY`` at a time."""
    texts = [prompt for prompt in prompts(PROMPTS + 2, LONGEST, seed=7) if len(prompt) > 2]
    started: list[Any] = []
    transfer = {"trace_path": str(trace), "lease_s": 5.0}
    try:
        for role, size, caching in (("kv_producer", tp[0], True), ("kv_consumer", tp[1], False)):
            engine = ENGINE | {"enable_prefix_caching": caching}
            started.append(start_engine(model, size, role, transfer=transfer, **engine))
        prefill, decode = started
        pair = Pair(prefill, decode, await describe(prefill))
        # Servers load an adapter before its first request, too.
        for adapter in {_path(case.prefill): case.prefill for case in todo if case.prefill is not None}.values():
            await prefill.add_lora(adapter)
        for adapter in {_path(case.decode): case.decode for case in todo if case.decode is not None}.values():
            await decode.add_lora(adapter)
        references: dict[tuple[int, str], Answer] = {}
        for case in todo:
            key = case.prompt, _name(case.decode)
            if key not in references:
                references[key] = await generate(decode, texts[case.prompt], MAX_TOKENS, lora=case.decode)
        slots = asyncio.Semaphore(CONCURRENCY)
        wrong: list[str] = []

        async def send(case: Case) -> None:
            async with slots:
                answer = await pair.together(texts[case.prompt], MAX_TOKENS, case.prefill, case.decode)
            problem = difference(references[case.prompt, _name(case.decode)], answer)
            if problem:
                wrong.append(f"{_name(case.decode)}, {len(texts[case.prompt])} tokens: {problem}")

        await asyncio.gather(*map(send, todo))
        clean = await _idle(started)
    finally:
        for engine in reversed(started):
            engine.shutdown()
    base = {prompt: answer for (prompt, name), answer in references.items() if name == _name(None)}
    alike = sum(
        base[prompt].logprobs[0] == answer.logprobs[0]
        for (prompt, name), answer in references.items()
        if name != _name(None) and prompt in base
    )
    failures = Counter[str]()
    whole = Counter[str]()
    for event in read_trace(trace):
        if event["event"] == "received":
            whole[event["request"]] += event["failure"] is None
            failures[event["request"]] += event["failure"] is not None
    strangers = sum(not case.shared for case in todo)
    return Result(
        len(todo),
        tuple(wrong),
        sum(count == tp[1] for count in whole.values()),
        len(todo) - strangers,
        sum(count > 0 for count in failures.values()),
        strangers,
        alike,
        clean,
    )


def _path(adapter: LoRARequest | None) -> str | None:
    return None if adapter is None else adapter.lora_path


def _name(adapter: LoRARequest | None) -> str:
    return "base model" if adapter is None else adapter.lora_name


async def _idle(engines: Sequence[Any], within_s: float = 20.0) -> bool:
    deadline = asyncio.get_running_loop().time() + within_s
    while not all([await engine.reset_prefix_cache() for engine in engines]):
        if asyncio.get_running_loop().time() > deadline:
            return False
        await asyncio.sleep(0.1)
    return True


def main() -> None:
    fork_server.prepare()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--pairs", default="1:1,1:2", help="prefill:decode tensor-parallel sizes")
    arguments = parser.parse_args()
    failed = 0
    for each in arguments.pairs.split(","):
        prefill_tp, _, decode_tp = each.partition(":")
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            model = llama(folder / "model")
            todo = cases(arguments.requests, folder, model)
            result = asyncio.run(run(todo, model, (int(prefill_tp), int(decode_tp)), folder / "trace.jsonl"))
        failed += not result.good
        print(
            f"TP {prefill_tp} -> {decode_tp}: {result.checked - len(result.wrong)} of {result.checked} equal, "
            f"{result.moved} of {result.movable} requests' KV moved, "
            f"{result.recomputed} of {result.strangers} with another adapter on prefill recomputed, "
            f"{result.alike} answers of adapters like the base model's, "
            f"block pools {'at baseline' if result.clean else 'NOT at baseline'}: {'good' if result.good else 'BAD'}",
            flush=True,
        )
        for line in result.wrong:
            print("   ", line, flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
