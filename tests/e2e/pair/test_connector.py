"""The connector between real engines: right answers, in every order of events, and block pools back at baseline."""

from __future__ import annotations

import asyncio
import uuid

import pytest

from testing.engines import Answer, Pair, generate
from testing.identity import BLOCK_TOKENS, MAX_TOKENS, compare, difference, prompts, random_prompt
from tests.e2e.pair.conftest import Engines, alone

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("direction", ["one_to_two", "two_to_one"])
def test_identity(engines: Engines, direction: str) -> None:
    """Tokens and logprobs are those of one engine, at every block and window boundary; nothing leaks."""
    pair: Pair = getattr(engines, direction)

    async def run() -> None:
        todo = prompts(27, 700, seed=1)
        cases = [(prompt, await alone(pair, prompt)) for prompt in todo]
        outcome = await compare(pair, cases)
        assert outcome.wrong == ()
        assert await engines.idle()

    engines.runner.run(run())


def test_the_kv_really_came_from_the_other_engine(engines: Engines) -> None:
    """No silent recompute: the decode engine receives, and its received requests did not fail."""
    prompt = random_prompt(600, seed=2)
    before = _events(engines, "received")
    engines.runner.run(engines.one_to_two.together(prompt, 2))
    fresh = _events(engines, "received")[len(before) :]
    assert len(fresh) == 2, "one a decode rank"
    assert [event["failure"] for event in fresh] == [None, None]
    assert engines.runner.run(engines.idle())


def test_streaming_and_ideal_bytes(engines: Engines) -> None:
    """Of 8 chunks, 85% of full-attention bytes are written before the last ends; at most a block a group too many."""
    tokens, chunk_tokens = 8 * 256, 256
    engines.runner.run(engines.idle())
    start = len(engines.events())
    engines.runner.run(engines.one_to_two.together(random_prompt(tokens, seed=3), 2))
    events = engines.events()[start:]
    chunks = [event for event in events if event["event"] == "chunk"]
    assert len(chunks) == tokens // chunk_tokens
    written = {event["write"]: event["t"] for event in events if event["event"] == "written"}
    writes = [event for event in events if event["event"] == "write"]
    full = [(event["bytes"]["2"], written[event["write"]]) for event in writes if "2" in event["bytes"]]
    total = sum(count for count, _ in full)
    early = sum(count for count, at in full if at <= chunks[-1]["t"])
    assert early / total >= 0.85
    # Two layers a group, 4 heads in all, K and V of 32 float32 each, for every token that decode attends to.
    block_bytes = 2 * 4 * BLOCK_TOKENS * 2 * 32 * 4
    for group, needed_tokens in (("0", 128), ("1", 128), ("2", tokens - 1)):
        moved = sum(event["bytes"].get(group, 0) for event in writes)
        assert moved <= needed_tokens * block_bytes / BLOCK_TOKENS + block_bytes


def test_a_local_prefix_is_not_sent_again(engines: Engines) -> None:
    """The decode engine holds the first turn: only what is new is moved, and the answer is right."""
    pair = engines.one_to_two
    first = random_prompt(400, seed=4)
    second = first + random_prompt(300, seed=5)

    async def run() -> tuple[Answer, Answer]:
        reference = await alone(pair, second)
        await pair.together(first, 2)
        return reference, await pair.together(second, MAX_TOKENS)

    reference, answer = engines.runner.run(run())
    assert difference(reference, answer) is None
    receives = [event for event in _events(engines, "receive") if event["blocks"]["2"] > 0]
    assert receives[-1]["blocks"]["2"] < 700 // BLOCK_TOKENS / 2 + 1
    assert engines.runner.run(engines.idle())


def test_many_at_once(engines: Engines) -> None:
    """Interleaved transfers in both directions at the same time do not disturb each other."""

    async def run() -> None:
        todo = [random_prompt(40 + 53 * i, seed=10 + i) for i in range(8)]
        pairs = [engines.one_to_two, engines.two_to_one]
        references = [await alone(pairs[i % 2], prompt) for i, prompt in enumerate(todo)]
        answers = await asyncio.gather(*(pairs[i % 2].together(prompt, MAX_TOKENS) for i, prompt in enumerate(todo)))
        assert [difference(r, a) for r, a in zip(references, answers, strict=True)] == [None] * 8
        assert await engines.idle()

    engines.runner.run(run())


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("another start of the engine", {"remote_engine_id": "an-engine-that-has-ended"}),
        ("an id that was used before", {"transfer_id": "used"}),
        ("parameters that make no sense", {"remote_port": "a port"}),
    ],
)
def test_what_cannot_be_fetched_is_computed(engines: Engines, what: str, change: dict[str, object]) -> None:
    """A reference that is stale, used or malformed gives the right answer, computed by the decode engine."""
    pair = engines.one_to_two
    prompt = random_prompt(300, seed=20)

    async def run() -> None:
        reference = await alone(pair, prompt)
        if change.get("transfer_id") == "used":
            leg = {"do_remote_decode": True, "transfer_id": "used"}
            first = await generate(pair.prefill, random_prompt(200, seed=21), 1, leg, logprobs=None)
            assert first.transfer is not None
            await generate(pair.decode, random_prompt(200, seed=21), 1, first.transfer)
        transfer = pair.address | {"transfer_id": uuid.uuid4().hex} | change
        answer = await asyncio.wait_for(generate(pair.decode, prompt, MAX_TOKENS, transfer), 60)
        assert difference(reference, answer) is None
        assert await engines.idle()

    engines.runner.run(run())


def test_another_prompts_kv_is_refused(engines: Engines) -> None:
    """A transfer whose two requests have different prompts is never decoded from."""
    pair = engines.one_to_two
    mine, other = random_prompt(300, seed=30), random_prompt(300, seed=31)

    async def run() -> None:
        reference = await alone(pair, mine)
        first = await generate(pair.prefill, other, 1, {"do_remote_decode": True}, logprobs=None)
        assert first.transfer is not None
        answer = await generate(pair.decode, mine, MAX_TOKENS, first.transfer)
        assert difference(reference, answer) is None
        assert await engines.idle()

    engines.runner.run(run())


def test_a_prefill_leg_that_decodes_is_not_produced(engines: Engines) -> None:
    """With more than one token its windows slide on: it answers for itself, holds nothing and offers nothing."""

    async def run() -> None:
        leg = {"do_remote_decode": True}
        answer = await generate(engines.one_to_two.prefill, random_prompt(300, seed=35), 4, leg, logprobs=None)
        assert len(answer.tokens) == 4
        assert answer.transfer is None
        assert await engines.idle()

    engines.runner.run(run())


def test_a_lease_ends(engines: Engines) -> None:
    """Finished blocks that nobody fetches go back to the pool after lease_s."""

    async def run() -> None:
        await generate(engines.one_to_two.prefill, random_prompt(300, seed=40), 1, {"do_remote_decode": True})
        assert not await engines.one_to_two.prefill.reset_prefix_cache(), "the lease holds blocks"
        assert await engines.idle(within_s=20)

    engines.runner.run(run())


def _events(engines: Engines, name: str) -> list[dict]:
    return [event for event in engines.events() if event["event"] == name]
