"""Identity with one engine between engines with data-parallel ranks.

    python -m tests.campaigns.shapes.data_parallel --help

``make data-parallel`` runs the whole campaign. A pair is ``DPxTP`` of prefill and of decode. Each
request is pinned to one rank of either engine, so all pairs of ranks exchange KV. The reference is
one stock engine without a connector.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from vllm.v1.engine.async_llm import AsyncLLM

from testing import fork_server
from testing.engines import Answer, Pair, describe, generate, start_engine
from testing.identity import LOGPROB_TOLERANCE, MAX_TOKENS, difference, prompts
from testing.models import deepseek_v2, falcon_h1, gemma3, llama
from testing.trace import read_trace
from tests.campaigns.shapes.families import FAMILIES

LONGEST = 700
CONCURRENCY = 4


@dataclass(frozen=True)
class Shape:
    """Sizes of an engine: ``dp`` data-parallel ranks of ``tp`` tensor-parallel ranks each."""

    dp: int
    tp: int

    @classmethod
    def parse(cls, text: str) -> Shape:
        dp, _, tp = text.partition("x")
        return cls(int(dp), int(tp))

    @property
    def ranks(self) -> list[int | None]:
        """The data-parallel ranks to pin requests to; None where the engine has one."""
        return list(range(self.dp)) if self.dp > 1 else [None]


@dataclass(frozen=True)
class Model:
    """Builder of a model, and the engine arguments that the model needs."""

    build: Callable[[Path], str]
    engine: Mapping[str, Any] = field(default_factory=dict)


MODELS = {
    "llama": Model(llama),
    "gemma3": Model(gemma3),
    "falcon_h1": Model(falcon_h1),
    "deepseek_v2": Model(partial(deepseek_v2, experts=0), FAMILIES["deepseek_v2"].engine),
}


@dataclass(frozen=True)
class Result:
    """``moved`` of ``movable`` prompts got all their KV from the other engine.

    ``by_rank``  number of requests per pair of ranks
    ``clean``    whether the block pools of all ranks are at their baseline
    """

    checked: int
    wrong: tuple[str, ...]
    moved: int
    movable: int
    by_rank: dict[tuple[int | None, int | None], int]
    clean: bool

    @property
    def good(self) -> bool:
        return not self.wrong and self.moved == self.movable and self.clean


def start(model: Model, path: str, role: str | None, shape: Shape, **overrides: Any) -> AsyncLLM:
    """Start an engine of ``shape`` with the model in folder ``path``."""
    parallel = {"data_parallel_size": shape.dp} if shape.dp > 1 else {}
    return start_engine(path, shape.tp, role, **(dict(model.engine) | parallel | overrides))


async def references(model: Model, path: str, todo: Sequence[list[int]], tp: int) -> list[Answer]:
    """Return the answers of one stock engine."""
    engine = start(model, path, None, Shape(1, tp))
    try:
        return [await generate(engine, prompt, MAX_TOKENS) for prompt in todo]
    finally:
        engine.shutdown()


async def run(
    model: Model, path: str, shapes: tuple[Shape, Shape], cases: Sequence[tuple[list[int], Answer]], trace: Path
) -> Result:
    """Start a pair and send each prompt through one pair of ranks, ``CONCURRENCY`` at a time."""
    started: list[AsyncLLM] = []
    try:
        for role, shape in zip(("kv_producer", "kv_consumer"), shapes, strict=True):
            started.append(start(model, path, role, shape, transfer={"trace_path": str(trace)}))
        prefill, decode = started
        addresses = [await describe(prefill, rank) for rank in shapes[0].ranks]
        assert len({one["remote_engine_id"] for one in addresses}) == len(addresses), addresses
        assert len({one["remote_port"] for one in addresses}) == len(addresses), addresses
        pairs = [
            Pair(prefill, decode, address, prefill_rank, decode_rank)
            for (prefill_rank, address), decode_rank in itertools.product(
                zip(shapes[0].ranks, addresses, strict=True), shapes[1].ranks
            )
        ]
        wrong: list[str] = []
        sent: Counter[tuple[int | None, int | None]] = Counter()
        free = asyncio.Semaphore(CONCURRENCY)

        async def one(index: int, prompt: list[int], reference: Answer) -> None:
            pair = pairs[index % len(pairs)]
            async with free:
                send = pair.in_turn if index // len(pairs) % 4 == 3 else pair.together
                answer = await send(prompt, MAX_TOKENS)
            sent[pair.prefill_rank, pair.decode_rank] += 1
            if problem := difference(reference, answer, LOGPROB_TOLERANCE):
                where = f"ranks {pair.prefill_rank} -> {pair.decode_rank}"
                wrong.append(f"{len(prompt)} tokens, {where}, {send.__name__}: {problem}")

        await asyncio.gather(*(one(index, *case) for index, case in enumerate(cases)))
        clean = await idle(started)
        movable = sum(len(prompt) > 1 for prompt, _ in cases)
        return Result(len(cases), tuple(wrong), _received(trace, shapes[1].tp), movable, dict(sent), clean)
    finally:
        for engine in reversed(started):
            engine.shutdown()


async def idle(engines: Sequence[AsyncLLM], within_s: float = 10.0) -> bool:
    """Return whether the block pools of all ranks come back to their baseline."""
    deadline = asyncio.get_running_loop().time() + within_s
    while True:
        pools = [await engine.engine_core.call_utility_all_async("reset_prefix_cache") for engine in engines]
        if all(map(all, pools)):
            return True
        if asyncio.get_running_loop().time() > deadline:
            return False
        await asyncio.sleep(0.1)


def _received(trace: Path, ranks: int) -> int:
    """Return the number of requests whose KV has arrived whole on every tensor-parallel rank."""
    events = read_trace(trace)
    whole = Counter(e["request"] for e in events if e["event"] == "received" and e["failure"] is None)
    return sum(count == ranks for count in whole.values())


async def _campaign(names: Sequence[str], pairs: Sequence[tuple[Shape, Shape]], count: int) -> int:
    failed = 0
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            model = MODELS[name]
            path = model.build(Path(folder) / name)
            todo = prompts(count, LONGEST, seed=7)
            by_tp = {tp: await references(model, path, todo, tp) for tp in sorted({decode.tp for _, decode in pairs})}
            for number, (prefill, decode) in enumerate(pairs):
                cases = list(zip(todo, by_tp[decode.tp], strict=True))
                result = await run(model, path, (prefill, decode), cases, Path(folder) / f"{number}.jsonl")
                failed += not result.good
                print(
                    f"{name}, (DP, TP) ({prefill.dp}, {prefill.tp}) -> ({decode.dp}, {decode.tp}): "
                    f"{result.checked - len(result.wrong)} of {result.checked} equal, "
                    f"{result.moved} of {result.movable} prompts' KV moved, requests by rank {result.by_rank}, "
                    f"block pools {'at baseline' if result.clean else 'NOT at baseline'}",
                    flush=True,
                )
                for line in result.wrong:
                    print("   ", line, flush=True)
    return failed


def main() -> None:
    fork_server.prepare()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="gemma3,falcon_h1,deepseek_v2", help=", ".join(MODELS))
    parser.add_argument("--pairs", default="2x1:1x1,1x1:2x1,2x1:2x1,2x1:1x2", help="DPxTP of prefill:decode")
    parser.add_argument("--prompts", type=int, default=100)
    arguments = parser.parse_args()
    pairs = []
    for text in arguments.pairs.split(","):
        prefill, _, decode = text.partition(":")
        pairs.append((Shape.parse(prefill), Shape.parse(decode)))
    sys.exit(1 if asyncio.run(_campaign(arguments.models.split(","), pairs, arguments.prompts)) else 0)


if __name__ == "__main__":
    main()
