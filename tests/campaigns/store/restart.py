"""Let a prefill and a decode engine store KV, kill them, and let other engines load it.

    python -m tests.campaigns.store.restart [--only gemma3 llama4] [--prompts 100]

For each case: a pair of engines that share a store's path answers prompts, and ``kill -9`` ends
both. Another pair, with other TP sizes and another block size, answers the same prompts. Nearly all
prompt tokens in whole chunks must come from the store instead of being computed. Tokens and
logprobs of both pairs must match those of one engine without a connector, by the rules of ``make
identity``. Some cases have one engine with TandemStoreConnector instead of a pair.

In bfloat16, rounding of another TP size changes answers, so two engines without a connector are
compared, one of each TP size of decode. The store's answers may differ as much as theirs. At an
equal TP size rounding is equal, too: ``qwen3_next_equal_tp`` has the tolerance of float32.

A control shows whether the comparison would notice the KV of another prompt: some prompts are sent
to the engine without a connector with other tokens in all whole chunks, and the answers compared as
if they were for the prompts themselves.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from actors.upstream.cpu_build.vllm_cpu_kernels import cpu_features
from testing.engines import Answer
from testing.identity import LOGPROB_TOLERANCE, MAX_TOKENS, difference
from testing.models import VOCABULARY, deepseek_v2, qwen3_next
from tests.campaigns.shapes.families import FAMILIES, Family
from tests.campaigns.store.engines import Connector, Engines, Reply, Setup, as_answer

LEAST_LOADED = 0.95
CONTROLS = 20


@dataclass(frozen=True)
class Shape:
    """TP sizes of prefill and decode, or of one engine, and the block size."""

    tp_sizes: tuple[int, ...]
    block_size: int


@dataclass(frozen=True)
class Case:
    """A family of models, and the engines before and after the kill.

    ``chunk_tokens``  chunk size of the store
    ``needs_amx``     whether vLLM has a kernel for the case only on CPUs with AMX
    """

    family: Family
    first: Shape
    second: Shape
    chunk_tokens: int = 128
    needs_amx: bool = False

    def setup(self, model: str, shape: Shape, path: Path) -> Setup:
        """Return the engines of one shape with the store in ``path``."""
        connector: Connector = "pair" if len(shape.tp_sizes) == 2 else "store"
        return Setup(
            model, connector, shape.tp_sizes, shape.block_size, self.chunk_tokens, str(path), self.family.engine
        )

    def alone(self, model: str, shape: Shape) -> Setup:
        """Return an engine without a connector, with the TP size of a shape's decode engine."""
        size = shape.tp_sizes[-1:]
        return Setup(model, "none", size, shape.block_size, self.chunk_tokens, engine=self.family.engine)


_SMALL, _LARGE = Shape((1, 2), 32), Shape((2, 1), 64)
_BFLOAT16 = {"dtype": "bfloat16"}

CASES = {
    "llama": Case(FAMILIES["llama"], _SMALL, _LARGE),
    "gemma3": Case(FAMILIES["gemma3"], _SMALL, _LARGE),
    "gpt_oss": Case(FAMILIES["gpt_oss"], _SMALL, _LARGE),
    # Attention needs nothing of its chunk of 128 tokens after the chunk's end, so the store's
    # chunks must also end elsewhere.
    "llama4": Case(FAMILIES["llama4"], _SMALL, _LARGE, chunk_tokens=192),
    # With states, vLLM enlarges blocks to a page of states: to 64 tokens here, 128 in bfloat16.
    "falcon_h1": Case(FAMILIES["falcon_h1"], Shape((1, 2), 64), Shape((2, 1), 128)),
    "qwen3_next": Case(FAMILIES["qwen3_next"], Shape((1, 2), 128), Shape((2, 1), 256)),
    # vLLM's reference kernel has blocks of 16 tokens only; its kernel for AMX has other sizes.
    "deepseek_v2": Case(FAMILIES["deepseek_v2"], Shape((1, 2), 16), Shape((2, 1), 16)),
    "deepseek_v2_amx": Case(
        Family(deepseek_v2, engine=_BFLOAT16, tolerance=0.3), Shape((1, 2), 32), Shape((2, 1), 64), needs_amx=True
    ),
    "llama_one_engine": Case(FAMILIES["llama"], Shape((2,), 32), Shape((1,), 64)),
    "falcon_h1_one_engine": Case(FAMILIES["falcon_h1"], Shape((1,), 64), Shape((2,), 128)),
    "qwen3_next_equal_tp": Case(Family(qwen3_next, engine=_BFLOAT16), Shape((1,), 128), Shape((1,), 256)),
}


def prompts(count: int, chunk_tokens: int) -> list[list[int]]:
    """Return random prompts of one to six chunks and a partial one, some with common prefixes."""
    dice = random.Random(11)
    found: list[list[int]] = []
    for number in range(count):
        begun = found[number // 2][: 2 * chunk_tokens] if number % 3 == 2 else []
        length = dice.randrange(chunk_tokens + 20, 6 * chunk_tokens)
        found.append(begun + [dice.randrange(4, 500) for _ in range(max(20, length - len(begun)))])
    return found


def with_other_chunks(prompt: Sequence[int], chunk_tokens: int) -> list[int]:
    """Return a prompt with other tokens in all whole chunks, and the same partial chunk."""
    dice = random.Random(12)
    tokens = (len(prompt) - 1) // chunk_tokens * chunk_tokens
    return [dice.randrange(4, VOCABULARY) for _ in range(tokens)] + list(prompt[tokens:])


def ask_all(setup: Setup, asked: Sequence[Sequence[int]], log: Path) -> tuple[list[Reply], list[int]]:
    """Start engines, send the prompts one after the other, and kill the engines.

    Return the replies and the block sizes of prefill and decode.
    """
    with Engines(setup, log) as engines:
        replies = [engines.ask(prompt, MAX_TOKENS) for prompt in asked]
        # Let writes in progress end: the fault campaign covers a kill during a write.
        time.sleep(1.0)
        return replies, engines.block_sizes


def largest_difference(wanted: Answer, got: Answer) -> float:
    """Return the largest difference of the best logprobs, up to the first token that differs."""
    worst = 0.0
    for position, (one, other) in enumerate(zip(wanted.tokens, got.tokens, strict=True)):
        worst = max(worst, abs(wanted.logprobs[position][0][1] - got.logprobs[position][0][1]))
        if one != other:
            break
    return worst


def needed_tolerance(wanted: Answer, got: Answer) -> float:
    """Return the least tolerance with which ``difference`` finds none."""
    needed = abs(wanted.logprobs[0][0][1] - got.logprobs[0][0][1])
    for position, (one, other) in enumerate(zip(wanted.tokens, got.tokens, strict=True)):
        if one != other:
            (_, best), (_, second) = wanted.logprobs[position][:2]
            return max(needed, math.nextafter((best - second) / 2, math.inf))
    return needed


def closeness(wanted: Sequence[Answer], got: Sequence[Answer]) -> str:
    """Return a description of how close answers are to the first ones of ``wanted``."""
    equal = sum(right.tokens == other.tokens for right, other in zip(wanted, got, strict=False))
    first = statistics.median(
        abs(right.logprobs[0][0][1] - other.logprobs[0][0][1]) for right, other in zip(wanted, got, strict=False)
    )
    return f"{equal} of {len(got)} answers equal, median of the first logprob {first:.1e}"


def check(name: str, case: Case, count: int) -> bool:
    """Run one case; return whether it is right."""
    chunk = case.chunk_tokens
    asked = prompts(count, chunk)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        model = case.family.build(root / "model")
        store = root / "store"
        first, blocks = ask_all(case.setup(model, case.first, store), asked, root / "first.log")
        second, other_blocks = ask_all(case.setup(model, case.second, store), asked, root / "second.log")
        controls = [with_other_chunks(prompt, chunk) for prompt in asked[:CONTROLS]]
        alone, _ = ask_all(case.alone(model, case.second), [*asked, *controls], root / "alone.log")
        wanted = [as_answer(reply) for reply in alone]
        tolerance, rounding = case.family.tolerance, ""
        if tolerance > LOGPROB_TOLERANCE:
            other, _ = ask_all(case.alone(model, case.first), asked, root / "other.log")
            stock = [as_answer(reply) for reply in other]
            needed = [needed_tolerance(*pair) for pair in zip(wanted, stock, strict=False)]
            rounding = (
                f"; without a connector, TP {case.first.tp_sizes[-1]} and {case.second.tp_sizes[-1]}: "
                f"{sum(each > tolerance for each in needed)} beyond {tolerance}, largest {max(needed):.2f}, "
                f"{closeness(wanted, stock)}"
            )
            tolerance = max(tolerance, *needed)
        objects = list((store / "objects").glob("*/*"))
        size = sum(each.stat().st_size for each in objects)
    wrong, worst, least = [], 0.0, 0.0
    for which, replies in (("first", first), ("second", second)):
        for number, (right, got) in enumerate(zip(wanted, map(as_answer, replies), strict=False)):
            problem = difference(right, got, tolerance)
            worst = max(worst, largest_difference(right, got))
            least = max(least, needed_tolerance(right, got))
            if problem is not None:
                wrong.append(f"prompt {number} of {len(asked[number])} tokens, {which} engines: {problem}")
    noticed = sum(
        difference(right, control, tolerance) is not None
        for right, control in zip(wanted, wanted[count:], strict=False)
    )
    loadable = sum((len(prompt) - 1) // chunk * chunk for prompt in asked)
    loaded = sum(reply["prefill_cached"] for reply in second)
    print(
        f"{name}: {_described(case.first, blocks)}, killed; {_described(case.second, other_blocks)}: {count} prompts, "
        f"{loaded:,} of {loadable:,} tokens in whole chunks loaded (before the kill "
        f"{sum(reply['prefill_cached'] for reply in first):,}; {sum(map(len, asked)):,} sent), "
        f"{_sources(second)}{len(objects)} objects of {size / 1e6:.0f} MB; {len(wrong)} wrong, largest difference "
        f"of a logprob {worst:.1e}, of a first token or near-tie {least:.1e}, "
        f"{closeness(wanted, [as_answer(reply) for reply in second])}{rounding}; control: {noticed} of "
        f"{len(controls)} noticed, {closeness(wanted, wanted[count:])}; "
        f"{sum(reply['seconds'] for reply in first):.1f} s, then {sum(reply['seconds'] for reply in second):.1f} s",
        flush=True,
    )
    for line in wrong[:8]:
        print(f"  {line}", flush=True)
    return not wrong and loaded >= LEAST_LOADED * loadable


def _described(shape: Shape, block_sizes: Sequence[int]) -> str:
    sizes = " and ".join(str(size) for size in sorted(set(block_sizes)))
    return f"TP {' -> '.join(map(str, shape.tp_sizes))}, blocks of {sizes}"


def _sources(replies: Sequence[Reply]) -> str:
    """Return where decode got its prompts from; empty without a pair."""
    found = replies[-1]["decode_sources"]
    return f"decode: {', '.join(f'{found[name]:,} from {name}' for name in sorted(found))}; " if any(found) else ""


def main() -> int:
    """Return 0 if all cases are right."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES), metavar="CASE")
    parser.add_argument("--prompts", type=int, default=12)
    options = parser.parse_args()
    right = True
    for name in options.only:
        if CASES[name].needs_amx and not cpu_features().amx:
            print(f"{name}: not run, this CPU has no AMX", flush=True)
            continue
        try:
            right &= check(name, CASES[name], options.prompts)
        except RuntimeError as error:
            print(f"{name}: {error}", flush=True)
            right = False
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
