"""A prefill and a decode engine of any shape, compared with one engine: the world of `shapes`.

The judge: every answer equals the reference's, the KV of every request that can move has moved, and
all block pools return to their baseline.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm.v1.engine.async_llm import AsyncLLM

from testing.engines import Answer, Pair, describe, generate, start_engine
from testing.identity import LOGPROB_TOLERANCE, MAX_TOKENS, difference
from testing.models import damaged
from testing.trace import read_trace
from tests.campaigns.runner import Report

IDLE_S = 20.0


@dataclass(frozen=True)
class Shape:
    """Data-parallel and tensor-parallel sizes of both engines, by prefill and decode."""

    tp: tuple[int, int]
    dp: tuple[int, int] = (1, 1)

    @classmethod
    def parse(cls, text: str) -> Shape:
        """Return the shape of ``2:1`` (TP sizes) or ``2x1:1x2`` (DP x TP)."""
        sizes = [[int(size) for size in side.split("x")] for side in text.split(":")]
        return cls((sizes[0][-1], sizes[1][-1]), (sizes[0][-2] if len(sizes[0]) > 1 else 1, ([1, *sizes[1]])[-2]))

    def __str__(self) -> str:
        return f"{self.dp[0]}x{self.tp[0]}:{self.dp[1]}x{self.tp[1]}"


@dataclass(frozen=True)
class Case:
    """A request: its prompt, and further arguments of ``generate`` for each leg.

    ``moves``  whether decode can use prefill's KV; otherwise it must compute the prompt
    """

    prompt: Sequence[int]
    name: str = ""
    prefill: Mapping[str, Any] = field(default_factory=dict)
    decode: Mapping[str, Any] = field(default_factory=dict)
    moves: bool = True

    @property
    def movable(self) -> bool:
        return self.moves and len(self.prompt) > 1

    def __str__(self) -> str:
        return f"{self.name or 'prompt'} of {len(self.prompt)} tokens"


@dataclass
class Engines:
    """Two running engines. ``pairs`` has one pair for each combination of data-parallel ranks."""

    shape: Shape
    prefill: AsyncLLM
    decode: AsyncLLM
    pairs: list[Pair]
    trace: Path

    async def send(
        self,
        cases: Sequence[Case],
        references: Sequence[Answer],
        tokens: int = MAX_TOKENS,
        tolerance: float = LOGPROB_TOLERANCE,
        at_once: int = 1,
    ) -> tuple[list[str], float]:
        """Send all requests; return the differences, and the largest one of a first logprob.

        Every fourth request has its legs in sequence, the others both at once.
        """
        wrong: list[str] = []
        worst = 0.0
        slots = asyncio.Semaphore(at_once)

        async def one(number: int, case: Case, reference: Answer) -> None:
            nonlocal worst
            pair = self.pairs[number % len(self.pairs)]
            in_turn = number // len(self.pairs) % 4 == 3 and not case.prefill and not case.decode
            async with slots:
                send = (
                    pair.in_turn(case.prompt, tokens)
                    if in_turn
                    else pair.together(case.prompt, tokens, case.prefill, case.decode)
                )
                answer = await asyncio.wait_for(send, 120)
            worst = max(worst, abs(reference.logprobs[0][0][1] - answer.logprobs[0][0][1]))
            if problem := difference(reference, answer, tolerance):
                ranks = f", ranks {pair.prefill_rank} to {pair.decode_rank}" if len(self.pairs) > 1 else ""
                wrong.append(f"{case}{ranks}, {'in turn' if in_turn else 'at once'}: {problem}")

        await asyncio.gather(*(one(number, *each) for number, each in enumerate(zip(cases, references, strict=True))))
        return wrong, worst

    def received(self) -> tuple[int, int]:
        """Return the requests whose KV has arrived on every decode rank, and those that failed."""
        whole, failed = Counter[str](), Counter[str]()
        for event in read_trace(self.trace) if self.trace.exists() else ():
            if event["event"] == "received":
                (whole if event["failure"] is None else failed)[event["request"]] += 1
        return sum(count == self.shape.tp[1] for count in whole.values()), len(failed)

    async def idle(self, within_s: float = IDLE_S) -> bool:
        """Return whether all pools return to their baseline; clears cached prefixes."""
        give_up_at = asyncio.get_running_loop().time() + within_s
        engines = (self.prefill, self.decode)
        while not all([all(await one.engine_core.call_utility_all_async("reset_prefix_cache")) for one in engines]):
            if asyncio.get_running_loop().time() > give_up_at:
                return False
            await asyncio.sleep(0.1)
        return True


def judge_each(
    report: Report, name: str, shapes: Sequence[str], play: Callable[[Shape, Path], Coroutine[Any, Any, dict[str, Any]]]
) -> None:
    """Run ``play`` with each shape and the path of its trace.

    Report what every pair must keep: right answers, KV moved wherever it can, empty pools.
    """
    for text in shapes:
        case = f"{name} {text}".strip()
        with report.case(case):
            trace = report.folder / f"{name}-{text.replace(':', '-')}.jsonl"
            found = asyncio.run(play(Shape.parse(text), trace))
            report.row(case=case, **found)
            for line in found["wrong"]:
                report.problem(f"{case}: {line}")
            report.equal(f"{case}: requests whose KV moved", found["moved"], found["movable"])
            report.check(found["clean"], f"{case}: block pools are not at their baseline")


@asynccontextmanager
async def engines(
    model: str,
    shape: Shape,
    trace: Path,
    prefill: Mapping[str, Any] | None = None,
    decode: Mapping[str, Any] | None = None,
    transfer: Mapping[str, Any] | None = None,
) -> AsyncIterator[Engines]:
    """Start a pair with these engine arguments; end it afterwards."""
    config = {"trace_path": str(trace), "lease_s": 5.0, **(transfer or {})}
    started: list[AsyncLLM] = []
    try:
        for side, (role, own) in enumerate((("kv_producer", prefill), ("kv_consumer", decode))):
            ranks: dict[str, Any] = {"data_parallel_size": shape.dp[side]} if shape.dp[side] > 1 else {}
            started.append(start_engine(model, shape.tp[side], role, transfer=config, **ranks, **(own or {})))
        sides = [list(range(size)) if size > 1 else [None] for size in shape.dp]
        addresses = {rank: await describe(started[0], rank) for rank in sides[0]}
        assert len({one["remote_engine_id"] for one in addresses.values()}) == len(addresses), addresses
        first, second = started
        pairs = [Pair(first, second, addresses[p], p, d) for p, d in itertools.product(*sides)]
        yield Engines(shape, first, second, pairs, trace)
    finally:
        for engine in reversed(started):
            engine.shutdown()


async def alone(engine: AsyncLLM, cases: Sequence[Case], tokens: int = MAX_TOKENS) -> list[Answer]:
    """Return an engine's own answers to the decode legs."""
    return [await generate(engine, case.prompt, tokens, **case.decode) for case in cases]


async def stock(
    model: str, tp: int, cases: Sequence[Case], tokens: int = MAX_TOKENS, damage: float = 0.0, **arguments: Any
) -> list[Answer]:
    """Return the answers of one engine without a connector, on damaged weights if asked."""
    engine = start_engine(damaged(model, damage) if damage else model, tp, None, **arguments)
    try:
        return await alone(engine, cases, tokens)
    finally:
        engine.shutdown()
