"""A prefill and a decode engine store KV and are killed; others load it.

    python -m tests.campaigns.store.restart [--only gemma3 llama4] [--prompts 100]

For each case: a pair of engines that share a store's path answers prompts, and ``kill -9`` ends
both. Another pair, with other TP sizes and another block size, answers the same prompts. Nearly all
prompt tokens in whole chunks must come from the store instead of being computed. Tokens and
logprobs of both pairs must match those of one engine without a connector, by the rules of ``make
identity``. Two cases have one engine with TandemStoreConnector instead of a pair.

A control shows whether the comparison can fail: some prompts are sent to the engine without a
connector with another first chunk, and the answers compared as if they were for the prompt itself.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from actors.upstream.vllm_cpu_kernels import cpu_features
from testing.engines import Answer
from testing.identity import MAX_TOKENS, difference
from testing.models import VOCABULARY, deepseek_v2
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

    ``chunk_tokens``  of the store
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

    def alone(self, model: str) -> Setup:
        """Return the engine for the references: stock vLLM with the second decode's TP size."""
        size = self.second.tp_sizes[-1:]
        return Setup(model, "none", size, self.second.block_size, self.chunk_tokens, engine=self.family.engine)


_SMALL, _LARGE = Shape((1, 2), 32), Shape((2, 1), 64)
# With states, vLLM enlarges blocks to a page of states, here to 64 tokens or fewer.
_STATES_SMALL, _STATES_LARGE = Shape((1, 2), 64), Shape((2, 1), 128)
_BFLOAT16_MLA = Family(deepseek_v2, engine={"dtype": "bfloat16"}, tolerance=0.3)

CASES = {
    "llama": Case(FAMILIES["llama"], _SMALL, _LARGE),
    "gemma3": Case(FAMILIES["gemma3"], _SMALL, _LARGE),
    "gpt_oss": Case(FAMILIES["gpt_oss"], _SMALL, _LARGE),
    # At the end of an attention chunk (128 tokens) nothing is needed of it, so chunks of the store
    # end elsewhere, too.
    "llama4": Case(FAMILIES["llama4"], _SMALL, _LARGE, chunk_tokens=192),
    "falcon_h1": Case(FAMILIES["falcon_h1"], _STATES_SMALL, _STATES_LARGE),
    "qwen3_next": Case(FAMILIES["qwen3_next"], _STATES_SMALL, _STATES_LARGE),
    # vLLM's reference kernel has blocks of 16 tokens only; its kernel for AMX has other sizes.
    "deepseek_v2": Case(FAMILIES["deepseek_v2"], Shape((1, 2), 16), Shape((2, 1), 16)),
    "deepseek_v2_amx": Case(_BFLOAT16_MLA, _SMALL, _LARGE, needs_amx=True),
    "llama_one_engine": Case(FAMILIES["llama"], Shape((2,), 32), Shape((1,), 64)),
    "falcon_h1_one_engine": Case(FAMILIES["falcon_h1"], Shape((1,), 64), Shape((2,), 128)),
}


def prompts(count: int, chunk_tokens: int) -> list[list[int]]:
    """Return random prompts of one to six chunks and a rest, some with common prefixes."""
    dice = random.Random(11)
    found: list[list[int]] = []
    for number in range(count):
        begun = found[number // 2][: 2 * chunk_tokens] if number % 3 == 2 else []
        length = dice.randrange(chunk_tokens + 20, 6 * chunk_tokens)
        found.append(begun + [dice.randrange(4, 500) for _ in range(max(20, length - len(begun)))])
    return found


def with_other_start(prompt: Sequence[int], tokens: int) -> list[int]:
    """Return a prompt with other first ``tokens`` tokens, and the same rest."""
    dice = random.Random(12)
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
        controls = [with_other_start(prompt, chunk) for prompt in asked[:CONTROLS]]
        alone, _ = ask_all(case.alone(model), [*asked, *controls], root / "alone.log")
        objects = list((store / "objects").glob("*/*"))
        size = sum(each.stat().st_size for each in objects)
    wanted = [as_answer(reply) for reply in alone]
    wrong, worst = [], 0.0
    for which, replies in (("first", first), ("second", second)):
        for number, reply in enumerate(replies):
            problem = difference(wanted[number], as_answer(reply), case.family.tolerance)
            worst = max(worst, largest_difference(wanted[number], as_answer(reply)))
            if problem is not None:
                wrong.append(f"prompt {number} of {len(asked[number])} tokens, {which} engines: {problem}")
    noticed = sum(
        difference(wanted[number], control, case.family.tolerance) is not None
        for number, control in enumerate(wanted[count:])
    )
    loadable = sum((len(prompt) - 1) // chunk * chunk for prompt in asked)
    loaded = sum(reply["prefill_cached"] for reply in second)
    print(
        f"{name}: {_described(case.first, blocks)}, killed; {_described(case.second, other_blocks)}: {count} prompts, "
        f"{loaded:,} of {loadable:,} tokens in whole chunks loaded (before the kill "
        f"{sum(reply['prefill_cached'] for reply in first):,}; {sum(map(len, asked)):,} sent), "
        f"{_sources(second)}{len(objects)} objects of {size / 1e6:.0f} MB; {len(wrong)} wrong, largest difference "
        f"of a logprob {worst:.1e} (control: {noticed} of {len(controls)} noticed); "
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
        right &= check(name, CASES[name], options.prompts)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
