"""Prefixes cached on either engine are neither moved nor computed again, and answers stay right.

Blocks have 32 tokens and windows 128. Decode resumes at the last token of a prompt of n tokens, so
it needs the KV of n - 1 tokens. The expected block numbers are computed by hand, in the order of
the groups: sliding, sliding, full.
"""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import dataclass

import pytest
from vllm.v1.engine.async_llm import AsyncLLM

from testing.engines import Answer, Pair, generate
from testing.identity import BLOCK_TOKENS, MAX_TOKENS, difference, random_prompt
from tests.e2e.pair.conftest import Engines, all_reset, alone, until

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="package")]

# Two layers per group, four heads in total, K and V of 32 float32 each.
BLOCK_BYTES = BLOCK_TOKENS * 2 * 4 * 2 * 32 * 4


@dataclass(frozen=True)
class Seen:
    """Trace of the transfers since a moment.

    ``asked``     requested blocks of each group, by request and decode rank
    ``written``   bytes written, by group
    ``computed``  end of each chunk of the prompts, on one prefill rank
    """

    asked: list[list[int]]
    written: list[int]
    computed: list[int]
    failures: list[str | None]


def seen(engines: Engines, start: int) -> Seen:
    return Seen(
        asked=[[event["blocks"][group] for group in "012"] for event in engines.events(start, "receive")],
        written=[sum(event["bytes"].get(group, 0) for event in engines.events(start, "write")) for group in "012"],
        computed=[event["tokens"] for event in engines.events(start, "chunk") if event["rank"] == 0],
        failures=[event["failure"] for event in engines.events(start, "received")],
    )


def check_moved(found: Seen, blocks: list[int], pair: Pair, requests: int = 1) -> None:
    """Check that every decode rank requested exactly these blocks and each was written once."""
    ranks = pair.decode.vllm_config.parallel_config.tensor_parallel_size
    assert found.asked == [blocks] * ranks * requests
    assert found.written == [count * BLOCK_BYTES * requests for count in blocks]
    assert found.failures == [None] * ranks * requests


async def forget(engine: AsyncLLM) -> None:
    """Clear an engine's prefix cache once the engine holds no blocks."""
    await until(lambda: all_reset(engine))


# vLLM uses one prefix length that all groups have, in whole blocks. Of windows it keeps the blocks
# that a replay of the prompt needs (prefix_cache_retention_interval=0, its default): the four
# blocks before the prompt's last token, rounded down.
#
# name: direction, tokens of the first turn, tokens generated, tokens of them that the second turn
# repeats, new tokens, whether the first turn's KV was moved to decode (else decode computed it),
# blocks left to move.
TURNS = {
    # 12 blocks (384 tokens) are cached; of 699 needed tokens (22 blocks) the window begins in block
    # 572 // 32 = 17.
    "longer by more than a window": ("one_to_two", 400, 2, 400, 300, True, [5, 5, 10]),
    "the other way round": ("two_to_one", 400, 2, 400, 300, True, [5, 5, 10]),
    # 449 needed tokens are 15 blocks, 12 of them cached: part of the window from block 10 on is
    # cached.
    "longer by less than a window": ("one_to_two", 400, 2, 400, 50, True, [3, 3, 3]),
    # 21 whole blocks (672 tokens) are cached, 699 tokens are 22 blocks.
    "the same prompt again": ("one_to_two", 700, 2, 700, 0, True, [1, 1, 1]),
    # Full attention has 13 cached blocks, with the answer's tokens; windows are kept for the
    # prompt: 12 blocks. 539 tokens are 17 blocks, the window begins in block 412 // 32 = 12.
    "a conversation": ("one_to_two", 400, 40, 440, 100, True, [5, 5, 5]),
    # Of 416 tokens the windows before 384 are kept, blocks 8 to 11; but decode resumes at 415 and
    # needs 9 to 12. So no prefix is usable: 419 tokens are 14 blocks, the window begins in block
    # 292 // 32 = 9.
    "a first turn of whole blocks": ("one_to_two", 416, 2, 416, 4, True, [5, 5, 14]),
    # The prompts diverge at 300: full attention has 9 cached blocks, but windows are kept for 384
    # tokens, not for 288. So no prefix is usable: 599 tokens are 19 blocks, the window begins in
    # block 472 // 32 = 14.
    "a branch whose window is not held": ("one_to_two", 400, 2, 300, 300, True, [5, 5, 19]),
    # Decode has computed the first turn and another branch, so it keeps the windows before the
    # fork.
    "a branch whose window is held": ("one_to_two", 400, 2, 300, 300, False, [5, 5, 10]),
}


@pytest.mark.parametrize("name", TURNS)
async def test_only_what_decode_lacks_is_moved(engines: Engines, name: str) -> None:
    """With a cached prefix, decode requests exactly the needed blocks after it in every group."""
    direction, first_tokens, generated, repeated, new, moved, blocks = TURNS[name]
    pair: Pair = getattr(engines, direction)
    first = random_prompt(first_tokens, seed=70)

    async def first_turn() -> Answer:
        if moved:
            answer = await pair.together(first, generated)
            await forget(pair.prefill)
            return answer
        await generate(pair.decode, first[:repeated] + random_prompt(100, seed=78), 1)
        return await generate(pair.decode, first, generated)

    turn = await first_turn()
    second = [*first, *turn.tokens][:repeated] + random_prompt(new, seed=71)
    assert await engines.idle()
    reference = await alone(pair, second)
    await first_turn()
    start = len(engines.events())
    assert difference(reference, await pair.together(second, MAX_TOKENS)) is None
    check_moved(seen(engines, start), blocks, pair)


# name: tokens that prefill has produced before, that decode has computed, prompt tokens, ends of
# chunks, blocks moved.
HELD = {
    # 384 tokens of 699 are cached, then chunks of at most 256 tokens.
    "prefill holds a part": (400, 0, 700, [640, 699], [5, 5, 22]),
    # Prefill computes at least one token; vLLM finds whole blocks only, 21 of them.
    "prefill holds all": (700, 0, 700, [699], [5, 5, 22]),
    # Without its last token the prompt has 10 whole blocks, and at least one token is computed: 9
    # are found.
    "prefill holds all, to a block's end": (321, 0, 321, [320], [4, 4, 10]),
    "prefill holds more": (400, 200, 700, [640, 699], [5, 5, 16]),
    "decode holds more": (200, 530, 700, [448, 699], [5, 5, 6]),
    "decode holds part of the window": (200, 650, 700, [448, 699], [2, 2, 2]),
}


@pytest.mark.parametrize("order", ["together", "in_turn"])
@pytest.mark.parametrize("name", HELD)
async def test_nothing_is_computed_or_sent_twice(engines: Engines, name: str, order: str) -> None:
    """Prefill computes what it has not cached and sends blocks that decode has not cached, once."""
    there, here, tokens, chunks, blocks = HELD[name]
    pair, prompt = engines.one_to_two, random_prompt(tokens, seed=72)
    reference = await alone(pair, prompt)
    await pair.in_turn(prompt[:there], 1)
    await forget(pair.decode)
    if here:
        await generate(pair.decode, prompt[:here], 1)
    start = len(engines.events())
    assert difference(reference, await getattr(pair, order)(prompt, MAX_TOKENS)) is None
    found = seen(engines, start)
    assert found.computed == chunks
    check_moved(found, blocks, pair)


async def test_the_dropped_token_is_in_no_cached_block(engines: Engines) -> None:
    """A prompt produced without its last token ends at a block; prefill misses that block."""
    pair = engines.one_to_two
    first = random_prompt(320, seed=73)
    longer = first + random_prompt(80, seed=74)
    reference = await generate(pair.prefill, longer, MAX_TOKENS)
    await forget(pair.prefill)
    await pair.in_turn(first, 2)
    answer = await generate(pair.prefill, longer, MAX_TOKENS)
    assert difference(reference, answer) is None
    assert answer.cached_tokens == 288


@pytest.mark.parametrize("order", ["together", "in_turn"])
async def test_who_needs_nothing_lets_go_at_once(engines: Engines, order: str) -> None:
    """Decode has cached all but the last token: prefill frees its blocks before the lease ends."""
    pair, prompt = engines.one_to_two, random_prompt(321, seed=75)
    reference = await alone(pair, prompt)
    await generate(pair.decode, prompt, 1)
    start = len(engines.events())
    assert difference(reference, await getattr(pair, order)(prompt, MAX_TOKENS)) is None
    found = seen(engines, start)
    assert (found.asked, found.written) == ([], [0, 0, 0])
    producer = pair.address["remote_engine_id"]

    def names() -> list[str]:
        return [event["event"] for event in engines.events(start) if event["engine"] == producer]

    await until(lambda: names().count("cancel") == 2)
    # The lease would also free them, but long after this prompt's chunk.
    await pair.in_turn(random_prompt(40, seed=76), 1)
    until_freed = names()[: names().index("sent")]
    assert until_freed.count("chunk") == 2, "256 and 64 tokens of the first prompt, nothing of the second"
    assert until_freed.count("cancel") == 2


async def test_one_prompt_twice_at_a_time(engines: Engines) -> None:
    """Prefill computes the prompt once, and each request receives all of its own blocks."""
    pair, prompt = engines.one_to_two, random_prompt(700, seed=77)
    reference = await alone(pair, prompt)
    start, transfers = len(engines.events()), [uuid.uuid4().hex for _ in range(2)]
    # Both requests wait for KV, so neither finds the other's blocks in decode's cache. Decode
    # allocates blocks at once for a request whose prompt is already computed.
    params = pair.address | {"remote_num_tokens": len(prompt) - 1}
    both = [generate(pair.decode, prompt, MAX_TOKENS, params | {"transfer_id": one}) for one in transfers]
    waiting = [asyncio.ensure_future(one) for one in both]
    await until(lambda: len(seen(engines, start).asked) == 4)
    legs = [{"do_remote_decode": True, "transfer_id": one} for one in transfers]
    await asyncio.gather(*(generate(pair.prefill, prompt, 1, leg, logprobs=None) for leg in legs))
    assert [difference(reference, await answer) for answer in waiting] == [None, None]
    found = seen(engines, start)
    check_moved(found, [5, 5, 22], pair, requests=2)
    # The first request uses all tokens of each step up to its last one, when the second finds 21
    # blocks of it: 699 - 672 tokens are left.
    assert found.computed == [256, 512, 699, 699]
