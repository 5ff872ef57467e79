"""Kill pairs of engines during writes; let others with other TP and block sizes load their KV.

    python -m tests.campaigns.store.restart [--only gemma3 llama4] [--prompts 100] [--restarts 10]
        [--budget-mib 16]

All engines of a case share a store's path. Clients send prompts at once; then ``kill -9`` ends all
engines while they write an object. Engines of the other shape answer the same prompts, and longer
ones that continue the answers. Checks of each life:

loads   nearly all tokens in whole chunks that an earlier life has computed come from the store, of
        prompts and of answers; with a budget that evicts objects, some
wrong   tokens and logprobs match those of one engine without a connector, by the rules of
        ``identity``. Some cases have one engine with TandemStoreConnector instead of a pair
budget  all files fit into the budget
parts   files that the last life was writing are removed soon
damage  after the kill, header and digest of each object are right

In bfloat16, rounding of another TP size changes answers, so two engines without a connector are
compared, one of each TP size of decode. The store's answers may differ as much as theirs. At an
equal TP size rounding is equal, too: ``qwen3_next_equal_tp`` has the tolerance of float32.

A control shows whether the comparison would notice the KV of another prompt: some prompts are sent
to the engine without a connector with other tokens in all whole chunks, and the answers compared as
if they were for the prompts themselves.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import random
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from actors.upstream.cpu_build.vllm_cpu_kernels import cpu_features
from connectors.errors import CorruptObjectError
from connectors.store.tiers.objects import HEADER_BYTES, PayloadDigest, check_header
from testing.engines import Answer
from testing.identity import LOGPROB_TOLERANCE, MAX_TOKENS, difference
from testing.models import VOCABULARY, deepseek_v2, qwen3_next
from tests.campaigns.shapes.families import FAMILIES, Family
from tests.campaigns.store.engines import Connector, Engines, EnginesEndedError, Reply, Setup, as_answer
from tests.campaigns.store.world import bytes_on_disk

LEAST_LOADED = 0.95
CONTROLS, CLIENTS, NEW_TOKENS = 20, 4, 40
BUDGET_MIB = 2048
WRITE_S = 60.0
"""Time in seconds within which engines under load begin a write, and remove parts of others."""


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


Asked = tuple[int, ...]


def prompts(count: int, chunk_tokens: int) -> list[Asked]:
    """Return random prompts of one to six chunks and a partial one, some with common prefixes.

    Answers of every other prompt complete a chunk.
    """
    dice = random.Random(11)
    found: list[Asked] = []
    for number in range(count):
        begun = found[number // 2][: 2 * chunk_tokens] if number % 3 == 2 else ()
        length = dice.randrange(chunk_tokens + 20, 6 * chunk_tokens)
        if number % 2:
            length = length // chunk_tokens * chunk_tokens + chunk_tokens - MAX_TOKENS // 2
        found.append((*begun, *(dice.randrange(4, 500) for _ in range(max(20, length - len(begun))))))
    return found


def with_other_chunks(prompt: Asked, chunk_tokens: int) -> Asked:
    """Return a prompt with other tokens in all whole chunks, and the same partial chunk."""
    dice = random.Random(12)
    tokens = (len(prompt) - 1) // chunk_tokens * chunk_tokens
    return (*(dice.randrange(4, VOCABULARY) for _ in range(tokens)), *prompt[tokens:])


def continued(prompt: Asked, reply: Reply) -> Asked:
    dice = random.Random(len(prompt))
    return (*prompt, *reply["tokens"], *(dice.randrange(4, 500) for _ in range(NEW_TOKENS)))


def needed_tolerance(wanted: Answer, got: Answer) -> float:
    """Return the least tolerance with which ``difference`` finds none."""
    needed = abs(wanted.logprobs[0][0][1] - got.logprobs[0][0][1])
    for position, (one, other) in enumerate(zip(wanted.tokens, got.tokens, strict=True)):
        if one != other:
            (_, best), (_, second) = wanted.logprobs[position][:2]
            return max(needed, math.nextafter((best - second) / 2, math.inf))
    return needed


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} if folder.exists() else set()


def damaged(path: Path) -> list[str]:
    """Return a description of each object that a reader would reject."""
    found = []
    for file in (path / "objects").glob("*/*"):
        data = file.read_bytes()
        try:
            digest = check_header(data[:HEADER_BYTES], len(data), (file.parent.name, file.name))
            if digest != PayloadDigest(memoryview(data)[HEADER_BYTES:]).digest():
                raise CorruptObjectError("the payload has changed")
        except CorruptObjectError as error:
            found.append(f"{file.name}: {error}")
    return found


def ask_all(engines: Engines, asked: Iterable[Asked], clients: int = CLIENTS) -> dict[Asked, Reply]:
    with ThreadPoolExecutor(clients) as pool:
        return dict(zip(asked, pool.map(lambda prompt: engines.ask(prompt, MAX_TOKENS), asked), strict=True))


def alone(case: Case, shape: Shape, model: str, asked: Sequence[Asked], log: Path) -> list[Answer]:
    """Return the answers of one engine without a connector."""
    with Engines(case.alone(model, shape), log) as engine:
        replies = ask_all(engine, asked, 1)
    return [as_answer(replies[prompt]) for prompt in asked]


def kill_during_a_write(engines: Engines, path: Path, left: set[str]) -> list[str]:
    """Send other prompts, and kill the engines while they write; return problems.

    ``left``  files that earlier engines were writing when they were killed
    """
    dice, killed, problems = random.Random(5), threading.Event(), []

    def send() -> None:
        with contextlib.suppress(EnginesEndedError):
            while not killed.is_set():
                engines.ask([dice.randrange(4, VOCABULARY) for _ in range(600)], 1)

    latest = time.monotonic() + WRITE_S
    with ThreadPoolExecutor(CLIENTS) as pool:
        try:
            for _ in range(CLIENTS):
                pool.submit(send)
            # Let the writes of the prompts end.
            time.sleep(2.0)
            while left & names(path / "parts") or not names(path / "parts"):
                if time.monotonic() > latest:
                    problems.append(f"no write began, or parts of dead writers remain, after {WRITE_S:.0f} s")
                    break
                time.sleep(0.0002)
        finally:
            killed.set()
            engines.kill()
    return problems + damaged(path)


def check(name: str, case: Case, count: int, restarts: int, budget_mib: int) -> bool:
    """Run one case; return whether it is right."""
    chunk, evicts = case.chunk_tokens, budget_mib < BUDGET_MIB
    asked = prompts(count, chunk)
    problems: list[str] = []
    lives: list[dict[Asked, Reply]] = []
    loaded = loadable = kills = 0
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        model, store, left = case.family.build(root / "model"), root / "store", set[str]()
        for life in range(restarts + 1):
            shape = (case.first, case.second)[life % 2]
            setup = replace(case.setup(model, shape, store), disk_gib=budget_mib / 1024)
            # Tokens of each prompt that earlier lives have stored: all but an answer's last token.
            known = {prompt: len(prompt) - 1 for prompt in asked} if lives else {}
            if lives:
                known |= {continued(one, lives[-1][one]): len(one) + MAX_TOKENS - 1 for one in asked}
            with Engines(setup, root / f"{life}.log") as engines:
                replies = ask_all(engines, known or asked)
                problems += [f"life {life}: {problem}" for problem in kill_during_a_write(engines, store, left)]
                print(f"  life {life}: TP {shape.tp_sizes}, blocks of {engines.block_sizes}", flush=True)
            lives.append(replies)
            left = names(store / "parts")
            kills += bool(left)
            if (size := bytes_on_disk(store)) > budget_mib << 20:
                problems.append(f"life {life}: {size} bytes on disk")
            could = sum(tokens // chunk * chunk for tokens in known.values())
            did = sum(replies[prompt]["prefill_cached"] for prompt in known)
            loaded, loadable = loaded + did, loadable + could
            if did < (1 if evicts and could else LEAST_LOADED * could):
                problems.append(f"life {life}: prefill loaded {did} of {could} tokens")
        every = list(dict.fromkeys(prompt for replies in lives for prompt in replies))
        controls = [with_other_chunks(prompt, chunk) for prompt in asked[:CONTROLS]]
        answers = alone(case, case.second, model, [*every, *controls], root / "alone.log")
        right, tolerance = dict(zip(every, answers, strict=False)), case.family.tolerance
        if tolerance > LOGPROB_TOLERANCE:
            stock = alone(case, case.first, model, every, root / "other.log")
            tolerance = max(tolerance, *map(needed_tolerance, answers, stock))
    worst = 0.0
    for life, replies in enumerate(lives):
        for prompt, reply in replies.items():
            worst = max(worst, needed_tolerance(right[prompt], as_answer(reply)))
            if (problem := difference(right[prompt], as_answer(reply), tolerance)) is not None:
                problems.append(f"life {life}, prompt of {len(prompt)} tokens: {problem}")
    noticed = sum(
        difference(right[prompt], control, tolerance) is not None
        for prompt, control in zip(asked, answers[len(every) :], strict=False)
    )
    print(
        f"{name}: {len(lives)} lives, {kills} killed during a write, {sum(map(len, lives))} answers, "
        f"{loaded:,} of {loadable:,} known tokens in whole chunks loaded, largest difference of a first logprob or "
        f"near-tie {worst:.1e} (tolerance {tolerance:.1e}); control: {noticed} of {len(controls)} noticed; "
        f"{len(problems)} problems",
        flush=True,
    )
    for line in problems[:8]:
        print(f"  {line}", flush=True)
    return not problems


def main() -> int:
    """Return 0 if all cases are right."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES), metavar="CASE")
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--restarts", type=int, default=1)
    parser.add_argument("--budget-mib", type=int, default=BUDGET_MIB)
    options = parser.parse_args()
    right = True
    for name in options.only:
        if CASES[name].needs_amx and not cpu_features().amx:
            print(f"{name}: not run, this CPU has no AMX", flush=True)
            continue
        try:
            right &= check(name, CASES[name], options.prompts, options.restarts, options.budget_mib)
        except RuntimeError as error:
            print(f"{name}: {error}", flush=True)
            right = False
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
