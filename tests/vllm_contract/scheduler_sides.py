"""Scheduler sides without engines, and requests with a transfer."""

from __future__ import annotations

from typing import Any

from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request, RequestStatus

from connectors.planning.layout import Group, GroupKind
from connectors.protocol.params import EngineAddress
from connectors.vllm_hma.config import parse_config
from connectors.vllm_hma.orders import Orders
from connectors.vllm_hma.scheduler_side.scheduler import SchedulerConnector

BLOCK, TOKENS = 16, 40
PRODUCER = EngineAddress("p", "h", 9)
PRODUCE = {"do_remote_decode": True, "transfer_id": "t"}
CONSUME = {"do_remote_prefill": True, "transfer_id": "t", "remote_engine_id": "p", "remote_host": "h", "remote_port": 9}


def scheduler(whole_images: bool = False) -> SchedulerConnector:
    """Return a scheduler side with one group of full attention and steps of 100 tokens."""
    groups = (Group(0, GroupKind.FULL, BLOCK, None, ()),)
    return SchedulerConnector(parse_config({}), "c", 1, groups, 100, whole_images=whole_images)


def request(
    params: dict[str, Any],
    name: str = "r",
    tokens: int = TOKENS,
    images: tuple[str, ...] = (),
    offset: int = 4,
    length: int = 8,
    lora: LoRARequest | None = None,
) -> Request:
    """Return a request with these images, one after the other from ``offset`` on."""
    features = [
        MultiModalFeatureSpec(None, "image", image, PlaceholderRange(offset + index * length, length))
        for index, image in enumerate(images)
    ]
    sampling = SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": params})
    return Request(name, [9] * tokens, sampling, None, mm_features=features, lora_request=lora)


def orders(side: SchedulerConnector) -> Orders:
    return side.orders(SchedulerOutput.make_empty())


def start(side: SchedulerConnector, asked: Request) -> Orders:
    """Add a request, with blocks if it receives KV; return the orders."""
    side.new_request(asked)
    if side.consumptions.consumes(asked.request_id):
        side.consumptions.after_alloc(asked, ([1, 2, 3],), asked.num_prompt_tokens - 1)
    return orders(side)


def leave(side: SchedulerConnector, one: Request) -> None:
    one.status = RequestStatus.FINISHED_ABORTED
    side.finished(one)
