"""Compare the TTFT of a conversation's eighth turn with a KV store and without one.

There are two arms. Each has a prefill and a decode engine with TandemConnector and vLLM's prefix
cache; one arm also has a store. Both hold the same conversations: each turn sends all text so far
and 150 new tokens, and receives 200 tokens. Turns one to seven of all conversations run
concurrently. The eighth turns are measured one at a time and alternate between the arms (A B B A),
while the other arm's processes are stopped. Each series has its own conversations:

    evicted  the prefix caches of both engines are emptied before each eighth turn, as if other
             conversations had evicted this one, or the engines had been restarted
    kept     the prefix caches keep all conversations. Prefill's cache lacks the last answer, which
             decode has computed

TTFT is the time from sending both legs to decode's first token, without router and HTTP.
"""

from __future__ import annotations

import asyncio
import random
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.engines import Arm, Side, random_prompt, start_arms, start_side
from benchmarks.report import ratios, summary

TURNS, NEW_TOKENS, ANSWER_TOKENS = 8, 150, 200
LAST_ANSWER_TOKENS = 8
CHUNK, BLOCK = 256, 32
CONVERSATION_BLOCKS = 6 * TURNS * (NEW_TOKENS + ANSWER_TOKENS) // BLOCK
"""Blocks that a conversation needs in a prefix cache without eviction: six KV cache groups."""
SETTLES_S = 3.0
"""Time in which the engines store the KV of the first seven turns."""
PAUSE_S = 0.4
RESET_S = 10.0


@dataclass
class Conversation:
    """One conversation in one arm, and measurements of its last turn.

    ``cached``  prompt tokens that prefill did not compute
    """

    tokens: list[int] = field(default_factory=list)
    ttft_s: float = 0.0
    cached: int = 0


@dataclass
class Conversations:
    """An arm and its conversations of one series."""

    arm: Arm
    conversations: list[Conversation] = field(default_factory=list)

    async def take_turn(self, each: Conversation, new: list[int], answer_tokens: int) -> None:
        """Send a turn of one conversation. The arm must be awake."""
        prompt = each.tokens + new
        began = time.monotonic()
        answer = await self.arm.together(prompt, answer_tokens)
        each.tokens = [*prompt, *answer.tokens]
        each.ttft_s, each.cached = answer.token_at[0] - began, answer.prefill.cached_tokens or 0

    async def take_turns(self, news: list[list[list[int]]]) -> None:
        """Start new conversations and take all their turns except the last, concurrently.

        ``news``  new tokens, by turn and conversation
        """
        self.conversations = [Conversation() for _ in news[0]]
        with self.arm.awake():
            for turn in news[:-1]:
                pairs = zip(self.conversations, turn, strict=True)
                await asyncio.gather(*(self.take_turn(each, new, ANSWER_TOKENS) for each, new in pairs))
            await asyncio.sleep(SETTLES_S)

    async def take_last_turn(self, number: int, new: list[int], evicted: bool) -> None:
        with self.arm.awake():
            if evicted:
                await self._empty_caches()
            await self.take_turn(self.conversations[number], new, LAST_ANSWER_TOKENS)
            await asyncio.sleep(PAUSE_S)

    async def _empty_caches(self) -> None:
        """Empty both prefix caches, as soon as the last request's blocks are free."""
        latest = time.monotonic() + RESET_S
        for engine in (self.arm.pair.prefill, self.arm.pair.decode):
            while not await engine.reset_prefix_cache():
                assert time.monotonic() < latest, "a request still holds blocks"
                await asyncio.sleep(0.05)


async def series(sides: dict[str, Conversations], count: int, evicted: bool, dice: random.Random) -> dict[str, Any]:
    """Hold ``count`` conversations in both arms; return a comparison of their last turns."""
    news = [[random_prompt(dice, NEW_TOKENS) for _ in range(count)] for _ in range(TURNS)]
    for side in sides.values():
        await side.take_turns(news)
    for number, new in enumerate(news[-1]):
        for name in sorted(sides, reverse=bool(number % 2)):
            await sides[name].take_last_turn(number, new, evicted)
    store, none = (sides[name].conversations for name in ("store", "none"))
    times = {name: [each.ttft_s for each in side.conversations] for name, side in sides.items()}
    cached = {name: [each.cached for each in side.conversations] for name, side in sides.items()}
    return {
        "equal_conversations": sum(one.tokens == other.tokens for one, other in zip(store, none, strict=True)),
        "prompt_tokens": len(store[0].tokens) - LAST_ANSWER_TOKENS,
        "cached_tokens": cached,
        **{f"{name}_s": summary(values) for name, values in times.items()},
        "ratio": ratios(times["store"], times["none"]),
    }


async def conversation(model: str, folder: Path, count: int) -> dict[str, Any]:
    """Measure ``count`` conversations in each arm, with evicted and with kept prefix caches."""
    dice = random.Random(5)
    settings: dict[str, Any] = {"store": {"path": str(folder / "conversation"), "disk_gib": 4.0, "chunk_tokens": CHUNK}}
    engine: dict[str, Any] = {"block_size": BLOCK, "max_num_batched_tokens": CHUNK, "max_num_seqs": count}
    engine |= {"enable_prefix_caching": True, "num_gpu_blocks_override": count * CONVERSATION_BLOCKS}

    def start(name: str, role: str) -> Side:
        return start_side(model, role, pinned=False, transfer=settings if name == "store" else {}, **engine)

    with ExitStack() as stack:
        arms = await start_arms(stack, ("store", "none"), start)
        sides = {name: Conversations(arm) for name, arm in arms.items()}
        return {label: await series(sides, count, label == "evicted", dice) for label in ("evicted", "kept")}
