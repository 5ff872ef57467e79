"""What a supervisor says of engines, on its way from a request's parameters to the ranks."""

from __future__ import annotations

from vllm import SamplingParams
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request, RequestStatus

from connectors.vllm_hma.config import ConnectorConfig
from connectors.vllm_hma.orders import Orders
from connectors.vllm_hma.scheduler import SchedulerConnector


def test_lost_engines_reach_the_ranks_in_the_next_step() -> None:
    """As vLLM passes a rejected request on: it is new, it is aborted, a step follows. Nothing else comes of it."""
    scheduler = SchedulerConnector(ConnectorConfig(), "c", 1, ())
    params = SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": {"engines_lost": "node-a."}})
    request = Request("lose", [0], params, None, abort_immediately=True)
    scheduler.new_request(request)
    assert scheduler.matched_tokens(request, 0) == 0
    request.status = RequestStatus.FINISHED_ABORTED
    assert scheduler.finished(request) == (False, None)
    assert scheduler.orders(SchedulerOutput.make_empty()) == Orders(lost=["node-a."])
    assert scheduler.orders(SchedulerOutput.make_empty()) == Orders()


def test_a_malformed_word_is_none() -> None:
    """The request is computed here, as one that says nothing."""
    scheduler = SchedulerConnector(ConnectorConfig(), "c", 1, ())
    params = SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": {"engines_lost": ""}})
    scheduler.new_request(Request("lose", [0], params, None))
    assert scheduler.orders(SchedulerOutput.make_empty()) == Orders()
