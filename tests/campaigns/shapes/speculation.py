"""Compare speculative decoding after a handover with one engine: tokens, accepted tokens, block
pools.

    python -m tests.campaigns.shapes.speculation [--methods ngram,eagle] [--pairs 1:1,1:2]
        [--prompts 100]

runs the whole campaign (``make speculation``). The reference of each pair is its decode engine,
which computes every prompt alone. A request that continues from received KV begins with a step of
placeholders, which vLLM counts as one draft (``v1/core/sched/scheduler.py``, ``pad_spec_decode``);
the report counts it separately.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client import REGISTRY

from testing import fork_server
from testing.engines import Answer, Pair, describe, generate, start_engine
from testing.identity import difference, prompts
from testing.models import repeating_gemma3, speculative_llama
from testing.trace import read_trace

LONGEST = 700
MAX_TOKENS = 32
DRAFTS = 3
ACCEPTANCE_TOLERANCE = 0.02
_COUNTER = "vllm:spec_decode_num_"


@dataclass(frozen=True)
class Models:
    """Path of the target model, and speculative_config of each side; None: the side does not
    speculate.
    """

    target: str
    prefill: dict[str, Any] | None
    decode: dict[str, Any]


@dataclass(frozen=True)
class Method:
    """Speculation method: ``build`` creates the models; ``moves``: whether KV is transferred or
    refused at first contact.
    """

    build: Callable[[Path], Models]
    moves: bool = True


def _ngram(target: str) -> Models:
    return Models(target, None, {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1} | _TOKENS)


def _draft_model(folder: Path, on_prefill: bool = True) -> Models:
    made = speculative_llama(folder)
    drafts = {"method": "draft_model", "model": made.draft} | _TOKENS
    return Models(made.target, drafts if on_prefill else None, drafts)


def _eagle(folder: Path) -> Models:
    made = speculative_llama(folder)
    drafts = {"method": "eagle", "model": made.eagle} | _TOKENS
    return Models(made.target, drafts, drafts)


_TOKENS = {"num_speculative_tokens": DRAFTS}

METHODS: dict[str, Method] = {
    "ngram_on_decode": Method(lambda folder: _ngram(repeating_gemma3(folder))),
    "draft_model": Method(_draft_model),
    "eagle": Method(_eagle),
    # Decode has KV of drafts that prefill has not: the pair is refused at first contact.
    "draft_model_on_decode": Method(lambda folder: _draft_model(folder, on_prefill=False), moves=False),
}


@dataclass(frozen=True)
class Counts:
    """vLLM's counters of one run: draft rounds, drafted and accepted tokens.

    ``placeholders`` are rounds, too.
    """

    rounds: int
    drafted: int
    accepted: int
    placeholders: int = 0

    @property
    def acceptance_length(self) -> float:
        """Mean number of tokens of a step with drafts."""
        return 1 + self.accepted / max(1, self.rounds - self.placeholders)


@dataclass(frozen=True)
class Result:
    """``moved`` of ``movable`` prompts got all their KV from the other engine; ``clean``: pools
    at baseline.
    """

    checked: int
    wrong: tuple[str, ...]
    alone: Counts
    pair: Counts
    moved: int
    movable: int
    clean: bool

    @property
    def good(self) -> bool:
        ratio = self.pair.acceptance_length / self.alone.acceptance_length
        accepts = self.alone.accepted > 0 and abs(ratio - 1) <= ACCEPTANCE_TOLERANCE
        return not self.wrong and accepts and self.moved == self.movable and self.clean


async def run(method: Method, models: Models, tp: tuple[int, int], count: int, trace: Path) -> Result:
    """Start a pair; send ``count`` prompts to decode alone, then through the pair."""
    transfer = {"trace_path": str(trace), "lease_s": 5.0}
    started = []
    try:
        for role, size, drafts in (
            ("kv_producer", tp[0], models.prefill),
            ("kv_consumer", tp[1], models.decode),
        ):
            started.append(start_engine(models.target, size, role, transfer=transfer, speculative_config=drafts))
        prefill, decode = started
        pair = Pair(prefill, decode, await describe(prefill))
        todo = prompts(count, LONGEST, seed=7)
        before = _read()
        references = [await generate(decode, prompt, MAX_TOKENS) for prompt in todo]
        between = await _settled(before)
        answers = [
            await (pair.in_turn if number % 4 == 3 else pair.together)(prompt, MAX_TOKENS)
            for number, prompt in enumerate(todo)
        ]
        after = await _settled(between)
        clean = await _idle(started)
    finally:
        for engine in reversed(started):
            engine.shutdown()
    moved = _received(trace, tp[1])
    movable = sum(len(prompt) > 1 for prompt in todo) if method.moves else 0
    return Result(
        len(todo),
        tuple(_wrong(todo, references, answers)),
        _counts(before, between, 0),
        _counts(between, after, moved),
        moved,
        movable,
        clean,
    )


def _wrong(todo: Sequence[list[int]], references: Sequence[Answer], answers: Sequence[Answer]) -> list[str]:
    found = [
        (prompt, difference(reference, answer))
        for prompt, reference, answer in zip(todo, references, answers, strict=True)
    ]
    return [f"{len(prompt)} tokens: {problem}" for prompt, problem in found if problem]


def _read() -> Counter[str]:
    """vLLM's counters of speculation, summed over the engines of this process."""
    counts = Counter[str]()
    for metric in REGISTRY.collect():
        for sample in metric.samples:
            if sample.name.startswith(_COUNTER) and sample.name.endswith("_total") and "per_pos" not in sample.name:
                counts[sample.name.removeprefix(_COUNTER).removesuffix("_total")] += int(sample.value)
    return counts


async def _settled(before: Counter[str], within_s: float = 5.0) -> Counter[str]:
    """Counters once they have changed and stand still: the last step's come after its tokens."""
    deadline = asyncio.get_running_loop().time() + within_s
    last = _read()
    while True:
        await asyncio.sleep(0.5)
        now = _read()
        if (now == last and now != before) or asyncio.get_running_loop().time() > deadline:
            return now
        last = now


def _counts(before: Counter[str], after: Counter[str], placeholders: int) -> Counts:
    rounds, drafted, accepted = (after[name] - before[name] for name in ("drafts", "draft_tokens", "accepted_tokens"))
    return Counts(rounds, drafted, accepted, placeholders)


def _received(trace: Path, ranks: int) -> int:
    """Requests whose KV has arrived whole on every decode rank."""
    events = read_trace(trace)
    whole = Counter(e["request"] for e in events if e["event"] == "received" and e["failure"] is None)
    return sum(count == ranks for count in whole.values())


async def _idle(engines: Sequence[Any], within_s: float = 15.0) -> bool:
    deadline = asyncio.get_running_loop().time() + within_s
    while not all([await engine.reset_prefix_cache() for engine in engines]):
        if asyncio.get_running_loop().time() > deadline:
            return False
        await asyncio.sleep(0.1)
    return True


def main() -> None:
    fork_server.prepare()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--pairs", default="1:1,1:2", help="prefill:decode tensor-parallel sizes")
    parser.add_argument("--prompts", type=int, default=100)
    arguments = parser.parse_args()
    pairs = [(int(p), int(d)) for p, _, d in (pair.partition(":") for pair in arguments.pairs.split(","))]
    failed = 0
    for name in arguments.methods.split(","):
        with tempfile.TemporaryDirectory() as folder:
            models = METHODS[name].build(Path(folder) / name)
            for tp in pairs:
                trace = Path(folder) / f"{tp[0]}-{tp[1]}.jsonl"
                result = asyncio.run(run(METHODS[name], models, tp, arguments.prompts, trace))
                failed += not result.good
                print(_line(name, tp, result), flush=True)
                for line in result.wrong:
                    print("   ", line, flush=True)
    sys.exit(1 if failed else 0)


def _line(name: str, tp: tuple[int, int], result: Result) -> str:
    alone, pair = result.alone, result.pair
    return (
        f"{name}, TP {tp[0]} -> {tp[1]}: {result.checked - len(result.wrong)} of {result.checked} equal, "
        f"{result.moved} of {result.movable} prompts' KV moved, accepted {pair.accepted} (alone {alone.accepted}) "
        f"in {pair.rounds} rounds, {pair.placeholders} of placeholders (alone {alone.rounds}), "
        f"acceptance length {pair.acceptance_length:.4f} (alone {alone.acceptance_length:.4f}), "
        f"block pools {'at baseline' if result.clean else 'NOT at baseline'}: {'good' if result.good else 'BAD'}"
    )


if __name__ == "__main__":
    main()
