"""After ``reset_prefix_cache(reset_connector=True)``, the weights in memory may be others than
those of the files: the engine shares no KV with engines that read the files.
"""

from __future__ import annotations

from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request, RequestStatus

from connectors.planning.layout import Group, GroupKind
from connectors.vllm_hma.config import parse_config
from connectors.vllm_hma.orders import Finished, Orders
from connectors.vllm_hma.scheduler_side.scheduler import SchedulerConnector
from tests.campaigns.schedules.scheduling import Engine

PRODUCE = {"do_remote_decode": True, "transfer_id": "t"}
CONSUME = {"do_remote_prefill": True, "transfer_id": "t", "remote_engine_id": "p", "remote_host": "h", "remote_port": 9}
TOKENS = 40


def scheduler() -> SchedulerConnector:
    return SchedulerConnector(parse_config({}), "c", 1, (Group(0, GroupKind.FULL, 16, None, ()),), 100)


def request(params: dict[str, Any], name: str = "r") -> Request:
    sampling = SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": params})
    return Request(name, [9] * TOKENS, sampling, None)


def orders(side: SchedulerConnector) -> Orders:
    return side.orders(SchedulerOutput.make_empty())


def produced(side: SchedulerConnector, name: str = "r") -> str:
    side.new_request(request(PRODUCE, name))
    (expect,) = orders(side).expects
    return expect.prompt_digest


def consumed(side: SchedulerConnector) -> str:
    asked = request(CONSUME)
    side.new_request(asked)
    side.consumptions.after_alloc(asked, ([1, 2, 3],), TOKENS - 1)
    (receive,) = orders(side).receives
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
        side.new_request(request(PRODUCE | {"transfer_id": "u"}, "b"))
        (expect,) = orders(side).expects
        assert expect.prompt_digest != before
    finally:
        engine.close()
