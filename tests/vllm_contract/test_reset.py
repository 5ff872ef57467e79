"""After ``reset_prefix_cache(reset_connector=True)``, the weights in memory may be others than
those of the files: the engine shares no KV with engines that read the files.
"""

from __future__ import annotations

from vllm.v1.request import RequestStatus

from connectors.vllm_hma.orders import Finished
from connectors.vllm_hma.scheduler_side.scheduler import SchedulerConnector
from tests.campaigns.schedules.scheduling import Engine
from tests.vllm_contract.scheduler_sides import CONSUME, PRODUCE, TOKENS, orders, request, scheduler, start


def produced(side: SchedulerConnector, name: str = "r") -> str:
    (expect,) = start(side, request(PRODUCE | {"transfer_id": name}, name)).expects
    return expect.prompt_digest


def consumed(side: SchedulerConnector) -> str:
    (receive,) = start(side, request(CONSUME)).receives
    return receive.prompt_digest


def test_later_transfers_are_refused_by_their_digest() -> None:
    """A reset on either side changes the digests, also between two engines that were both reset."""
    before = consumed(scheduler())
    assert produced(scheduler()) == before
    prefill, decode = scheduler(), scheduler()
    for side in (prefill, decode):
        side.reset()
    found = [produced(prefill), consumed(decode)]
    prefill.reset()
    found.append(produced(prefill, "later"))
    assert len({before, *found}) == 4


def test_prompts_in_progress_are_not_sent() -> None:
    """vLLM may compute their rest, or all of them, with other weights. Complete KV is sent."""
    prefill = scheduler()
    complete, part = request(PRODUCE, "complete"), request(PRODUCE | {"transfer_id": "u"}, "part")
    for each in (complete, part):
        prefill.new_request(each)
    orders(prefill)
    complete.status, complete.num_computed_tokens = RequestStatus.FINISHED_LENGTH_CAPPED, TOKENS - 1
    assert prefill.productions.finished(complete) is not None
    assert orders(prefill).finished == [Finished("complete", True, "")]
    prefill.reset()
    (ended,) = orders(prefill).finished
    assert (ended.request_id, ended.held) == ("part", False)
    assert "reset" in ended.reason


def test_vllm_resets_the_connector() -> None:
    engine = Engine(1, 60, prefix_caching=True, asynchronous=False)
    try:
        side = engine.connector.scheduler
        before = produced(side, "a")
        assert engine.scheduler.reset_prefix_cache(reset_connector=True)
        assert produced(side, "b") != before
    finally:
        engine.close()
