"""A supervisor's report of ended engines, from a request's parameters to the ranks."""

from __future__ import annotations

import pytest
from vllm import SamplingParams
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request, RequestStatus

from connectors.vllm_hma.config import parse_config
from connectors.vllm_hma.orders import Orders
from connectors.vllm_hma.scheduler_side.scheduler import SchedulerConnector

SUPERVISOR = "what nobody else knows"


def told(extra: dict[str, str], params: object) -> tuple[SchedulerConnector, Request]:
    """Return a request with these kv_transfer_params as vLLM passes on a rejected one: new, then
    aborted.
    """
    scheduler = SchedulerConnector(parse_config(extra), "c", 1, (), 256)
    sampling = SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": params})
    request = Request("lose", [0], sampling, None, abort_immediately=True)
    scheduler.new_request(request)
    assert scheduler.consumptions.matched_tokens(request, 0) == 0
    request.status = RequestStatus.FINISHED_ABORTED
    assert scheduler.finished(request) == (False, None)
    return scheduler, request


def test_lost_engines_reach_the_ranks_in_the_next_step() -> None:
    """The request has the supervisor's token, and no other effect."""
    scheduler, _ = told({"supervisor": SUPERVISOR}, {"engines_lost": "node-a.", "supervisor": SUPERVISOR})
    assert scheduler.orders(SchedulerOutput.make_empty()) == Orders(lost=["node-a."])
    assert scheduler.orders(SchedulerOutput.make_empty()) == Orders()


@pytest.mark.parametrize(
    ("extra", "params"),
    [
        ({}, {}),
        ({}, {"supervisor": ""}),
        ({}, {"supervisor": SUPERVISOR}),
        ({"supervisor": SUPERVISOR}, {}),
        ({"supervisor": SUPERVISOR}, {"supervisor": SUPERVISOR[:-1]}),
        ({"supervisor": SUPERVISOR}, {"supervisor": "\u00fc" * 16}),
    ],
)
def test_not_everybody_is_believed(
    extra: dict[str, str], params: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    """A client of vLLM's own server could otherwise free blocks that a live engine writes to."""
    scheduler, _ = told(extra, {"engines_lost": "node-a."} | params)
    assert scheduler.orders(SchedulerOutput.make_empty()) == Orders()
    assert "ignored LostParams" in caplog.text
    assert SUPERVISOR not in caplog.text


def test_a_malformed_word_is_none() -> None:
    """The request is computed here, like one without parameters."""
    scheduler, _ = told({"supervisor": SUPERVISOR}, {"engines_lost": "", "supervisor": SUPERVISOR})
    assert scheduler.orders(SchedulerOutput.make_empty()) == Orders()


@pytest.mark.parametrize("params", ["x", ["do_remote_prefill"], 7, {"do_remote_decode": True, "transfer_id": 7}])
def test_parameters_that_are_none(params: object, caplog: pytest.LogCaptureFixture) -> None:
    """The request is computed here, and vLLM's scheduler, which expects a dict, does not see the
    parameters.
    """
    scheduler, request = told({}, params)
    assert scheduler.orders(SchedulerOutput.make_empty()) == Orders()
    assert request.kv_transfer_params is None
    assert "this engine computes its prompt" in caplog.text
