"""Blocks in quarantine on vLLM's own scheduler object: which requests wait, and which do not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from connectors.protocol.actions import Due
from connectors.vllm_hma.reports import Kept, QuarantineReport, WorkerReport
from tests.campaigns.schedules.scheduling import STOP_TOKEN, Engine, Rank

LOADS_STEPS = 5
FOR_EVER = 10**9
PRODUCER = {"do_remote_prefill": True, "remote_engine_id": "other", "remote_host": "127.0.0.1", "remote_port": 9}


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
        self._matched, self._allocated = (
            self.connector.get_num_new_matched_tokens,
            self.connector.update_state_after_alloc,
        )
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
        params = PRODUCER | {"transfer_id": f"t{request_id}"} if loads else None
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
        report = QuarantineReport()
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
            kv_connector_worker_meta=WorkerReport(report, due, requested=orders.report) or None,
        )

    def steps_until_over(self, *request_ids: str, within: int = 200) -> None:
        for _ in range(within):
            if not self.scheduler.requests.keys() & set(request_ids):
                return
            self.step()
        states = {name: request.status.name for name, request in self.scheduler.requests.items()}
        raise AssertionError(f"not over after {within} steps: {states}")


@pytest.fixture
def loading() -> Iterator[Callable[[int], Loading]]:
    made: list[Loading] = []

    def make(blocks: int) -> Loading:
        made.append(Loading(blocks))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def without_room(loading: Callable[[int], Loading], blocks: int = 32) -> Loading:
    """Return an engine whose only request, `r`, has most of the pool in quarantine."""
    engine = loading(blocks)
    engine.silent = {"r"}
    engine.ask("r", 200, loads=True)
    for _ in range(20):
        engine.step()
    return engine


def test_a_request_goes_on_in_other_blocks(loading: Callable[[int], Loading]) -> None:
    """With enough blocks, no request waits for an answer; an idle engine gets the blocks back
    with it.
    """
    engine = loading(60)
    engine.silent = {"r"}
    engine.ask("r", 100, loads=True)
    engine.steps_until_over("r")
    kept = engine.baseline - engine.pool.get_num_free_blocks()
    assert kept == len(engine.ranks[0].quarantine[Kept("r", "tr")][1])
    assert engine.scheduler.has_requests(), "an idle engine steps on, or would not receive the answer"
    engine.answered = True
    for _ in range(3):
        engine.step()
    engine.check_nothing_remains()
    assert not engine.scheduler.has_requests()


def test_nobody_waits_behind_a_request_that_does_not_fit(loading: Callable[[int], Loading]) -> None:
    """Other requests, with or without KV, run to their end; then there are enough blocks."""
    engine = loading(60)
    engine.silent = {"r"}
    engine.ask("r", 150, loads=True)
    for name in ("a", "b"):
        engine.ask(name, 100, loads=True)
    engine.steps_until_over("a", "b", "r")


@pytest.mark.parametrize("blocks", [43, 46])
@pytest.mark.parametrize(
    ("failing", "others", "later"),
    [({"a"}, {}, 0), ({"b"}, {}, 0), ({"a", "b"}, {}, 0), ({"a"}, {"b"}, 0), ({"a"}, {"b"}, 10)],
)
def test_a_failed_load_does_not_wait_for_a_finished_one(
    loading: Callable[[int], Loading], blocks: int, failing: set[str], others: set[str], later: int
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


def test_an_aborted_load_may_go_into_quarantine(loading: Callable[[int], Loading]) -> None:
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
    engine.answered = True
    engine.steps_until_over("r", "x")
    engine.check_nothing_remains()


@pytest.mark.parametrize(("blocks", "loads"), [(32, False), (32, True), (44, False)])
def test_a_request_larger_than_what_is_left(loading: Callable[[int], Loading], blocks: int, loads: bool) -> None:
    """Only the large request waits for its answer; vLLM would block the whole queue.

    vLLM reserves blocks for it before it admits another load. Of 44 blocks, quarantine leaves those
    to receive the request again, but not those to compute it.
    """
    engine = without_room(loading, blocks)
    names = [f"small {number}" for number in range(5)]
    for name in names:
        engine.ask(name, 5, loads=loads)
    engine.steps_until_over(*names)
    assert engine.scheduler.requests["r"].status == RequestStatus.WAITING_FOR_REMOTE_KVS
    engine.answered = True
    engine.steps_until_over("r")
    engine.check_nothing_remains()


def test_a_client_leaves_while_its_request_does_not_fit(loading: Callable[[int], Loading]) -> None:
    """The request ends at once; its blocks stay in quarantine."""
    engine = without_room(loading)
    engine.scheduler.finish_requests("r", RequestStatus.FINISHED_ABORTED)
    engine.steps_until_over("r")
    assert engine.pool.get_num_free_blocks() < engine.baseline
    engine.answered = True
    for _ in range(3):
        engine.step()
    engine.check_nothing_remains()


def test_ranks_end_at_different_times(loading: Callable[[int], Loading]) -> None:
    """Blocks are kept from the first rank's report to the last one's; a rank may end before
    another begins.
    """
    engine = loading(60)
    quarantine, kept = engine.connector.scheduler.quarantine, Kept("r", "t")
    engine.ask("r", 100, loads=True)
    held: set[int] = set()
    while not held:
        engine.step()
        held = {block for table in engine.scheduler.kv_cache_manager.get_block_ids("r") for block in table if block}

    def references() -> set[int]:
        return {engine.pool.blocks[block].ref_cnt for block in held}

    quarantine.take(QuarantineReport(begun=[kept]))
    assert (references(), len(quarantine)) == ({2}, 1)
    quarantine.take(QuarantineReport(ended=[kept]))
    assert (references(), len(quarantine)) == ({1}, 0)
    quarantine.take(QuarantineReport(begun=[kept, kept], ended=[kept]))
    assert (references(), len(quarantine)) == ({2}, 1)
    quarantine.take(QuarantineReport(begun=[], ended=[kept]))
    assert (references(), len(quarantine)) == ({1}, 0)
