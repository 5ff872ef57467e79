"""vLLM's own scheduler with the connector's scheduler side."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from connectors.protocol.actions import Due
from connectors.protocol.params import EMITTED_TOKENS
from connectors.vllm_hma.orders import Orders
from connectors.vllm_hma.reports import Kept, WorkerReport
from connectors.vllm_hma.upstream.vllm_emitted_tokens import restore_output
from testing.connector_state import snapshot
from tests.campaigns.schedules.scheduling import BLOCK_TOKENS, KINDS, STOP_TOKEN, Engine, Rank
from tests.vllm_contract.scheduler_sides import CONSUME, PRODUCE

# ---- scheduler object ----------------------------------------------------------------------------


STEPS = 600


Make = Callable[..., Engine]


@pytest.fixture
def make() -> Iterator[Make]:
    """Create vLLM's scheduler with the connector's scheduler side; close it at the end."""
    made: list[Engine] = []

    def engine(blocks: int = 60, prefix_caching: bool = True, asynchronous: bool = False, **options: Any) -> Engine:
        made.append(Engine(options.pop("seed", 0), blocks, prefix_caching, asynchronous, **options))
        return made[-1]

    yield engine
    for one in made:
        one.close()


def add(engine: Engine, name: str, tokens: list[int], params: dict[str, object] | None, **sampling: Any) -> None:
    given = SamplingParams(extra_args={"kv_transfer_params": params}, **({"max_tokens": 1} | sampling))
    engine.scheduler.add_request(Request(name, tokens, given, None, block_hasher=engine.hasher))


@pytest.mark.parametrize(("blocks", "prefix_caching", "asynchronous"), KINDS)
def test_random_steps(blocks: int, prefix_caching: bool, asynchronous: bool, make: Make) -> None:
    """A part of the campaign `schedules`: all requests end, and the pool is at its baseline."""
    seed = KINDS.index((blocks, prefix_caching, asynchronous))
    make(blocks, prefix_caching, asynchronous, seed=seed).run(STEPS)


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
    inputs = [list(range(10, 110)), list(range(200, 290))]
    for words, params in zip(inputs, [PRODUCE, None], strict=True):
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

    add(engine, "r", list(range(10, 400)), PRODUCE | {"transfer_id": "first"}, ignore_eos=True)
    for _ in range(steps):
        engine.step()
    engine.scheduler.finish_requests("r", RequestStatus.FINISHED_ABORTED)
    add(engine, "r", list(range(10, 400)), PRODUCE | {"transfer_id": "second"}, ignore_eos=True)
    orders = engine.scheduler.schedule().kv_connector_metadata
    assert isinstance(orders, Orders)
    assert [(each.request_id, each.held) for each in orders.finished] == [("r", False)]
    assert [each.transfer_id for each in orders.expects] == ([] if steps else ["first"])


@pytest.mark.parametrize("role", ["kv_both", "kv_producer"])
def test_blocks_of_a_step_in_flight_are_not_received(make: Make, role: str) -> None:
    """An aborted request's step may still write to its blocks. vLLM keeps such blocks out of the
    pool only on engines whose role receives KV (``defer_block_free``).
    """
    engine = make(32, False, asynchronous=True, role=role)
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
    add(engine, "p", prompt, PRODUCE | {"first_token": True})
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


# ---- quarantine ----------------------------------------------------------------------------------


LOADS_STEPS = 5
FOR_EVER = 10**9


class Loading(Engine):
    """Transfers take some steps; those of ``failing`` and ``silent`` requests fail, and the blocks
    of the latter may be written to until ``answered``. Requests in ``others`` are loaded by another
    child of a MultiConnector.
    """

    moves = False

    def __init__(self, blocks: int) -> None:
        super().__init__(1, blocks, prefix_caching=False, asynchronous=False)
        self.failing: set[str] = set()
        self.silent: set[str] = set()
        self.answered = False
        self.others: set[str] = set()
        self.others_later = 0
        connector = self.connector
        self._matched, self._allocated = connector.get_num_new_matched_tokens, connector.update_state_after_alloc
        self.connector.get_num_new_matched_tokens = self._matched_tokens  # type: ignore[method-assign]
        self.connector.update_state_after_alloc = self._after_alloc  # type: ignore[method-assign]

    def _matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        own = self._matched(request, num_computed_tokens)
        return (request.num_prompt_tokens - 1, True) if request.request_id in self.others else own

    def _after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        other = request.request_id in self.others
        # MultiConnector reports allocations to the child that loads, and none to the others.
        self._allocated(request, blocks, 0 if other else num_external_tokens)
        if other and num_external_tokens:
            for rank in self.ranks:
                rank.receives[request.request_id] = self.steps + LOADS_STEPS + self.others_later
                rank.fills[request.request_id] = "", set()

    def ask(self, request_id: str, prompt_tokens: int, loads: bool) -> None:
        params = CONSUME | {"transfer_id": f"t{request_id}"} if loads else None
        sampling = SamplingParams(max_tokens=3, extra_args={"kv_transfer_params": params})
        sampling.stop_token_ids = [STOP_TOKEN]
        prompt = [self.rng.randint(10, 500) for _ in range(prompt_tokens)]
        self.scheduler.add_request(Request(request_id, prompt, sampling, None, block_hasher=self.hasher))

    def rank_step(self, rank: Rank, orders: Any) -> KVConnectorOutput:
        for receive in orders.receives:
            rank.receives[receive.request_id] = self.steps + LOADS_STEPS
            rank.fills[receive.request_id] = receive.transfer_id, {i for table in receive.tables for i in table if i}
        received = {request_id for request_id, at in rank.receives.items() if at <= self.steps}
        due = [Due(each.request_id, each.transfer_id, None) for each in orders.queues]
        report = WorkerReport(due=due, requested=orders.report)
        for request_id in received:
            del rank.receives[request_id]
            transfer_id, blocks = rank.fills.pop(request_id)
            if request_id in self.silent:
                report.begun.append(Kept(request_id, transfer_id))
                rank.quarantine[report.begun[-1]] = FOR_EVER, blocks
        if self.answered:
            report.ended, rank.quarantine = list(rank.quarantine), {}
        return KVConnectorOutput(
            finished_recving=received,
            failed_recving=received & (self.failing | self.silent),
            kv_connector_worker_meta=report or None,
        )

    def steps_until_over(self, *request_ids: str, within: int = 200) -> None:
        for _ in range(within):
            if not self.scheduler.requests.keys() & set(request_ids):
                return
            self.step()
        states = {name: request.status.name for name, request in self.scheduler.requests.items()}
        raise AssertionError(f"not over after {within} steps: {states}")


@pytest.fixture
def loading() -> Iterator[Callable[..., Loading]]:
    made: list[Loading] = []

    def make(blocks: int, *silent: str, tokens: int = 200) -> Loading:
        """An engine with a request for each name of ``silent``."""
        made.append(Loading(blocks))
        made[-1].silent = {*silent}
        for name in silent:
            made[-1].ask(name, tokens, loads=True)
        return made[-1]

    yield make
    for engine in made:
        engine.close()


@pytest.mark.parametrize("blocks", [43, 46])
@pytest.mark.parametrize(
    ("failing", "others", "later"),
    [({"a"}, {}, 0), ({"b"}, {}, 0), ({"a", "b"}, {}, 0), ({"a"}, {"b"}, 0), ({"a"}, {"b"}, 10)],
)
def test_a_failed_load_does_not_wait_for_a_finished_one(
    loading: Callable[..., Loading], blocks: int, failing: set[str], others: set[str], later: int
) -> None:
    """Computing a prompt needs more blocks of a window than receiving it. vLLM puts the failed
    request before the other one, which holds the missing blocks and needs a step to end. Another
    child of a MultiConnector may have loaded that one, or be loading it.
    """
    engine = loading(blocks)
    engine.failing, engine.others, engine.others_later = failing, set(others), later
    for name in ("a", "b"):
        engine.ask(name, 200, loads=name not in others)
    engine.steps_until_over("a", "b")
    engine.check_nothing_remains()


def test_an_aborted_load_may_go_into_quarantine(loading: Callable[..., Loading]) -> None:
    """vLLM keeps its blocks meanwhile. A failed request that does not fit beside them waits."""
    engine = loading(44)
    engine.failing, engine.silent = {"r"}, {"x"}
    for name in ("r", "x"):
        engine.ask(name, 200, loads=True)
    while "x" not in engine.ranks[0].receives:
        engine.step()
    for rank in engine.ranks:
        rank.receives["x"] += LOADS_STEPS
    engine.scheduler.finish_requests("x", RequestStatus.FINISHED_ABORTED)
    engine.ask("small", 5, loads=False)
    engine.steps_until_over("small")
    while not len(engine.connector.scheduler.quarantine):
        engine.step()
    engine.ask("later", 5, loads=False)
    engine.steps_until_over("later")
    assert engine.scheduler.requests["r"].status == RequestStatus.WAITING_FOR_REMOTE_KVS
    engine.answered = True
    engine.steps_until_over("r", "x")
    engine.check_nothing_remains()


@pytest.mark.parametrize(
    ("blocks", "loads", "leaves"), [(32, False, False), (32, True, False), (44, False, False), (32, False, True)]
)
def test_a_request_larger_than_what_is_left(
    loading: Callable[..., Loading], blocks: int, loads: bool, leaves: bool
) -> None:
    """Only the large request waits for its answer; vLLM would block the whole queue. If its client
    leaves, it ends at once, and its blocks stay in quarantine.

    vLLM reserves blocks for it before it admits another load. Of 44 blocks, quarantine leaves those
    to receive the request again, but not those to compute it.
    """
    engine = loading(blocks, "r")
    for _ in range(20):
        engine.step()
    names = [f"small {number}" for number in range(5)]
    for name in names:
        engine.ask(name, 5, loads=loads)
    engine.steps_until_over(*names)
    assert engine.scheduler.requests["r"].status == RequestStatus.WAITING_FOR_REMOTE_KVS
    if leaves:
        engine.scheduler.finish_requests("r", RequestStatus.FINISHED_ABORTED)
        engine.steps_until_over("r")
        assert engine.pool.get_num_free_blocks() < engine.baseline
    engine.answered = True
    engine.steps_until_over("r")
    for _ in range(3):
        engine.step()
    engine.check_nothing_remains()


# ---- emitted tokens ------------------------------------------------------------------------------


PROMPT = list(range(10, 30))
ANSWER = list(range(100, 160))


def resumed(name: str, engine: Engine | None = None) -> Request:
    params = SamplingParams(max_tokens=100, extra_args={EMITTED_TOKENS: ANSWER})
    return Request(name, PROMPT, params, None, block_hasher=engine.hasher if engine else None)


def test_a_resumed_request_may_have_cached_kv_beyond_its_prompt() -> None:
    """vLLM asserts that a new request has none: a second copy of a stream would end the engine."""
    engine = Engine(0)
    computed = {}
    for name in ("first", "second"):
        engine.scheduler.add_request(resumed(name, engine))
        computed[name] = 0
        while engine.scheduler.requests[name].num_output_tokens == len(ANSWER):
            output = engine.scheduler.schedule()
            computed[name] += output.num_scheduled_tokens.get(name, 0)
            engine.scheduler.update_from_output(output, engine.execute(output))
    assert computed["first"] >= len(PROMPT + ANSWER)
    assert 0 < computed["second"] < len(ANSWER)


def test_the_output_is_restored_once() -> None:
    """Each connector of an engine with several calls `restore_output`."""
    request = resumed("r")
    for _ in range(2):
        restore_output(request)
    assert list(request.output_token_ids) == ANSWER
    assert list(request.all_token_ids) == PROMPT + ANSWER


@pytest.mark.parametrize("accepts", [True, False])
def test_a_grammar_accepts_the_tokens_when_it_is_compiled(accepts: bool) -> None:
    accepted: list[tuple[str, list[int]]] = []

    def accept(request_id: str, tokens: list[int]) -> bool:
        accepted.append((request_id, tokens))
        return accepts

    request, compiled = resumed("r"), Future[Any]()
    structured: Any = SimpleNamespace(_grammar=compiled)
    request.structured_output_request = structured
    restore_output(request)
    assert not accepted
    compiled.set_result(grammar := SimpleNamespace(accept_tokens=accept))
    assert accepted == [("r", ANSWER)]
    if accepts:
        assert structured.grammar.result() is grammar
    else:
        with pytest.raises(ValueError, match="rejects"):
            structured.grammar.result()
