"""Conversations over engines that are killed.

    python -m tests.campaigns.store.conversation --only llama

A prefill and a decode engine share a store's path. Each turn sends the whole conversation so far
and new text, through both engines at once. After some turns ``kill -9`` ends both, and engines of
another TP size and block size continue. All tokens must equal those of one engine without a
connector, and prefill may compute at most one chunk beyond the new text of each turn.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict

ROOT = Path(__file__).resolve().parents[3]
CHUNK = 128
NEW_TOKENS = 150
ANSWER_TOKENS = 60
MOST_DIFFERENCE = 2e-3
"""Tolerance of a logprob: ranks add in another order."""


@dataclass(frozen=True)
class Shape:
    """TP size and block size of both engines."""

    tp: int
    block_size: int


class Turn(TypedDict):
    """An answer, the tokens that prefill and decode did not compute, and its time in seconds."""

    tokens: list[int]
    logprobs: list[float]
    prefill_cached: int
    decode_cached: int
    seconds: float


@dataclass
class Conversation:
    """Turns of one conversation. ``prompts[k]`` is the prompt of turn k."""

    prompts: list[list[int]] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)

    def next_prompt(self, dice: random.Random) -> list[int]:
        before = self.prompts[-1] + self.turns[-1]["tokens"] if self.turns else []
        self.prompts.append(before + [dice.randrange(4, 500) for _ in range(NEW_TOKENS)])
        return self.prompts[-1]

    def reusable(self, turn: int) -> int:
        """Return the tokens in whole chunks that an earlier turn has computed: all but an
        answer's last token.
        """
        if not turn:
            return 0
        return (len(self.prompts[turn - 1]) + len(self.turns[turn - 1]["tokens"]) - 1) // CHUNK * CHUNK


# ---- the process with the engines --------------------------------------------------------------


async def serve(options: argparse.Namespace) -> None:
    """Answer prompts, one line of JSON each, from standard input, until killed."""
    from testing.engines import Pair, describe, start_engine

    arguments: dict[str, Any] = {
        "block_size": options.block_size,
        # States exist where a step ends: a step is a chunk.
        "max_num_batched_tokens": CHUNK,
        "max_num_seqs": 4,
    }
    if options.path:
        store = {"path": options.path, "disk_gib": 1.0, "chunk_tokens": CHUNK, "staging_mib": 64, "lookup_s": 2.0}
        arguments["transfer"] = {"store": store}
    roles: list[str | None] = ["kv_producer", "kv_consumer"] if options.path else [None]
    engines = [start_engine(options.model, options.tp, role, **arguments) for role in roles]
    pair = Pair(engines[0], engines[-1], await describe(engines[0]) if options.path else {})
    print("ready", flush=True)
    lines = asyncio.StreamReader(limit=2**20)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    while line := await lines.readline():
        print("answer " + json.dumps(await answer(pair, json.loads(line))), flush=True)


async def answer(pair: Any, prompt: list[int]) -> Turn:
    import uuid

    from testing.engines import generate

    began = time.monotonic()
    prefill_cached = 0
    if pair.prefill is pair.decode:
        found = await generate(pair.decode, prompt, ANSWER_TOKENS)
    else:
        transfer_id = uuid.uuid4().hex
        leg = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer_id}
        first = asyncio.ensure_future(generate(pair.prefill, prompt, 1, leg, logprobs=None))
        found = await generate(pair.decode, prompt, ANSWER_TOKENS, pair.address | {"transfer_id": transfer_id})
        prefill_cached = (await first).cached_tokens or 0
    return {
        "tokens": list(found.tokens),
        "logprobs": [position[0][1] for position in found.logprobs],
        "prefill_cached": prefill_cached,
        "decode_cached": found.cached_tokens or 0,
        "seconds": time.monotonic() - began,
    }


# ---- the process that asks ---------------------------------------------------------------------


class Engines:
    """A process with both engines, or with one without a connector if ``path`` is None."""

    def __init__(self, model: str, shape: Shape, path: Path | None, log: Path) -> None:
        command = [sys.executable, "-m", "tests.campaigns.store.conversation", "--serve", "--model", model]
        command += ["--tp", str(shape.tp), "--block-size", str(shape.block_size), "--path", str(path or "")]
        self._log = log
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )
        self._line("ready")

    def ask(self, prompt: list[int]) -> Turn:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(prompt) + "\n")
        self._process.stdin.flush()
        turn: Turn = json.loads(self._line("answer "))
        return turn

    def kill(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _line(self, kind: str) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(kind):
                return line.removeprefix(kind)
        causes = [line for line in self._log.read_text().splitlines() if "Error" in line]
        raise RuntimeError("the engines ended: " + "\n".join(causes[:8]))


def converse(model: str, folder: Path, shapes: list[Shape], turns: int, count: int) -> list[Conversation]:
    """Hold ``count`` conversations. Engines of the next shape continue after each kill."""
    dice = random.Random(13)
    conversations = [Conversation() for _ in range(count)]
    for number, shape in enumerate(shapes):
        engines = Engines(model, shape, folder / "store", folder / f"engines-{number}.log")
        try:
            for turn in range(turns * number // len(shapes), turns * (number + 1) // len(shapes)):
                for each in conversations:
                    each.turns.append(engines.ask(each.next_prompt(dice)))
                    assert len(each.turns) == turn + 1
                # The fault campaign covers a kill during a write.
                time.sleep(1.0)
        finally:
            engines.kill()
    return conversations


def judge(model: str, folder: Path, conversations: list[Conversation]) -> list[str]:
    """Return differences from one engine without a connector, and turns in which prefill
    computed too much.
    """
    found = []
    engine = Engines(model, Shape(1, 32), None, folder / "alone.log")
    try:
        for number, each in enumerate(conversations):
            for turn, (prompt, got) in enumerate(zip(each.prompts, each.turns, strict=True)):
                right = engine.ask(prompt)
                where = f"conversation {number}, turn {turn}"
                if right["tokens"] != got["tokens"]:
                    found.append(f"{where}: tokens {got['tokens']} instead of {right['tokens']}")
                elif (worst := _difference(right["logprobs"], got["logprobs"])) > MOST_DIFFERENCE:
                    found.append(f"{where}: a logprob differs by {worst:.4f}")
                if got["prefill_cached"] < each.reusable(turn):
                    found.append(
                        f"{where}: prefill loaded {got['prefill_cached']} of {each.reusable(turn)} tokens that were "
                        "computed before"
                    )
    finally:
        engine.kill()
    return found


def _difference(right: list[float], got: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(right, got, strict=True))


def check(name: str, make: Callable[[Path], str], turns: int, count: int) -> bool:
    """Hold conversations with one model; return whether all were right."""
    shapes = [Shape(1, 32), Shape(2, 64), Shape(1, 128)]
    with tempfile.TemporaryDirectory() as name_of_folder:
        folder = Path(name_of_folder)
        model = make(folder / "model")
        conversations = converse(model, folder, shapes, turns, count)
        found = judge(model, folder, conversations)
        loaded = sum(turn["prefill_cached"] for each in conversations for turn in each.turns)
        sent = sum(len(prompt) for each in conversations for prompt in each.prompts)
        reusable = sum(each.reusable(turn) for each in conversations for turn in range(turns))
    print(
        f"{name}: {count} conversations of {turns} turns over {len(shapes)} starts: prefill loaded {loaded} of "
        f"{reusable} reusable tokens, {sent} sent; {len(found)} findings"
    )
    for line in found[:8]:
        print(f"  {line}")
    return not found


def main() -> int:
    """Return 0 when all conversations are right."""
    from testing import models

    makers: dict[str, Callable[[Path], str]] = {
        "llama": models.llama,
        "gemma3": models.gemma3,
        "falcon_h1": models.falcon_h1,
    }
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=list(makers))
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--count", type=int, default=2)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    for name in ("model", "path"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    for name in ("tp", "block-size"):
        parser.add_argument(f"--{name}", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        asyncio.run(serve(options))
        return 0
    results = [check(name, makers[name], options.turns, options.count) for name in options.only]
    return 0 if all(results) else 1


if __name__ == "__main__":
    raise SystemExit(main())
