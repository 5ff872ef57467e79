"""vLLM's own scheduler with our scheduler side in thousands of random steps: no assertion, no
leak.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request, RequestStatus

from connectors.vllm_hma.orders import Orders
from testing.connector_state import snapshot
from tests.campaigns.schedules.scheduling import BLOCK_TOKENS, KINDS, Engine, Rank

STEPS = 600


Make = Callable[..., Engine]


@pytest.fixture
def make() -> Iterator[Make]:
    """Create vLLM's scheduler with the connector's scheduler side; close it at the end."""
    made: list[Engine] = []

    def engine(
        seed: int = 0, blocks: int = 60, prefix_caching: bool = True, asynchronous: bool = False, **options: Any
    ) -> Engine:
        made.append(Engine(seed, blocks, prefix_caching, asynchronous, **options))
        return made[-1]

    yield engine
    for one in made:
        one.close()


def add(engine: Engine, name: str, tokens: list[int], params: dict[str, object] | None, **sampling: Any) -> None:
    given = SamplingParams(extra_args={"kv_transfer_params": params}, **({"max_tokens": 1} | sampling))
    engine.scheduler.add_request(Request(name, tokens, given, None, block_hasher=engine.hasher))


CONSUME = {"do_remote_prefill": True, "transfer_id": "t", "remote_engine_id": "other"}
CONSUME |= {"remote_host": "127.0.0.1", "remote_port": 9}


@pytest.mark.parametrize(("blocks", "prefix_caching", "asynchronous"), KINDS)
def test_random_steps(blocks: int, prefix_caching: bool, asynchronous: bool, make: Make) -> None:
    """Requests of every kind arrive, are preempted, aborted and failed; all end, and the pool is
    at its baseline.
    """
    seed = KINDS.index((blocks, prefix_caching, asynchronous))
    engine = make(seed, blocks, prefix_caching, asynchronous)
    engine.run(STEPS)


@pytest.mark.parametrize(
    ("prefix_caching", "fails", "computed"),
    [(True, False, [1, 4, 4]), (True, True, [100, 4, 4]), (False, False, [1, 100, 100])],
    ids=["received", "failed", "no prefix cache"],
)
def test_the_choices_of_a_request_share_its_prompt(
    prefix_caching: bool, fails: bool, computed: list[int], make: Make
) -> None:
    """Of 99 received tokens, or 100 computed ones, the prefix cache has six blocks of 16."""
    engine = make(prefix_caching=prefix_caching)
    engine.scheduler.max_num_scheduled_tokens = 400
    engine.later = lambda most=40: engine.steps + 3  # type: ignore[method-assign]
    engine.rng.random = lambda: 0.1 if fails else 0.9  # type: ignore[method-assign]
    names = ["0_r", "1_r", "2_r"]
    for name in names:
        add(engine, name, list(range(10, 110)), CONSUME, max_tokens=3)
    scheduled = Counter[str]()
    receives = 0
    while engine.scheduler.requests:
        engine.steps += 1
        output = engine.scheduler.schedule()
        scheduled.update(output.num_scheduled_tokens)
        receives += len(output.kv_connector_metadata.receives)
        engine.scheduler.update_from_output(output, engine.execute(output))
    # The last of three tokens is not computed on.
    assert [scheduled[name] - 2 for name in names] == computed
    assert receives == 1
    if prefix_caching:
        engine.ranks = [Rank() for _ in engine.ranks]  # forget the quarantine of a failed transfer
        assert not snapshot(engine.connector.scheduler).followers


def test_a_session_of_streamed_input_sends_no_kv(make: Make) -> None:
    """With its next input, vLLM frees blocks of its windows, which an offer may still request. Its
    prompt keeps its last token.
    """
    engine = make()
    produce = {"do_remote_decode": True, "transfer_id": "t"}
    inputs = [list(range(10, 110)), list(range(200, 290))]
    for words, params in zip(inputs, [produce, None], strict=True):
        sampling = SamplingParams(max_tokens=1, ignore_eos=True, extra_args={"kv_transfer_params": params})
        request = Request("session", words[:], sampling, None, block_hasher=engine.hasher, resumable=True)
        engine.scheduler.add_request(request)
        while engine.scheduler.has_unfinished_requests():
            engine.step()
    # The step for an answer's last token is not run, so the next input replaces this token.
    assert engine.scheduler.requests["session"].prompt_token_ids == inputs[0] + inputs[1]
    engine.scheduler.finish_requests("session", RequestStatus.FINISHED_ABORTED)
    while engine.scheduler.has_requests():
        engine.step()
    assert engine.pool.get_num_free_blocks() == engine.baseline


@pytest.mark.parametrize("steps", [0, 1])
def test_a_request_id_that_is_used_again_within_a_step_sends_no_kv(make: Make, steps: int) -> None:
    """Workers would apply the end of the earlier request to the later one (with
    VLLM_DISABLE_REQUEST_ID_RANDOMIZATION, a client's ids are the engine's).
    """
    engine = make()

    add(engine, "r", list(range(10, 400)), {"do_remote_decode": True, "transfer_id": "first"}, ignore_eos=True)
    for _ in range(steps):
        engine.step()
    engine.scheduler.finish_requests("r", RequestStatus.FINISHED_ABORTED)
    add(engine, "r", list(range(10, 400)), {"do_remote_decode": True, "transfer_id": "second"}, ignore_eos=True)
    orders = engine.scheduler.schedule().kv_connector_metadata
    assert isinstance(orders, Orders)
    assert [(each.request_id, each.held) for each in orders.finished] == [("r", False)]
    assert [each.transfer_id for each in orders.expects] == ([] if steps else ["first"])


@pytest.mark.parametrize("role", ["kv_both", "kv_producer"])
def test_blocks_of_a_step_in_flight_are_not_received(make: Make, role: str) -> None:
    """An aborted request's step may still write to its blocks. vLLM keeps such blocks out of the
    pool only on engines whose role receives KV (``defer_block_free``).
    """
    engine = make(0, 32, False, asynchronous=True, role=role)
    scheduler = engine.scheduler
    add(engine, "aborted", list(range(10, 42)), None, max_tokens=9)
    in_flight = scheduler.schedule()
    written = {block for table in scheduler.kv_cache_manager.get_block_ids("aborted") for block in table}
    scheduler.finish_requests("aborted", RequestStatus.FINISHED_ABORTED)
    add(engine, "received", list(range(10, 140)), CONSUME, max_tokens=9)
    filled = set[int]()
    for output in (in_flight, scheduler.schedule()):
        for receive in output.kv_connector_metadata.receives:
            filled |= {block for table in receive.tables for block in table if block}
    assert len(written) == 6
    assert not filled & written


@pytest.mark.parametrize("step_tokens", [BLOCK_TOKENS, 4])
def test_windows_of_a_first_token_stay_allocated_while_they_are_sent(make: Make, step_tokens: int) -> None:
    """vLLM frees the window's oldest blocks after the step for the first token, or after its first
    part if it divides that step.
    """
    engine = make()
    engine.scheduler.scheduler_config.long_prefill_token_threshold = step_tokens
    engine.scheduler.adaptive_long_prefill_threshold = False
    # vLLM limits a chunk only if there is another request.
    add(engine, "other", [9] * 3, None, max_tokens=90)
    prompt = list(range(10, 10 + 6 * BLOCK_TOKENS + 15))
    add(engine, "p", prompt, {"do_remote_decode": True, "transfer_id": "t", "first_token": True})
    engine.later = lambda most=40: engine.steps + 10  # type: ignore[method-assign]
    while "p" not in engine.ranks[0].sends:
        engine.step()
    # A consumer resumes at token 96, and its window starts with token 49.
    assert {name: [len(ids) for ids in tables] for name, tables in engine.sends.items()} == {"p": [6, 3, 3]}
    tables = engine.scheduler.kv_cache_manager.get_block_ids("p")
    assert [table[3] == 0 for table in tables] == [False, True, True], "vLLM has kept the windows"
    while "p" in engine.scheduler.requests:
        engine.step()
    assert not engine.sends
    engine.scheduler.finish_requests("other", RequestStatus.FINISHED_ABORTED)
    for _ in range(3):
        engine.step()
    engine.check_nothing_remains()
