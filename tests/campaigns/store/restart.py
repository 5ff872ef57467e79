"""Kill pairs of engines during writes; let others with other TP and block sizes load their KV.

All engines of a case share a store's path. ``kill -9`` ends all engines of a life while they write
an object. Engines of the other shape answer the same prompts, and longer ones that continue the
answers. Checks of each life: nearly all tokens in whole chunks that an earlier life has computed,
of prompts and of answers, come from the store; answers are those of one engine without a connector;
files that the last life was writing are removed soon; the digest of each object is right.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from actors.upstream.cpu_build.vllm_cpu_kernels import cpu_features
from connectors.store.keys.names import ObjectName
from connectors.store.tiers.files import DIGEST_BYTES, digest_of
from testing import fork_server
from testing.engines import Answer, Pair, describe, generate, start_engine
from testing.identity import MAX_TOKENS, difference
from testing.models import VOCABULARY, deepseek_v2, qwen3_next
from tests.campaigns.runner import Report
from tests.campaigns.shapes.families import FAMILIES, Family

LEAST_LOADED = 0.95
CLIENTS, NEW_TOKENS = 4, 40
WRITE_S = 60.0
"""Time in seconds within which engines under load begin a write, and remove parts of others."""
ANSWERS_S = 1200.0
"""Time in seconds within which engines start, or answer a list of prompts."""

Prompt = tuple[int, ...]


class Shape(NamedTuple):
    """TP sizes of prefill and decode, or of one engine, and the block size."""

    tp_sizes: tuple[int, ...]
    block_size: int


@dataclass(frozen=True)
class Case:
    """A family of models, and the engines before and after the kill.

    ``chunk_tokens``  chunk size of the store, and the largest number of tokens of a step, because
                      states exist only where a step ends
    ``needs_amx``     whether vLLM has a kernel for the case only on CPUs with AMX
    """

    family: Family
    first: Shape
    second: Shape
    chunk_tokens: int = 128
    needs_amx: bool = False


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
    "falcon_h1_one_engine": Case(FAMILIES["falcon_h1"], Shape((1,), 64), Shape((2,), 128)),
    # Rounding depends on the TP size, so an equal one has float32's tolerance.
    "qwen3_next_equal_tp": Case(Family(qwen3_next, engine=_BFLOAT16), Shape((1,), 128), Shape((1,), 256)),
}


# ---- engines in a process that can be killed -----------------------------------------------------


@dataclass(frozen=True)
class Setup:
    """Engines of one process: a pair, or one engine; without a ``path`` none has a connector."""

    model: str
    shape: Shape
    chunk_tokens: int
    path: str = ""
    engine: dict[str, Any] = field(default_factory=dict)


async def _serve(setup: Setup, pipe: Connection) -> None:
    """Answer lists of prompts, CLIENTS at a time; an empty list stands for load without end."""
    store: dict[str, Any] = {
        "path": setup.path,
        "disk_gib": 2.0,
        "chunk_tokens": setup.chunk_tokens,
        "staging_mib": 64,
        "lookup_s": 2.0,
        "load_s": 10.0,
        # The models are so small that to compute a chunk may be faster than to read it.
        "always_load": True,
    }
    arguments: dict[str, Any] = {
        "block_size": setup.shape.block_size,
        "max_num_batched_tokens": setup.chunk_tokens,
        "max_num_seqs": 4,
        # Room for 16,384 tokens, instead of 1 GiB a rank.
        "num_gpu_blocks_override": 16_384 // setup.shape.block_size,
        **setup.engine,
    }
    roles: Sequence[str | None] = ("kv_producer", "kv_consumer")
    if len(setup.shape.tp_sizes) == 1:
        roles = ("kv_both" if setup.path else None,)
        arguments["connector"] = "TandemStoreConnector"
    engines = [
        start_engine(setup.model, size, role, transfer={"store": store}, **arguments)
        for role, size in zip(roles, setup.shape.tp_sizes, strict=True)
    ]
    pair = Pair(engines[0], engines[1], await describe(engines[0])) if engines[1:] else None
    slots, dice = asyncio.Semaphore(CLIENTS), random.Random(5)

    async def one(prompt: Prompt) -> tuple[Answer, int]:
        """Return the answer, and the cached prompt tokens of prefill or of the one engine."""
        async with slots:
            if pair is None:
                answer = await generate(engines[0], prompt, MAX_TOKENS)
                return answer, answer.cached_tokens or 0
            answer = await pair.together(prompt, MAX_TOKENS)
            return answer, answer.prefill.cached_tokens or 0

    async def load() -> None:
        while True:
            await one(tuple(dice.randrange(4, VOCABULARY) for _ in range(600)))

    pipe.send([engine.vllm_config.cache_config.block_size for engine in engines])
    while prompts := await asyncio.to_thread(pipe.recv):
        pipe.send(await asyncio.gather(*map(one, prompts)))
    await asyncio.gather(*(load() for _ in range(CLIENTS)))


def _main(setup: Setup, pipe: Connection, log: str) -> None:
    os.setsid()  # the engines' processes are in this group
    sink = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for descriptor in (1, 2):
        os.dup2(sink, descriptor)
    fork_server.prepare()
    asyncio.run(_serve(setup, pipe))


class Engines:
    """A process with the engines of a ``Setup``; ``kill -9`` ends all of them after a ``with``."""

    def __init__(self, setup: Setup, log: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self._log, self._killed = log, False
        self._pipe, end = context.Pipe()
        self._process = context.Process(target=_main, args=(setup, end, str(log)))
        self._process.start()
        end.close()
        try:
            self.block_sizes: list[int] = self._received()
        except BaseException:
            self.kill()
            raise

    def __enter__(self) -> Engines:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def ask(self, prompts: Sequence[Prompt]) -> dict[Prompt, tuple[Answer, int]]:
        self._pipe.send(prompts)
        return dict(zip(prompts, self._received(), strict=True))

    def load(self) -> None:
        """Send other prompts until the end."""
        self._pipe.send([])

    def kill(self) -> None:
        if not self._killed:
            self._killed = True
            assert self._process.pid is not None
            with contextlib.suppress(ProcessLookupError):  # the process has no group of its own yet
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.kill()
            self._process.join()

    def _received(self) -> Any:
        try:
            if not self._pipe.poll(ANSWERS_S):
                raise TimeoutError(f"the engines have not started or answered after {ANSWERS_S:.0f} s")
            return self._pipe.recv()
        except EOFError:
            causes = [line for line in self._log.read_text().splitlines() if "Error" in line]
            raise RuntimeError("the engines ended: " + "\n".join(causes[:8])) from None


# ---- lives ---------------------------------------------------------------------------------------


def prompts(count: int, chunk_tokens: int) -> list[Prompt]:
    """Return random prompts of one to six chunks and a partial one, some with common prefixes.

    Answers of every other prompt complete a chunk.
    """
    dice = random.Random(11)
    found: list[Prompt] = []
    for number in range(count):
        begun = found[number // 2][: 2 * chunk_tokens] if number % 3 == 2 else ()
        length = dice.randrange(chunk_tokens + 20, 6 * chunk_tokens)
        if number % 2:
            length = length // chunk_tokens * chunk_tokens + chunk_tokens - MAX_TOKENS // 2
        found.append((*begun, *(dice.randrange(4, 500) for _ in range(max(20, length - len(begun))))))
    return found


def continued(prompt: Prompt, answer: Answer) -> Prompt:
    dice = random.Random(len(prompt))
    return (*prompt, *answer.tokens, *(dice.randrange(4, 500) for _ in range(NEW_TOKENS)))


def parts(store: Path) -> set[str]:
    return {path.name for path in (store / "parts").iterdir()} if store.exists() else set()


def damaged(store: Path) -> list[str]:
    """Return the objects that a reader would reject."""
    found = []
    for file in (store / "objects").glob("*/*"):
        name = ObjectName(bytes.fromhex(file.parent.name), bytes.fromhex(file.name))
        data, digest = file.read_bytes(), digest_of(name)
        digest.update(data[DIGEST_BYTES:])
        if digest.digest() != data[:DIGEST_BYTES]:
            found.append(f"{file.name} is corrupt")
    return found


def kill_during_a_write(engines: Engines, store: Path, left: set[str]) -> list[str]:
    """Kill the engines under load while they write; ``left`` are parts of earlier engines."""
    time.sleep(2.0)  # let the writes of the prompts end
    engines.load()
    latest, problems = time.monotonic() + WRITE_S, []
    while left & parts(store) or not parts(store):
        if time.monotonic() > latest:
            problems.append(f"no write began, or parts of dead writers remain, after {WRITE_S:.0f} s")
            break
        time.sleep(0.0002)
    engines.kill()
    return problems + damaged(store)


def _case(report: Report, name: str, case: Case, count: int, kills: int) -> None:
    chunk, folder = case.chunk_tokens, report.folder / name
    model, store = case.family.build(folder / "model"), folder / "store"
    left, last, during = set[str](), dict[Prompt, tuple[Answer, int]](), 0
    answers: list[tuple[str, Prompt, Answer]] = []
    for number in range(kills + 1):
        life = f"{name}, life {number}"
        shape = (case.first, case.second)[number % 2]
        asked = prompts(count, chunk)
        # Tokens of each prompt that earlier lives have stored: all but an answer's last token.
        known = {prompt: len(prompt) - 1 for prompt in asked} if last else {}
        if last:
            known |= {continued(one, last[one][0]): len(one) + MAX_TOKENS - 1 for one in asked}
        with Engines(Setup(model, shape, chunk, str(store), case.family.engine), folder / f"{number}.log") as engines:
            last = engines.ask([*known] or asked)
            for problem in kill_during_a_write(engines, store, left):
                report.problem(f"{life}: {problem}")
        left = parts(store)
        during += bool(left)
        could = sum(tokens // chunk * chunk for tokens in known.values())
        did = sum(last[prompt][1] for prompt in known)
        report.row(
            life=life, tp=shape.tp_sizes, blocks=engines.block_sizes, answers=len(last),
            loaded=did, of=could, killed_during_a_write=bool(left),
        )  # fmt: skip
        report.check(did >= LEAST_LOADED * could, f"{life}: prefill loaded {did} of {could} tokens")
        answers += [(life, prompt, answer) for prompt, (answer, _) in last.items()]
    report.check(during, f"{name}: no engine was killed during a write")
    alone = Setup(model, Shape(case.second.tp_sizes[-1:], case.second.block_size), chunk, engine=case.family.engine)
    with Engines(alone, folder / "alone.log") as engine:
        right = engine.ask(list(dict.fromkeys(prompt for _, prompt, _ in answers)))
    for life, prompt, answer in answers:
        if differs := difference(right[prompt][0], answer, case.family.tolerance):
            report.problem(f"{life}, prompt of {len(prompt)} tokens: {differs}")


def store_restart(report: Report, *, only: str = "", count: int = 25, kills: int = 1) -> None:
    """``count`` prompts, ``kills`` of the engines; ``only``: names of cases."""
    for name in only.split() or CASES:
        if CASES[name].needs_amx and not cpu_features().amx:
            report.row(life=name, skipped="this CPU has no AMX")
            continue
        with report.case(name):
            _case(report, name, CASES[name], count, kills)
