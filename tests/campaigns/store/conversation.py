"""Continue conversations on new engines after ``kill -9``, with KV from the store.

    python -m tests.campaigns.store.conversation --only llama

A prefill and a decode engine share a store's path. Each turn sends the whole conversation so far
and new text, through both engines at once. After some turns ``kill -9`` ends both, and engines of
another TP size and block size continue. All tokens must equal those of one engine without a
connector; after a near-tie they may differ (``testing.identity``). Prefill may compute at most one
chunk beyond the new text of each turn.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from testing import models
from testing.identity import difference
from tests.campaigns.store.engines import Engines, Reply, Setup, as_answer
from tests.campaigns.store.restart import largest_difference

CHUNK = 128
NEW_TOKENS = 150
ANSWER_TOKENS = 200
MOST_DIFFERENCE = 2e-3
"""Tolerance of a logprob: ranks add in another order."""


@dataclass(frozen=True)
class Shape:
    """TP size and block size of both engines."""

    tp: int
    block_size: int

    def pair(self, model: str, path: Path) -> Setup:
        return Setup(model, "pair", (self.tp, self.tp), self.block_size, CHUNK, str(path))


@dataclass
class Conversation:
    """Turns of one conversation. ``prompts[k]`` is the prompt of turn k."""

    prompts: list[list[int]] = field(default_factory=list)
    turns: list[Reply] = field(default_factory=list)

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


def converse(model: str, folder: Path, shapes: list[Shape], turns: int, count: int) -> list[Conversation]:
    """Hold ``count`` conversations. Engines of the next shape continue after each kill."""
    dice = random.Random(13)
    conversations = [Conversation() for _ in range(count)]
    for number, shape in enumerate(shapes):
        with Engines(shape.pair(model, folder / "store"), folder / f"engines-{number}.log") as engines:
            for turn in range(turns * number // len(shapes), turns * (number + 1) // len(shapes)):
                for each in conversations:
                    each.turns.append(engines.ask(each.next_prompt(dice), ANSWER_TOKENS))
                    assert len(each.turns) == turn + 1
                # The fault campaign covers a kill during a write.
                time.sleep(1.0)
    return conversations


@dataclass
class Verdict:
    """Comparison of all turns with one engine without a connector.

    ``findings``   wrong answers, and turns in which prefill computed too much
    ``near_ties``  number of answers whose tokens differ after a near-tie
    ``largest``    largest difference of a logprob, up to the first token that differs
    """

    findings: list[str] = field(default_factory=list)
    near_ties: int = 0
    largest: float = 0.0


def judge(model: str, folder: Path, conversations: list[Conversation]) -> Verdict:
    """Send all prompts to one engine without a connector, and compare the answers."""
    verdict = Verdict()
    with Engines(Setup(model, "none", (1,), 32, CHUNK), folder / "alone.log") as engine:
        for number, each in enumerate(conversations):
            for turn, (prompt, reply) in enumerate(zip(each.prompts, each.turns, strict=True)):
                right, got = as_answer(engine.ask(prompt, ANSWER_TOKENS)), as_answer(reply)
                where = f"conversation {number}, turn {turn}"
                problem = difference(right, got)
                worst = largest_difference(right, got)
                verdict.largest = max(verdict.largest, worst)
                if problem is not None:
                    verdict.findings.append(f"{where}: {problem}")
                elif worst > MOST_DIFFERENCE:
                    verdict.findings.append(f"{where}: a logprob differs by {worst:.4f}")
                verdict.near_ties += problem is None and right.tokens != got.tokens
                if reply["prefill_cached"] < each.reusable(turn):
                    verdict.findings.append(
                        f"{where}: prefill loaded {reply['prefill_cached']} of {each.reusable(turn)} tokens that "
                        "were computed before"
                    )
    return verdict


def check(name: str, make: Callable[[Path], str], turns: int, count: int) -> bool:
    """Hold conversations with one model; return whether all were right."""
    shapes = [Shape(1, 32), Shape(2, 64), Shape(1, 128)]
    with tempfile.TemporaryDirectory() as name_of_folder:
        folder = Path(name_of_folder)
        model = make(folder / "model")
        conversations = converse(model, folder, shapes, turns, count)
        verdict = judge(model, folder, conversations)
        loaded = sum(turn["prefill_cached"] for each in conversations for turn in each.turns)
        sent = sum(len(prompt) for each in conversations for prompt in each.prompts)
        answered = sum(len(turn["tokens"]) for each in conversations for turn in each.turns)
        reusable = sum(each.reusable(turn) for each in conversations for turn in range(turns))
    print(
        f"{name}: {count} conversations of {turns} turns over {len(shapes)} starts: prefill loaded {loaded} of "
        f"{reusable} reusable tokens; {sent} prompt tokens, {answered} answer tokens; largest difference of a logprob "
        f"{verdict.largest:.1e}, {verdict.near_ties} answers differ after a near-tie; {len(verdict.findings)} "
        "findings",
        flush=True,
    )
    for line in verdict.findings[:8]:
        print(f"  {line}", flush=True)
    return not verdict.findings


def main() -> int:
    """Return 0 when all conversations are right."""
    makers: dict[str, Callable[[Path], str]] = {
        "llama": models.llama,
        "gemma3": models.gemma3,
        "falcon_h1": models.falcon_h1,
    }
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=list(makers))
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--count", type=int, default=2)
    options = parser.parse_args()
    results = [check(name, makers[name], options.turns, options.count) for name in options.only]
    return 0 if all(results) else 1


if __name__ == "__main__":
    raise SystemExit(main())
