"""The connector between real engines: right answers for all event orders, pools at their
baseline.
"""

from __future__ import annotations

import asyncio
import uuid

import pytest

from testing.engines import Answer, Pair, generate
from testing.identity import BLOCK_TOKENS, MAX_TOKENS, compare, difference, prompts, random_prompt
from tests.e2e.pair.conftest import Engines, alone

pytestmark = pytest.mark.engine

ANSWER_TOKENS = 3
"""Tokens after a prompt of each length; ``make identity`` compares longer answers."""


@pytest.mark.parametrize("direction", ["one_to_two", "two_to_one"])
def test_identity(engines: Engines, direction: str) -> None:
    """Tokens and logprobs equal one engine's at every block and window boundary; nothing leaks."""
    pair: Pair = getattr(engines, direction)

    async def run() -> None:
        todo = prompts(27, 700, seed=1)
        cases = [(prompt, await alone(pair, prompt, ANSWER_TOKENS)) for prompt in todo]
        outcome = await compare(pair, cases, tokens=ANSWER_TOKENS)
        assert outcome.wrong == ()
        assert await engines.idle()

    engines.runner.run(run())


def test_the_kv_really_came_from_the_other_engine(engines: Engines) -> None:
    """The decode engine receives KV for each request, and no received request has failed."""
    prompt = random_prompt(600, seed=2)
    before = _events(engines, "received")
    engines.runner.run(engines.one_to_two.together(prompt, 2))
    fresh = _events(engines, "received")[len(before) :]
    assert len(fresh) == 2, "one per decode rank"
    assert [event["failure"] for event in fresh] == [None, None]
    assert engines.runner.run(engines.idle())


def test_streaming_and_ideal_bytes(engines: Engines) -> None:
    """Before the last of 8 chunks ends, 85% of the full-attention bytes are written.

    At most one block per group is moved in excess.
    """
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
    # Two layers per group, 4 heads in total, K and V of 32 float32 each, for every token that
    # decode attends to.
    block_bytes = 2 * 4 * BLOCK_TOKENS * 2 * 32 * 4
    for group, needed_tokens in (("0", 128), ("1", 128), ("2", tokens - 1)):
        moved = sum(event["bytes"].get(group, 0) for event in writes)
        assert moved <= needed_tokens * block_bytes / BLOCK_TOKENS + block_bytes


def test_a_local_prefix_is_not_sent_again(engines: Engines) -> None:
    """The decode engine has the first turn: only new blocks are moved, and the answer is right."""
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
    """Interleaved transfers in both directions do not disturb each other."""

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
        ("a used id", {"transfer_id": "used"}),
        ("malformed parameters", {"remote_port": "a port"}),
    ],
)
def test_what_cannot_be_fetched_is_computed(engines: Engines, what: str, change: dict[str, object]) -> None:
    """With a stale, used or malformed reference the decode engine computes the right answer."""
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
    """Decode never uses a transfer whose two requests have different prompts."""
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
    """A prefill request for more than one token is answered locally, and holds and offers no KV.

    Decoding would move its windows.
    """

    async def run() -> None:
        leg = {"do_remote_decode": True}
        answer = await generate(engines.one_to_two.prefill, random_prompt(300, seed=35), 4, leg, logprobs=None)
        assert len(answer.tokens) == 4
        assert answer.transfer is None
        assert await engines.idle()

    engines.runner.run(run())


def test_a_lease_ends(engines: Engines) -> None:
    """Finished blocks that no engine fetches return to the pool after lease_s."""

    async def run() -> None:
        await generate(engines.one_to_two.prefill, random_prompt(300, seed=40), 1, {"do_remote_decode": True})
        assert not await engines.one_to_two.prefill.reset_prefix_cache(), "the lease holds blocks"
        assert await engines.idle(within_s=60)

    engines.runner.run(run())


def _events(engines: Engines, name: str) -> list[dict]:
    return [event for event in engines.events() if event["event"] == name]
